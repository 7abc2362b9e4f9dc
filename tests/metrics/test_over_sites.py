"""Means, spread and worst value over sites, against arithmetic done here."""

import math

import numpy as np
import pytest

from holdfast.core.errors import HoldfastError
from holdfast.metrics.over_sites import sample_mean, site_mean, site_spread, worst_site

VALUES, SAMPLES = [0.5, math.nan, 0.9, 0.7], [10, 1000, 30, 60]


def test_sites_without_the_metric_count_for_nothing():
    assert sample_mean(VALUES, SAMPLES) == pytest.approx((5 + 27 + 42) / 100)
    assert site_mean(VALUES) == pytest.approx(0.7)
    assert site_spread(VALUES) == pytest.approx(np.std([0.5, 0.9, 0.7], ddof=1))
    assert (worst_site(VALUES), worst_site(VALUES, less_is_better=True)) == (0, 2)


def test_no_site_and_one_site():
    assert math.isnan(sample_mean([math.nan], [3]))
    assert math.isnan(site_mean([math.nan]))
    assert worst_site([math.nan]) is None
    assert site_mean([0.25]) == 0.25
    assert math.isnan(site_spread([0.25]))


def test_wrong_shapes_are_refused():
    with pytest.raises(HoldfastError, match="must agree on sites"):
        sample_mean([0.5, 0.6], [1])
