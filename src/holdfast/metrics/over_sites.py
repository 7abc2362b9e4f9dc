"""A metric that is measured at several sites: its means, its worst value and its spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.metrics.arrays import (
    FloatArray,
    agree,
    as_array,
    as_counts,
    deviation_measured,
    divide,
    mean_measured,
)


def sample_mean(values: ArrayLike, samples: ArrayLike) -> float:
    """Mean over sites, weighted by their samples, of the sites that measured the metric: Σ_k n_k v_k / Σ_k n_k.

    Args:
        values: [K], the metric at each site; NaN where it is not defined.
        samples: [K], the samples on which it was measured.

    Returns:
        NaN if no site measured it.

    Source: federated evaluation as in McMahan et al., AISTATS 2017.
    """
    v, n = _checked(values, samples)
    known = ~np.isnan(v)
    return float(divide((np.where(known, v, 0.0) * n).sum(), n[known].sum()))


def site_mean(values: ArrayLike) -> float:
    """Mean over the sites that measured the metric, each counting the same.

    Args:
        values: [K], the metric at each site; NaN where it is not defined.

    Returns:
        NaN if no site measured it.
    """
    return float(mean_measured(as_array(values, "values", "K")))


def site_spread(values: ArrayLike) -> float:
    """Sample standard deviation over the sites that measured the metric.

    Args:
        values: [K], the metric at each site; NaN where it is not defined.

    Returns:
        NaN for fewer than 2 sites.
    """
    return float(deviation_measured(as_array(values, "values", "K")))


def worst_site(values: ArrayLike, less_is_better: bool = False) -> int | None:
    """The site with the worst value, the first of equal ones.

    Args:
        values: [K], the metric at each site; NaN where it is not defined.
        less_is_better: whether the metric is an error.

    Returns:
        Its index; None if no site measured the metric.
    """
    v = as_array(values, "values", "K")
    if np.isnan(v).all():
        return None
    return int(np.nanargmax(v) if less_is_better else np.nanargmin(v))


def _checked(values: ArrayLike, samples: ArrayLike) -> tuple[FloatArray, FloatArray]:
    v, n = as_array(values, "values", "K"), as_counts(samples, "samples", "K")
    agree("sites", values=len(v), samples=len(n))
    return v, n
