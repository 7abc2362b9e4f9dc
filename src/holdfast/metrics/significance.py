"""Significance of the difference between two methods over the same seeds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.metrics.arrays import agree, as_array

_ROUNDING = 1e-12


def paired_test(a: ArrayLike, b: ArrayLike, resampled: float = 0.0) -> tuple[float, float | None]:
    """Mean difference of two methods over shared seeds, and the p-value of a two-sided paired t-test.

    d = a − b, t = mean(d) / (std(d) √(1/S + r)) with S − 1 degrees of freedom

    Args:
        a: [S], one result for each seed.
        b: [S], the other method's results for the same seeds in the same order; pairs with NaN are left out.
        resampled: r, the ratio of test to training samples where each seed has a random split of the same samples.
            Such results depend on each other; the correction is that of Nadeau and Bengio, 2003.

    Returns:
        The mean of a − b (NaN without a pair), and the p-value: None for fewer than 2 pairs, which allow no
        test; when all differences are equal, 1 if they are zero and 0 if not.
    """
    from scipy.special import stdtr  # takes longer to import than the rest of this package

    first, second = as_array(a, "a", "S"), as_array(b, "b", "S")
    agree("S", a=len(first), b=len(second))
    complete = ~np.isnan(first) & ~np.isnan(second)
    first, second = first[complete], second[complete]
    if not first.size:
        return float("nan"), None
    differences = first - second
    mean = float(differences.mean())
    if differences.size < 2:
        return mean, None
    negligible = _ROUNDING * float(np.abs([first, second]).max())
    if float(np.ptp(differences)) <= negligible:
        return mean, 1.0 if abs(mean) <= negligible else 0.0
    scaled = differences / np.abs(differences).max()  # leaves t as it is and prevents underflow
    pairs = len(scaled) / (1 + resampled * len(scaled))  # independent ones: 1 / (1/S + r)
    t = scaled.mean() / (scaled.std(ddof=1) / pairs**0.5)
    return mean, float(2 * stdtr(len(scaled) - 1, -abs(t)))


def holm(p_values: ArrayLike) -> np.ndarray:
    """p-values corrected for several tests at once.

    The i-th smallest of m, p_(i), becomes max_{j ≤ i} min(1, (m − j + 1) p_(j)).

    Args:
        p_values: [m].

    Returns:
        [m], in the order of the arguments.

    Source: Holm, 1979.
    """
    given = as_array(p_values, "p_values", "m")
    order = np.argsort(given, kind="stable")
    factors = np.arange(len(given), 0, -1)
    corrected = np.empty(len(given))
    corrected[order] = np.minimum(1, np.maximum.accumulate(factors * given[order]))
    return corrected
