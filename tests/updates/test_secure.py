"""The arithmetic of secure aggregation, compared with Python's whole numbers and fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.updates.secure import (
    FixedPoint,
    MaskedSum,
    SecAggPlus,
    flatten,
    in_dtype,
    layout_of,
    parse_secure,
    unflatten_vector,
)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("parties", [2, 3, 16, 100])
def test_sums_of_whole_multiples_are_exact_and_do_not_overflow(bits: int, parties: int) -> None:
    """All values at the ends of the range: the sum is that of Python's fractions, within half a step each."""
    grid = FixedPoint(bits, 8.0, parties)
    step = Fraction(grid.step)
    assert step.numerator == 1 or step.denominator == 1
    assert step.denominator & (step.denominator - 1) == 0
    ends = min(8.0 - 1.001 * grid.step, 8.0 * (1 - 2.0**-52))
    rows = np.random.default_rng(1).uniform(-ends, ends, (parties, 50))
    rows[:, 0], rows[:, 1] = ends, -ends
    total = torch.zeros(50, dtype=torch.int64)
    for row in rows:
        total = grid.reduce(total + grid.encode(torch.from_numpy(row)))
    exact = [sum(Fraction(value) for value in column) for column in rows.T]
    errors = [abs(float(value) - float(true)) for value, true in zip(grid.decode(total), exact, strict=True)]
    assert max(errors) <= grid.error(parties) + 1e-15 * parties * 8
    assert bits == 64 or max(errors) > grid.error(1) / 2  # the bound is not far from what happens


def test_a_value_out_of_range_is_refused() -> None:
    grid = FixedPoint(32, 4.0, 10)
    for value in (4.0, -4.0, 1e30, float("inf"), float("nan")):
        with pytest.raises(HoldfastError, match=r"a value of .* is to be uploaded, and range is 4"):
            grid.encode(torch.tensor([0.0, value]))
    assert grid.encode(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("bits", [32, 64])
def test_masks_cancel_also_where_clients_are_lost(bits: int) -> None:
    secure = SecAggPlus(bits=bits, threshold=0.6)
    grid = secure.grid(10)
    rng = np.random.default_rng(2)
    vectors = {client: torch.from_numpy(rng.integers(-99, 99, 20)) for client in range(5, 15)}
    for lost in ((), (5,), (14,), (7, 8), (5, 9, 14)):
        masked = MaskedSum(secure, grid, list(vectors), seed=3, round=4)
        for client, vector in vectors.items():
            if client not in lost:
                masked.add(client, vector)
        assert masked.suffices
        expected = sum(vector for client, vector in vectors.items() if client not in lost)
        assert torch.equal(masked.unmasked(), expected)


def test_what_one_client_adds_is_uniform() -> None:
    """Kolmogorov-Smirnov against the uniform distribution: a vector of zeros is not to be told from any other."""
    from scipy.stats import kstest

    secure = SecAggPlus()
    masked = MaskedSum(secure, secure.grid(3), [0, 1, 2], seed=1, round=1)
    masked.add(1, torch.zeros(4000, dtype=torch.int64))
    assert masked.total is not None
    shares = masked.total.double() / 2.0**64 + 0.5
    assert kstest(shares.numpy(), "uniform").pvalue > 1e-3
    again = MaskedSum(secure, secure.grid(3), [0, 1, 2], seed=1, round=2)
    again.add(1, torch.zeros(4000, dtype=torch.int64))
    assert not torch.equal(masked.total, again.total)


def test_thresholds() -> None:
    """Counted by hand: shares of the neighbourhood, rounded up, at least two."""
    assert [SecAggPlus().threshold_of(n) for n in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    assert SecAggPlus(threshold=1.0).threshold_of(7) == 7
    sparse = SecAggPlus(neighbours=4)
    assert sparse.threshold_of(100) == 3
    assert sparse.neighbourhood(0, 100) == [0, 1, 2, 98, 99]
    assert sparse.neighbourhood(3, 4) == [0, 1, 2, 3]
    assert sparse.suffice(range(1, 100), 100)
    assert not sparse.suffice({*range(100)} - {4, 5, 6}, 100)  # of 3 to 7 two are left
    assert not SecAggPlus().suffice({0, 1}, 4)


def test_vectors_keep_shapes_and_dtypes() -> None:
    tree = {"a/b": torch.ones(2, 3), "n": torch.tensor(7), "empty": torch.zeros(0, 4, dtype=torch.float64)}
    layout = layout_of(tree)
    found = in_dtype(unflatten_vector(flatten(tree), layout), layout)
    for path, value in tree.items():
        assert torch.equal(found[path], value)
        assert found[path].dtype == value.dtype


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("secagg", "unknown secure aggregation 'secagg'; did you mean secagg"),
        ("secagg+:threshold=0.5", r"threshold is 0.5; it must be above 0.5 and at most 1"),
        ("secagg+:neighbours=3", "neighbours is 3; it must be even"),
        ("secagg+:bits=16", "bits is 16; it must be 32 or 64"),
        ("secagg+:range=0", "range is 0.0; it must be above 0"),
    ],
)
def test_odd_settings_are_refused(written: str, sentence: str) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        parse_secure(written)


def test_settings_are_written_in_three_ways() -> None:
    assert parse_secure("secagg+:0.8,bits=32") == SecAggPlus(0.8, bits=32)
    assert parse_secure(SecAggPlus(0.8).describe()) == SecAggPlus(0.8)
    assert parse_secure(SecAggPlus()) == SecAggPlus()
