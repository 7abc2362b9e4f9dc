"""Mean and standard deviation over repetitions, such as seeds: as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable

from holdfast.metrics.arrays import as_array, deviation_measured, mean_measured

UNKNOWN = "–"


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the known values; None and NaN are unknown.

    Returns:
        The mean, None if no value is known; the deviation (divisor n − 1), None for fewer than 2 known values
        and for an infinite mean.
    """
    array = as_array(list(values), "values", "S")
    mean, deviation = float(mean_measured(array)), float(deviation_measured(array))
    return _none_if_nan(mean), _none_if_nan(deviation)


def format_mean(mean: float | None, deviation: float | None, digits: int = 2) -> str:
    """``87.31 ± 0.42``; ``87.31`` without a deviation; a dash without a mean."""
    if mean is None:
        return UNKNOWN
    spread = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{mean:.{digits}f}{spread}"


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
