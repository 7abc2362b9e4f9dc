import math
import statistics
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.metrics.arrays import deviation_measured
from holdfast.metrics.summary import format_mean, mean_and_deviation


def test_mean_and_deviation_leave_out_unknown_values():
    mean, deviation = mean_and_deviation([53.0, None, 54.0, math.nan, 55.5])
    assert mean == pytest.approx(statistics.mean([53, 54, 55.5]))
    assert deviation == pytest.approx(statistics.stdev([53, 54, 55.5]))


def test_what_cannot_be_computed_is_none_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mean_and_deviation([]) == (None, None)
        assert mean_and_deviation([None, 2.0]) == (2.0, None)
        assert mean_and_deviation([1.0, math.inf]) == (math.inf, None)


def test_deviation_over_the_last_axis():
    values = np.array([[1.0, 3.0, np.nan], [np.nan, 7.0, np.nan], [np.nan] * 3])
    np.testing.assert_allclose(deviation_measured(values), [np.sqrt(2), np.nan, np.nan])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_agreement_with_the_standard_library(values):
    mean, deviation = mean_and_deviation(values)
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert deviation == pytest.approx(statistics.stdev(values), abs=1e-9)


def test_text():
    assert format_mean(87.306, 0.424) == "87.31 ± 0.42"
    assert format_mean(87.306, None, 1) == "87.3"
    assert format_mean(14.0, 0.0, 0) == "14 ± 0"
    assert format_mean(None, None) == "–"
