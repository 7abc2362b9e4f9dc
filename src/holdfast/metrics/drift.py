"""Drift of the clients' models in local training, and differences between their directions.

Weights and gradients are large: rows are read one at a time, so that lists of tensors on any device are
accepted and only one row at a time is converted to double precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray, agree, as_array, unit_vectors


def weight_divergence(global_weights: ArrayLike, local_weights: ArrayLike) -> FloatArray:
    """Distance of each client's model from the global model it started from (B8).

    ‖w − w[k]‖₂ over all parameters

    Args:
        global_weights: [P], all parameters flattened.
        local_weights: [K, P], or a list of K vectors [P].

    Returns:
        [K], 0 or more; the paper reports the mean over the round's clients.

    Source: FedNTD (Lee et al., NeurIPS 2022) section 5.2, Fig. 8.
    """
    start = as_array(global_weights, "global_weights", "P")
    distances = []
    for row in _rows(local_weights, "local_weights"):
        agree("P", global_weights=len(start), local_weights=len(row))
        distances.append(np.linalg.norm(row - start))
    return np.asarray(distances, dtype=np.float64)


def gradient_diversity(gradients: ArrayLike) -> float:
    """How much the clients' full gradients at the same weights differ (B9).

    Λ = (1/K) Σ_k ‖g[k]‖² / ‖(1/K) Σ_k g[k]‖²

    Args:
        gradients: [K, P], or a list of K vectors [P].

    Returns:
        At least 1: 1 when all gradients are equal (also when all are zero), infinite when they cancel out.

    Source: FedNTD Eq. 8.
    """
    clients, squares, total = 0, 0.0, np.zeros(0)
    for row in _rows(gradients, "gradients"):
        total = total if clients else np.zeros_like(row)
        agree("P", first_gradient=len(total), later_gradient=len(row))
        total += row
        squares += float(row @ row)
        clients += 1
    if not clients:
        raise HoldfastError("gradients must hold at least 1 client")
    if squares == 0:
        return 1.0
    squared_mean = float(total @ total) / clients**2
    return squares / clients / squared_mean if squared_mean else float("inf")


def classifier_update_similarity(updates: ArrayLike) -> float:
    """Similarity of the clients' updates of each class's classifier row (B16).

    (1/C) Σ_c (1/K²) Σ_{i,j} cos(Δ[i, c], Δ[j, c]), pairs i = j included; the cosine with a zero row is 0

    Args:
        updates: [K, C, D], local minus global classifier: each class's weights with its bias appended.

    Returns:
        In [0, 1]: 1 when all clients move in the same direction, 1/K when their updates are orthogonal.

    Source: FedFA (Zhou et al., 2022) Fig. 4 and Eq. 10; self pairs as in its released code.
    """
    array = as_array(updates, "updates", "K C D")
    if 0 in array.shape[:2]:
        raise HoldfastError("updates must hold at least 1 client and 1 class")
    # The mean cosine over all pairs of unit vectors is the squared length of their mean.
    return float(np.square(unit_vectors(array).mean(axis=0)).sum(axis=-1).mean())


def _rows(matrix: ArrayLike, name: str) -> Iterable[FloatArray]:
    if not hasattr(matrix, "__len__") or getattr(matrix, "ndim", 2) != 2:
        raise HoldfastError(f"{name} must have the shape [K, P]")
    for row in cast(Iterable[ArrayLike], matrix):
        yield as_array(row, f"each row of {name}", "P")
