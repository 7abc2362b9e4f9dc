"""Accuracy inside and outside a client's data distribution, and groups of classes by how much of them it holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import BoolArray, FloatArray, agree, as_array, as_counts, broadcast, divide


def local_distribution(label_counts: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """A client's in-local distribution p and its counterpart p_out, largest for classes it lacks (B5).

    p[c] = n[c] / Σ n,  p_out[c] = (1 − p[c]) / (C − 1)

    Args:
        label_counts: [..., C], training samples of each class.

    Returns:
        p and p_out, each of the input's shape and with sum 1; NaN for a client without samples, and p_out also for a
        single class, which no client lacks.

    Source: FedNTD (Lee et al., NeurIPS 2022) Eq. 6-7.
    """
    counts = as_counts(label_counts, "label_counts", "... C")
    inside = divide(counts, counts.sum(axis=-1, keepdims=True))
    return inside, divide(1.0 - inside, counts.shape[-1] - 1)


def in_out_local_accuracy(
    class_accuracy: ArrayLike, label_counts: ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Accuracy on the classes a client holds, and on those it lacks (B5).

    in = Σ_c p[c] A[c],  out = Σ_c p_out[c] A[c],  with p and p_out of `local_distribution`

    The leading axes broadcast: local models [K, C] with their clients' counts [K, C], or one global model [C]
    with each client's [K, C]. For the global model on the joint distribution of K clients, as in Fig. 4, give
    the sum of their counts [C].

    Args:
        class_accuracy: [..., C]; NaN for a class without test samples, the weight of which goes to the others.
        label_counts: [..., C], training samples of each class.

    Returns:
        in and out, each [...]; in [0, 1] for fractions.

    Source: FedNTD section 2.2, Fig. 4 and 7.
    """
    accuracy = as_array(class_accuracy, "class_accuracy", "... C")
    inside, outside = local_distribution(label_counts)
    agree("C", class_accuracy=accuracy.shape[-1], label_counts=inside.shape[-1])
    broadcast(class_accuracy=accuracy.shape, label_counts=inside.shape)
    return _weighted_mean(accuracy, inside), _weighted_mean(accuracy, outside)


def distribution_distance(
    class_accuracy: ArrayLike, label_counts: ArrayLike, *, paper: bool = False
) -> FloatArray:
    """Distance between the global model's normalised class accuracies and each client's label distribution (B7).

    ‖Â − p[k]‖₂  with  Â = A / Σ_c A[c], uniform where A is all zero

    Args:
        class_accuracy: [C], of the global model before local training; classes without test samples are NaN
            and are left out.
        label_counts: [K, C], training samples of each class.
        paper: divide A by the overall accuracy on a balanced test set, as printed in the paper; Â then has the
            sum C and is not a distribution.

    Returns:
        [K], in [0, √2] without ``paper``; NaN for a client without samples, and for all where fewer than two classes
        have test samples.

    Source: FedNTD section 5.2, Fig. 8.
    """
    accuracy = as_array(class_accuracy, "class_accuracy", "C")
    counts = as_counts(label_counts, "label_counts", "K C")
    agree("C", class_accuracy=accuracy.shape[-1], label_counts=counts.shape[-1])
    tested = ~np.isnan(accuracy)
    if tested.sum() < 2:
        return np.full(len(counts), np.nan)
    accuracy, (inside, _) = accuracy[tested], local_distribution(counts[:, tested])
    classes = len(accuracy)
    normalised = accuracy / accuracy.sum() if accuracy.any() else np.full(classes, 1.0 / classes)
    return np.asarray(np.linalg.norm((classes if paper else 1) * normalised - inside, axis=-1))


def class_split(label_counts: ArrayLike, gamma: float) -> tuple[BoolArray, BoolArray, BoolArray]:
    """Masks of the missing, the non-dominant and the dominant classes of a client.

    missing: n[c] = 0,  non-dominant: 0 < n[c] / Σ n < γ,  dominant: n[c] / Σ n ≥ γ

    Args:
        label_counts: [..., C], training samples of each class.
        gamma: γ, the share of a client's samples from which a class is dominant; in (0, 1].

    Returns:
        missing, non_dominant, dominant: masks of the input's shape; each class is in exactly one.

    Source: FedKA (Chen et al., 2024) Definition 1.
    """
    if not 0 < gamma <= 1:
        raise HoldfastError(f"gamma must be above 0 and at most 1, not {gamma}")
    counts = as_counts(label_counts, "label_counts", "... C")
    missing = counts == 0
    dominant = divide(counts, counts.sum(axis=-1, keepdims=True)) >= gamma
    return missing, ~missing & ~dominant, dominant


def _weighted_mean(accuracy: FloatArray, weights: FloatArray) -> FloatArray:
    """Weighted mean over the classes that were tested."""
    tested = ~np.isnan(accuracy)
    total = (weights * np.where(tested, accuracy, 0.0)).sum(axis=-1)
    return divide(total, (weights * tested).sum(axis=-1))
