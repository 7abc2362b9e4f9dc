"""Forgetting by class: over a run, from round to round, and during local training.

A[t, c] is the accuracy of the global model on test samples of class c after round t. Classes without test
samples are NaN and are left out of the means over classes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray, agree, as_array, mean_measured, unit_vectors


def backward_transfer_forgetting(class_accuracy: ArrayLike) -> float:
    """Mean over classes of the best earlier accuracy minus the final accuracy (B1).

    F = (1/C) Σ_c ( max_{t<T} A[t, c] − A[T, c] )

    Args:
        class_accuracy: [T, C], rounds 1 to T without the untrained model; T of at least 2.

    Returns:
        In [−1, 1] for fractions; 0 or below when every class ends at its best.

    Source: FedNTD (Lee et al., NeurIPS 2022) Eq. 5; Flashback Eq. 2, which prints arg max for max.
    """
    accuracy = as_array(class_accuracy, "class_accuracy", "T C")
    if len(accuracy) < 2:
        raise HoldfastError(f"class_accuracy must hold at least 2 rounds, not {len(accuracy)}")
    return float(mean_measured(accuracy[:-1].max(axis=0) - accuracy[-1]))


def round_forgetting(class_accuracy: ArrayLike) -> FloatArray:
    """Accuracy lost in each round, as a mean over classes that does not offset losses with gains (B2).

    F[t] = (1/C) Σ_c max(0, A[t−1, c] − A[t, c])

    Args:
        class_accuracy: [T, C].

    Returns:
        [T−1], for rounds 2 to T; in [0, 1] for fractions.

    Source: Flashback section 3. Its printed min(0, −(A[t] − A[t−1])) would count gains.
    """
    accuracy = as_array(class_accuracy, "class_accuracy", "T C")
    return mean_measured(np.maximum(accuracy[:-1] - accuracy[1:], 0.0))


def local_forgetting(global_before: ArrayLike, local_after: ArrayLike) -> FloatArray:
    """Accuracy lost in local training, as a mean over classes that does not offset losses with gains (B3).

    F[k] = (1/C) Σ_c max(0, A[t−1, c] − A[k, t, c])

    Args:
        global_before: [C], class accuracy of the global model before local training.
        local_after: [K, C], class accuracy of each client's model after local training.

    Returns:
        [K]; in [0, 1] for fractions.

    Source: Flashback section 3.
    """
    before, after = _before_and_after(global_before, local_after)
    return mean_measured(np.maximum(before - after, 0.0))


def forgetting_degree(global_before: ArrayLike, local_after: ArrayLike, xi: float = 1e-5) -> FloatArray:
    """The share of its accuracy that each class loses in local training (B4).

    τ[k, c] = (A[t−1, c] − A[k, t, c]) / (A[t−1, c] + ξ)

    Args:
        global_before: [C], class accuracy of the global model before local training.
        local_after: [K, C], class accuracy of each client's model after local training.
        xi: ξ, the small constant that keeps the division finite; the paper gives no value.

    Returns:
        [K, C], in (−∞, 1]: 1 means forgotten completely, below 0 means improved. For a class on which the global
        model has an accuracy near 0, the value is a large negative number.

    Source: FedKA (Chen et al., 2024) Eq. 1.
    """
    if not xi > 0:
        raise HoldfastError(f"xi must be above 0, not {xi}")
    before, after = _before_and_after(global_before, local_after)
    return np.asarray((before - after) / (before + xi))


def prediction_consistency(class_accuracy: ArrayLike) -> FloatArray:
    """Similarity of the class accuracies of consecutive rounds (B6).

    cos(A[t], A[t−1]) of vectors over C classes; 0 where one of them is zero

    Args:
        class_accuracy: [T, C].

    Returns:
        [T−1], for rounds 2 to T; in [0, 1], near 1 when the same classes stay accurate.

    Source: FedNTD section 2.1, Fig. 2b.
    """
    accuracy = as_array(class_accuracy, "class_accuracy", "T C")
    profile = unit_vectors(np.where(np.isnan(accuracy), 0.0, accuracy))
    return np.asarray((profile[:-1] * profile[1:]).sum(axis=-1))


def _before_and_after(global_before: ArrayLike, local_after: ArrayLike) -> tuple[FloatArray, FloatArray]:
    before = as_array(global_before, "global_before", "C")
    after = as_array(local_after, "local_after", "K C")
    agree("C", global_before=before.shape[-1], local_after=after.shape[-1])
    return before, after
