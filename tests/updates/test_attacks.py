"""Attacks: who attacks, and what arrives instead of the honest update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.updates.attacks import KINDS, Backdoor, largest_hidden, marked_test, parse_attack
from holdfast.updates.noise import gaussian

ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4)))
CLIENTS, HOSTILE = [3, 4, 6, 8, 9], [False, True, False, False, True]


def changed(written: str) -> np.ndarray:
    result = parse_attack(written).changed(ROWS, CLIENTS, HOSTILE, 7, 2).numpy()
    np.testing.assert_array_equal(result[[0, 2, 3]], ROWS.numpy()[[0, 2, 3]])
    return result[[1, 4]]


def test_updates_of_attackers() -> None:
    mine = ROWS.numpy()[[1, 4]]
    np.testing.assert_array_equal(changed("sign-flip:0.2"), -mine)
    np.testing.assert_array_equal(changed("sign-flip:0.2,scale=3"), -3 * mine)
    np.testing.assert_array_equal(changed("scaled:share=0.2,scale=5"), 5 * mine)
    np.testing.assert_array_equal(changed("backdoor:0.2,scale=4"), 4 * mine)
    drawn = [gaussian(ROWS[0], 7, "attack noise", 2, client).numpy() for client in (4, 9)]
    np.testing.assert_array_equal(changed("gaussian:0.2,std=0.5"), 0.5 * np.array(drawn))


def test_a_little_is_enough() -> None:
    """Baruch et al., 2019, Algorithm 3."""
    rows = ROWS.numpy()
    z = norm.ppf((5 - 2 - (5 // 2 + 1 - 2)) / (5 - 2))
    expected = rows.mean(0) - z * rows.std(0)
    np.testing.assert_allclose(changed("little-is-enough:0.4"), [expected, expected], rtol=1e-12)
    np.testing.assert_allclose(changed("little-is-enough:0.4,z=1.5")[0], rows.mean(0) - 1.5 * rows.std(0))
    assert largest_hidden(50, 24) == pytest.approx(norm.ppf((50 - 24 - 2) / (50 - 24)))  # the paper's example
    assert np.isfinite([largest_hidden(n, m) for n in range(1, 9) for m in range(1, n + 1)]).all()


def test_attackers_are_drawn_by_the_seed() -> None:
    attack = parse_attack("sign-flip:0.2")
    assert len(attack.attackers(20, 0)) == 4
    assert attack.attackers(20, 0) == attack.attackers(20, 0) != attack.attackers(20, 1)
    assert len(parse_attack("sign-flip:0.01").attackers(20, 0)) == 1


def test_flipped_labels() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 9])
    flipped = parse_attack("label-flip:0.2").poisoned(x, y, 10, x.max(), 0, 0)
    assert flipped[1].tolist() == [9, 8, 0]


def test_a_backdoor_marks_and_relabels_a_part() -> None:
    x, y = torch.zeros(8, 1, 5, 5, dtype=torch.uint8), torch.arange(8)
    attack = Backdoor(0.5, target=3, size=2, samples=0.25)
    poisoned_x, poisoned_y = attack.poisoned(x, y, 10, torch.tensor(200), 0, 1)
    touched = (poisoned_x.flatten(1) > 0).any(1)
    assert int(touched.sum()) == 2
    assert (poisoned_x[touched][:, 0, -2:, -2:] == 200).all()
    assert int((poisoned_x[touched] > 0).sum()) == 2 * 4
    assert (poisoned_y[touched] == 3).all()
    assert torch.equal(poisoned_y[~touched], y[~touched])
    assert not x.any()  # the given samples are not changed
    table = attack.marked(torch.zeros(2, 6), torch.tensor(1.0))
    assert table.tolist() == [[0, 0, 0, 0, 1, 1]] * 2


def test_the_test_of_a_backdoor_has_no_sample_of_the_target() -> None:
    x, y = np.zeros((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2])
    marked = marked_test(Backdoor(0.5, target=1, size=1), Dataset.from_arrays(x + 7, y, x, y))
    assert marked.y_test.tolist() == [1] * 4
    assert marked.x_test.tolist() == [[0, 0, 0, 7]] * 4


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("sign-flip", "attack sign-flip needs share, such as sign-flip:0.2"),
        ("sign-flip:0", "sign-flip: share is 0.0; it must be above 0 and at most 1"),
        ("sign-flp:0.2", "unknown attack 'sign-flp'; did you mean sign-flip"),
        ("scaled:0.2,std=1", "unknown option of scaled 'std'"),
    ],
)
def test_wrong_options_are_sentences(written: str, sentence: str) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        parse_attack(written)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_descriptions_come_back(name: str) -> None:
    attack = parse_attack(f"{name}:0.3")
    assert parse_attack(attack.describe()) == attack
