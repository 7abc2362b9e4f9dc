"""Measures of heterogeneity against SciPy and definitions, and the nearest regime."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import jensenshannon

from holdfast.core.errors import HoldfastError
from holdfast.data.diagnosis import (
    REGIMES,
    diagnose,
    imbalance_ratio,
    label_skew,
    missing_classes,
    nearest_regime,
    quantity_gini,
)

tables = arrays(
    np.int64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.integers(0, 40)
).filter(lambda table: table.any())


@settings(deadline=None)
@given(tables)
def test_label_skew_is_scipys_jensen_shannon_distance(table):
    distances = [jensenshannon(row, table.sum(0), base=2) for row in table if row.any()]
    assert label_skew(table) == pytest.approx(np.nan_to_num(distances).mean(), abs=1e-6)


@settings(deadline=None)
@given(tables)
def test_gini_is_half_the_relative_mean_difference(table):
    sizes = table.sum(1)
    difference = np.abs(sizes[:, None] - sizes[None]).mean()
    assert quantity_gini(table) == pytest.approx(difference / (2 * sizes.mean()), abs=1e-12)


def test_extremes():
    assert label_skew([[5, 5], [50, 50]]) == pytest.approx(0, abs=1e-7)
    assert quantity_gini([[5, 5], [10, 0]]) == 0
    assert quantity_gini([[0, 0]] * 99 + [[1, 0]]) == pytest.approx(0.99)
    # Two of a hundred clients with a class of their own are almost as far from the rest as can be.
    assert label_skew(np.eye(100, dtype=int)) > 0.95


def test_diagnose_returns_all_measures():
    told = diagnose([[10, 0, 0], [5, 5, 0], [0, 0, 0], [0, 0, 2]])
    assert told["clients"] == 4
    assert told["classes"] == 3
    assert told["samples"] == 22
    assert told["empty_clients"] == 1
    assert told["imbalance_ratio"] == 7.5
    assert told["missing_classes"] == pytest.approx((2 + 1 + 2) / 3)
    assert imbalance_ratio([[4, 0], [4, 0]]) == 1
    assert missing_classes([[4, 0], [4, 0]]) == 1


@pytest.mark.parametrize(
    "table", [[1, 2], [[-1, 2]], [[0, 0]], [[0.5, 1]], [[float("nan"), 1]], [["a"]], [[]]]
)
def test_invalid_label_counts_raise_errors(table):
    with pytest.raises(HoldfastError, match="label counts"):
        diagnose(table)


@pytest.mark.parametrize(
    "name", ["cifar10 iid", "cifar10 s=2", "cifar10 dirichlet 0.1", "cifar10 stream s=4"]
)
def test_a_regime_is_nearest_to_itself(name):
    regime = next(regime for regime in REGIMES if regime.name == name)
    found = nearest_regime(regime.label_counts(), streaming=regime.tasks > 1)
    assert found["regime"] == name
    assert found["distance"] == pytest.approx(0, abs=1e-9)


def test_a_federation_finds_its_regime():
    # Ten classes, two a client, all equal: FedNTD's s=2, which has a few clients with one class only.
    table = np.zeros((50, 10), int)
    for k in range(50):
        table[k, [k % 10, (k + 1 + k // 10) % 10]] = 100
    found = nearest_regime(table)
    assert found["regime"] in ("cifar10 s=2", "cinic10 s=2")
    assert "stream" in nearest_regime(table, streaming=True)["regime"]
    assert "FedNTD" in found["source"]


def test_imbalance_alone_increases_the_distance():
    assert nearest_regime([[10_000, 1000, 100]] * 10)["distance"] > 0.8
    assert nearest_regime([[1000, 1000, 1000]] * 10)["distance"] < 0.1


def test_regimes_have_the_published_numbers_of_samples():
    counts = {regime.name: regime.label_counts() for regime in REGIMES}
    assert len(counts) == len(REGIMES)
    assert counts["cifar10 s=2"].shape == (100, 10)
    assert (counts["cifar10 s=2"].sum(1) == 500).all()
    assert counts["cinic10 s=2"].sum() == 90_000
    assert counts["cifar10 stream s=2"].shape == (20, 10)
    assert counts["cifar10 stream s=2"].sum(0).tolist() == [
        int(5000 * 0.5 ** (i / 9) + 1e-9) for i in range(10)
    ]
