"""Mean and standard deviation over repetitions, such as seeds: as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from holdfast.metrics.arrays import deviation_measured

UNKNOWN = "–"


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the known values; None and NaN are unknown.

    Returns:
        The mean, None if no value is known; the deviation (divisor n − 1), None for fewer than 2 known values
        and for an infinite mean.
    """
    known = np.array([value for value in values if value is not None and not math.isnan(value)])
    if not known.size:
        return None, None
    deviation = float(deviation_measured(known))
    return float(known.mean()), None if math.isnan(deviation) else deviation


def format_mean(mean: float | None, deviation: float | None, digits: int = 2) -> str:
    """``87.31 ± 0.42``; ``87.31`` without a deviation; a dash without a mean."""
    if mean is None:
        return UNKNOWN
    spread = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{mean:.{digits}f}{spread}"
