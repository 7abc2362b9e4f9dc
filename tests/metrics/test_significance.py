import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from scipy.special import betainc
from scipy.stats import ttest_rel

from holdfast.core.errors import HoldfastError
from holdfast.metrics import holm, paired_test

results = arrays(np.float64, st.integers(2, 25), elements=st.floats(0, 1, width=16))


def p_by_definition(differences):
    """Two-sided p of Student's t by the regularised incomplete beta function."""
    n = len(differences)
    t = differences.mean() / (differences.std(ddof=1) / np.sqrt(n))
    return betainc((n - 1) / 2, 0.5, (n - 1) / (n - 1 + t * t))


def test_by_hand():
    # d = 1, 2, 3: mean 2, std 1, t = 2 sqrt(3); for 2 degrees p = 1 - t / sqrt(t^2 + 2)
    difference, p = paired_test([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert difference == pytest.approx(2.0)
    assert p == pytest.approx(1 - np.sqrt(12 / 14))


def test_two_seeds_are_tested_with_one_degree_of_freedom():
    a, b = [0.81, 0.86], [0.79, 0.80]
    difference, p = paired_test(a, b)
    assert difference == pytest.approx(0.04)
    assert p == pytest.approx(ttest_rel(a, b).pvalue)
    assert 0.2 < p < 0.4


def test_too_few_seeds_allow_no_test():
    assert paired_test([0.5], [0.25]) == (0.25, None)
    difference, p = paired_test([], [])
    assert np.isnan(difference)
    assert p is None


def test_results_of_random_splits_depend_on_each_other():
    """Nadeau and Bengio's corrected t: the variance is that of 1 / (1/S + r) pairs; degrees of freedom stay S - 1."""
    a, b = np.array([0.61, 0.64, 0.60, 0.66]), np.array([0.60, 0.61, 0.61, 0.62])
    d = a - b
    t = d.mean() / np.sqrt((1 / 4 + 0.1 / 0.9) * d.var(ddof=1))
    difference, p = paired_test(a, b, resampled=0.1 / 0.9)
    assert difference == pytest.approx(d.mean())
    assert p == pytest.approx(2 * stats.t.sf(t, 3))
    assert p > paired_test(a, b)[1]


def test_holm():
    # By hand: 0.01 * 4, then 0.03 * 2 after 0.02 * 3, and 0.04 * 1 not below the one before.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.6]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


def test_equal_differences():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paired_test([0.5, 0.7], [0.5, 0.7]) == (0.0, 1.0)
        difference, p = paired_test([0.3, 0.4, 0.5], [0.2, 0.3, 0.4])  # 0.1 thrice, up to rounding
    assert difference == pytest.approx(0.1)
    assert p == 0.0
    assert paired_test([0.1 + 0.2, 0.0], [0.3, 0.0])[1] == 1.0  # 0 twice, up to rounding


def test_seeds_that_failed_are_left_out():
    assert paired_test([2.0, 9.0, 4.0, 6.0], [1.0, np.nan, 2.0, 3.0]) == paired_test([2, 4, 6], [1, 2, 3])


def test_seeds_must_match():
    with pytest.raises(HoldfastError, match="agree on S"):
        paired_test([1.0, 2.0], [1.0])


@given(
    results.flatmap(lambda a: st.tuples(st.just(a), arrays(np.float64, a.shape, elements=st.floats(0, 1))))
)
def test_symmetry_and_agreement_with_the_definition(pair):
    a, b = pair
    difference, p = paired_test(a, b)
    assert 0 <= p <= 1
    mirrored, same = paired_test(b, a)
    assert mirrored == pytest.approx(-difference)
    assert same == pytest.approx(p)
    assert paired_test(a[::-1], b[::-1])[1] == pytest.approx(p)
    if np.ptp(a - b) > 1e-6:
        assert p == pytest.approx(p_by_definition(a - b), abs=1e-9)
