"""Summaries of the accuracy matrix of continual learning: stages trained x stages tested.

R[i, j] is the accuracy on the test samples of task j after training stage i. Leading axes, such as clients,
are kept. Tasks that were not tested are NaN and are left out of the means.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray, agree, as_array, broadcast, mean_measured


def average_accuracy(accuracy_matrix: ArrayLike) -> FloatArray:
    """Mean accuracy over all tasks after the last stage.

    ACC = (1/T) Σ_j R[T, j]

    Args:
        accuracy_matrix: [..., T, T].

    Returns:
        [...]; in [0, 1] for fractions.

    Source: Lopez-Paz and Ranzato, NeurIPS 2017, Eq. 2.
    """
    return mean_measured(_square(accuracy_matrix, stages=1)[..., -1, :])


def average_forgetting(accuracy_matrix: ArrayLike) -> FloatArray:
    """Mean loss of accuracy on the earlier tasks, from their best to the last stage.

    F = (1/(T−1)) Σ_{j<T} ( max_{i<T} R[i, j] − R[T, j] )

    Args:
        accuracy_matrix: [..., T, T]; T of at least 2.

    Returns:
        [...]; in [−1, 1] for fractions, 0 or below when nothing is forgotten.

    Source: Chaudhry et al., ECCV 2018, section 3.2.
    """
    matrix = _square(accuracy_matrix, stages=2)
    best = np.fmax.reduce(matrix[..., :-1, :-1], axis=-2)  # fmax ignores NaN
    return mean_measured(best - matrix[..., -1, :-1])


def backward_transfer(accuracy_matrix: ArrayLike) -> FloatArray:
    """Mean change of accuracy on the earlier tasks between learning them and the last stage.

    BWT = (1/(T−1)) Σ_{j<T} ( R[T, j] − R[j, j] )

    Args:
        accuracy_matrix: [..., T, T]; T of at least 2.

    Returns:
        [...]; in [−1, 1] for fractions, negative when tasks are forgotten.

    Source: Lopez-Paz and Ranzato, NeurIPS 2017, Eq. 3.
    """
    matrix = _square(accuracy_matrix, stages=2)
    learnt = np.diagonal(matrix, axis1=-2, axis2=-1)
    return mean_measured(matrix[..., -1, :-1] - learnt[..., :-1])


def forward_transfer(accuracy_matrix: ArrayLike, initial_accuracy: ArrayLike) -> FloatArray:
    """Mean gain of accuracy on each task from the stages before it.

    FWT = (1/(T−1)) Σ_{j>1} ( R[j−1, j] − b[j] )

    Args:
        accuracy_matrix: [..., T, T]; T of at least 2.
        initial_accuracy: [..., T], b, accuracy of the untrained model on each task.

    Returns:
        [...]; in [−1, 1] for fractions, positive when earlier stages help later tasks.

    Source: Lopez-Paz and Ranzato, NeurIPS 2017, Eq. 4.
    """
    matrix = _square(accuracy_matrix, stages=2)
    initial = as_array(initial_accuracy, "initial_accuracy", "... T")
    agree("T", accuracy_matrix=matrix.shape[-1], initial_accuracy=initial.shape[-1])
    broadcast(accuracy_matrix=matrix.shape[:-1], initial_accuracy=initial.shape)
    before = np.diagonal(matrix, offset=1, axis1=-2, axis2=-1)
    return mean_measured(before - initial[..., 1:])


def _square(accuracy_matrix: ArrayLike, stages: int) -> FloatArray:
    matrix = as_array(accuracy_matrix, "accuracy_matrix", "... T T")
    trained, tested = matrix.shape[-2:]
    if trained != tested or trained < stages:
        raise HoldfastError(
            f"accuracy_matrix must be as many stages trained as tested, at least {stages}, "
            f"not {trained} trained and {tested} tested"
        )
    return matrix
