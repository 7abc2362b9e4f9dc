"""Robust means against NumPy written from their papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from holdfast.core.errors import HoldfastError
from holdfast.updates.robust import KINDS, RobustMean, parse_robust

ROWS = np.random.default_rng(0).normal(size=(11, 6)) + np.r_[np.zeros((8, 6)), 5 * np.ones((3, 6))]


def estimated(written: str, rows: np.ndarray = ROWS) -> np.ndarray:
    mean, values = parse_robust(written), torch.from_numpy(rows)
    return mean.estimate(values, mean.weights(values)).numpy()


def scores(rows: np.ndarray, attackers: int) -> np.ndarray:
    """Krum's s(i): the sum over the n - f - 2 nearest others (Blanchard et al., 2017)."""
    n, found = len(rows), []
    for i in range(n):
        others = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(n) if j != i)
        found.append(sum(others[: max(1, n - attackers - 2)]))
    return np.array(found)


@pytest.mark.parametrize("count", [10, 11])
def test_median(count: int) -> None:
    np.testing.assert_allclose(estimated("median", ROWS[:count]), np.median(ROWS[:count], 0), rtol=1e-12)


def test_trimmed_mean() -> None:
    expected = np.sort(ROWS, 0)[3:-3].mean(0)  # ⌈0.2 · 11⌉ = 3 at each end
    np.testing.assert_allclose(estimated("trimmed-mean:share=0.2"), expected, rtol=1e-12)
    np.testing.assert_allclose(estimated("trimmed-mean:0.01"), np.sort(ROWS, 0)[1:-1].mean(0), rtol=1e-12)


def test_krum() -> None:
    np.testing.assert_allclose(estimated("krum:attackers=3"), ROWS[scores(ROWS, 3).argmin()], rtol=1e-12)


def test_multi_krum() -> None:
    best = np.argsort(scores(ROWS, 3))
    np.testing.assert_allclose(estimated("multi-krum:3"), ROWS[best[:8]].mean(0), rtol=1e-12)
    np.testing.assert_allclose(estimated("multi-krum:attackers=3,keep=4"), ROWS[best[:4]].mean(0), rtol=1e-12)
    weights = parse_robust("multi-krum:3").weights(torch.from_numpy(ROWS))
    assert set(torch.nonzero(weights == 0).flatten().tolist()) == {8, 9, 10}  # the three that are far away


def test_bulyan() -> None:
    """El Mhamdi et al., 2018: θ = n - 2f choices of Krum, then the mean of the θ - 2f values nearest to the median."""
    attackers, left, chosen = 2, list(range(11)), []
    for _ in range(11 - 4):
        chosen.append(left.pop(int(scores(ROWS[left], attackers).argmin())))
    kept = ROWS[chosen]
    expected = []
    for values in kept.T:
        nearest = sorted(values, key=lambda v: abs(v - np.median(values)))[: 7 - 4]
        expected.append(np.mean(nearest))
    np.testing.assert_allclose(estimated("bulyan:2"), expected, rtol=1e-12)


def test_geometric_median() -> None:
    best = minimize(lambda v: np.linalg.norm(ROWS - v, axis=1).sum(), np.median(ROWS, 0), tol=1e-12).x
    np.testing.assert_allclose(estimated("geometric-median"), best, atol=1e-4)


def test_norm_bound() -> None:
    norms = np.linalg.norm(ROWS, axis=1)
    bound = 0.8 * np.median(norms)
    expected = (ROWS * np.minimum(1, bound / norms)[:, None]).mean(0)
    np.testing.assert_allclose(estimated("norm-bound:0.8"), expected, rtol=1e-12)


def test_centred_clipping() -> None:
    point = np.zeros(6)
    for _ in range(3):
        away = ROWS - point
        norms = np.linalg.norm(away, axis=1)
        point = point + (away * np.minimum(1, np.median(norms) / norms)[:, None]).mean(0)
    np.testing.assert_allclose(estimated("centred-clipping"), point, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_equal_updates_are_their_mean_and_order_does_not_matter(name: str) -> None:
    equal = np.tile(ROWS[:1], (11, 1))
    np.testing.assert_allclose(estimated(name, equal), ROWS[0], rtol=1e-6)
    shuffled = np.random.default_rng(1).permutation(ROWS)
    np.testing.assert_allclose(estimated(name, shuffled), estimated(name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_one_huge_update_does_not_move_it_far(name: str) -> None:
    honest = ROWS[:8]
    hostile = np.r_[honest, 1e6 * np.ones((1, 6))]
    assert np.linalg.norm(estimated(name, hostile)) < 2 * np.linalg.norm(honest, axis=1).max()


def test_too_few_updates_are_a_sentence() -> None:
    def fails(mean: RobustMean, clients: int) -> str:
        with pytest.raises(HoldfastError) as error:
            mean.check(clients)
        mean.check(mean.needed(clients))
        return str(error.value)

    assert "krum:attackers=2 needs 7 updates in a round, but there are 6" in fails(parse_robust("krum:2"), 6)
    assert "bulyan:attackers=2 needs 11" in fails(parse_robust("bulyan:attackers=2"), 10)
    with pytest.raises(HoldfastError, match=r"trimmed-mean:share=0.4 needs 5 updates .* there are 4"):
        parse_robust("trimmed-mean:0.4").check(4)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("krumm", "unknown robust mean 'krumm'; did you mean krum"),
        ("krum:attackers=0", "krum: attackers is 0; it must be at least 1"),
        ("trimmed-mean:share=0.5", "trimmed-mean: share is 0.5; it must be above 0 and below 0.5"),
        ("median:3", "median has no options"),
    ],
)
def test_wrong_options_are_sentences(written: str, sentence: str) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        parse_robust(written)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_descriptions_come_back(name: str) -> None:
    assert parse_robust(parse_robust(name).describe()) == parse_robust(name)
