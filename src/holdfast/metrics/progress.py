"""The number of rounds that a run needs to reach an accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from holdfast.metrics.arrays import agree, as_array

TARGET_SHARE = 0.95  # of the best method's highest accuracy: the target of Flashback's Table 1


def rounds_to_target(accuracy: ArrayLike, target: float, rounds: Sequence[int] | None = None) -> int | None:
    """The first round that reaches a target accuracy (B11).

    min { t : a[t] ≥ target }

    Args:
        accuracy: [T], overall accuracy after each round; rounds without evaluation are NaN.
        target: in the same unit as ``accuracy``.
        rounds: [T], the number of each round; 1 to T by default.

    Returns:
        The round's number, or None when no round reaches the target.

    Source: FedKA, which sets the target to FedAvg's accuracy at round 100 and calls 100 / t the speed-up;
    Flashback Table 1; FedFA Table 8.
    """
    values = as_array(accuracy, "accuracy", "T")
    numbers = range(1, len(values) + 1) if rounds is None else rounds
    agree("T", accuracy=len(values), rounds=len(numbers))
    reached = np.flatnonzero(values >= target)
    return int(numbers[int(reached[0])]) if reached.size else None


def default_target(highest: Sequence[Sequence[float]]) -> float:
    """The default target of a comparison for rounds to target: 95 % of the best method's highest accuracy.

    Args:
        highest: for each method, the highest accuracy of each of its runs; errors are negative.

    Returns:
        0.95 times the largest mean over a method's runs, or 1/0.95 times if that is negative; NaN when it is unknown
        for every method.
    """
    means = [mean for of_method in highest if not np.isnan(mean := np.mean(of_method))]
    best = float(max(means, default=np.nan))
    return best / TARGET_SHARE if best < 0 else TARGET_SHARE * best
