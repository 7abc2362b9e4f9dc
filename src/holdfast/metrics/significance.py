"""Whether one method beats another by more than chance over the same seeds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from holdfast.metrics.arrays import agree, as_array

_ROUNDING = 1e-12


def paired_test(a: ArrayLike, b: ArrayLike) -> tuple[float, float | None]:
    """Mean difference of two methods over shared seeds, and how likely chance alone makes one as large.

    Two-sided paired t-test: d = a − b, t = mean(d) / (std(d) / √S) with S − 1 degrees of freedom.

    Args:
        a: [S], one result for each seed.
        b: [S], the other method's results for the same seeds in the same order; pairs with NaN are left out.

    Returns:
        The mean of a − b (NaN without a pair), and the p-value: None for fewer than 2 pairs, which allow no
        test; when all differences are equal, 1 if they are zero and 0 if not.
    """
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
    scaled = differences / np.abs(differences).max()  # of which t does not depend, but underflow does
    t = scaled.mean() / (scaled.std(ddof=1) / len(scaled) ** 0.5)
    return mean, _beyond(abs(float(t)), len(differences) - 1)


def _beyond(t: float, freedom: int) -> float:
    """The share of Student's distribution that lies beyond ±t: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    A finite sum, since degrees of freedom are whole numbers here; importing scipy takes longer than a short run.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    within = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + within) if odd else within))
