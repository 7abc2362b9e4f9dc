"""Similarity of the features that clients' models compute for the same inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray, agree, as_array, as_labels, unit_vectors


def feature_distance(features: ArrayLike, *, include_self: bool = True) -> float:
    """Mean distance between the local models' features of the same inputs (B15).

    (1/N) Σ_n (1/K²) Σ_{i,j} ‖h[i, n] − h[j, n]‖₂

    Args:
        features: [K, N, D], features of the same N samples through each of K models; the paper takes 10 test
            images of each class.
        include_self: count the pairs i = j, as the paper's code does; without them the value is K / (K−1)
            times as large and needs K of at least 2.

    Returns:
        0 or more, in the features' unit.

    Source: FedFA (Zhou et al., 2022) Fig. 4.
    """
    array = as_array(features, "features", "K N D")
    clients, samples = array.shape[:2]
    least = 1 if include_self else 2
    if clients < least or not samples:
        raise HoldfastError(
            f"features must hold at least {least} models and 1 sample, not {list(array.shape)}"
        )
    total = sum(np.linalg.norm(array[i + 1 :] - array[i], axis=-1).sum() for i in range(clients))
    pairs = clients**2 if include_self else clients * (clients - 1)
    return float(2.0 * total / (pairs * samples))


def pair_similarity(
    features: ArrayLike, labels: ArrayLike, owned: ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Cosines of features across clients, for pairs of the same class and of different classes (B17).

    cos(h[i, n], h[j, m]) for clients i < j and all samples n, m with a class that i and j, respectively, own;
    positive where n and m are of one class, negative otherwise

    Args:
        features: [K, N, D], features of the same N samples through each of K models.
        labels: [N], class of each sample, counting from 0.
        owned: [K, C], true where the client holds training samples of the class.

    Returns:
        positive and negative, each one-dimensional and in no particular order; in [−1, 1]. Together up to
        N² K(K−1)/2 values, so keep N to some hundreds.

    Source: FedFA Fig. 2 and 6-9.
    """
    directions = unit_vectors(as_array(features, "features", "K N D"))
    classes = as_labels(labels, "labels")
    holds = as_array(owned, "owned", "K C") != 0
    agree("K", features=len(directions), owned=len(holds))
    agree("N", features=directions.shape[1], labels=len(classes))
    if np.any(classes >= holds.shape[1]):
        raise HoldfastError(
            f"labels must be below the {holds.shape[1]} classes of owned, not {classes.max()}"
        )
    kept = holds[:, classes]
    positive, negative = [np.zeros(0)], [np.zeros(0)]
    for i in range(len(directions)):
        for j in range(i + 1, len(directions)):
            cosines = directions[i, kept[i]] @ directions[j, kept[j]].T
            same = classes[kept[i], None] == classes[kept[j]]
            positive.append(cosines[same])
            negative.append(cosines[~same])
    return np.concatenate(positive), np.concatenate(negative)


def linear_cka(a: ArrayLike, b: ArrayLike) -> float:
    """Similarity of two representations of the same samples, up to rotation and scale (B18).

    ‖AᵀB‖²_F / (‖AᵀA‖_F ‖BᵀB‖_F), each column of A and B centred

    Args:
        a: [N, D], features of N samples.
        b: [N, D], features of the same samples; D may differ from that of ``a``.

    Returns:
        In [0, 1]; 0 when one of them is the same for all samples, up to rounding.

    Source: Kornblith et al., ICML 2019; in FedFA's released code.
    """
    first, second = as_array(a, "a", "N D"), as_array(b, "b", "N D")
    agree("N", a=len(first), b=len(second))
    if not len(first):
        raise HoldfastError("a and b must hold at least 1 sample")
    first, second = _centred(first), _centred(second)
    spread = np.sqrt(_shared_variance(first, first) * _shared_variance(second, second))
    return float(_shared_variance(first, second) / spread) if spread else 0.0


def _centred(features: FloatArray) -> FloatArray:
    """Features minus their mean; exactly 0 where all samples are equal up to rounding."""
    centred = features - features.mean(axis=0)
    rounding = np.finfo(np.float64).eps * max(features.shape)  # the relative tolerance of matrix_rank
    if np.linalg.norm(centred) <= rounding * np.linalg.norm(features):
        return np.zeros_like(centred)
    return np.asarray(centred)


def _shared_variance(a: FloatArray, b: FloatArray) -> float:
    """‖AᵀB‖²_F by whichever product is smaller: over features, or over samples."""
    if a.shape[1] * b.shape[1] <= len(a) ** 2:
        return float(np.square(a.T @ b).sum())
    return float(((a @ a.T) * (b @ b.T)).sum())
