"""How fast a run gets where it should."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.metrics.arrays import as_array


def rounds_to_target(accuracy: ArrayLike, target: float) -> int | None:
    """The first round that reaches a target accuracy, counting from 1 (B11).

    min { t : a[t] ≥ target }

    Args:
        accuracy: [T], overall accuracy after each round; rounds without evaluation are NaN.
        target: in the same unit as ``accuracy``.

    Returns:
        1 to T, or None when no round reaches the target.

    Source: FedKA, which sets the target to FedAvg's accuracy at round 100 and calls 100 / t the speed-up;
    Flashback Table 1; FedFA Table 8.
    """
    reached = np.flatnonzero(as_array(accuracy, "accuracy", "T") >= target)
    return int(reached[0]) + 1 if reached.size else None
