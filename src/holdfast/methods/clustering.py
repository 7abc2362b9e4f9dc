"""Grouping a few dozen prototypes by what they have in common."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Clustering = Literal["finch", "kmeans"]
Points = NDArray[np.float64]
Labels = NDArray[np.int64]


def cluster(points: Points, how: Clustering, classes: int, rng: np.random.Generator) -> Labels:
    """The cluster of each point, numbered from 0: int64 ``[n]`` from ``[n, d]``.

    ``finch`` finds the number of clusters itself; ``kmeans`` makes √``classes`` of them, rounded up.
    """
    if len(points) < 2:
        return np.zeros(len(points), np.int64)
    return finch(points) if how == "finch" else k_means(points, math.ceil(math.sqrt(classes)), rng)


def finch(points: Points) -> Labels:
    """Link each point to its nearest by cosine: what hangs together is a cluster. Repeat with the means.

    Returns the coarsest partition of more than one cluster, or the first if that is already a single one.
    Sarfraz et al., CVPR 2019.
    """
    labels = _linked(points)
    while labels.max() > 0:
        merged = _linked(np.stack([points[labels == c].mean(0) for c in range(labels.max() + 1)]))
        if merged.max() == 0:
            break
        labels = merged[labels]
    return labels


def _linked(points: Points) -> Labels:
    """One round of first neighbours: points that are linked directly or through others share a label."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    each, nearest = np.arange(len(points)), similarity.argmax(1)
    links = coo_array((np.ones(len(points)), (each, nearest)), shape=similarity.shape)
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


def k_means(points: Points, k: int, rng: np.random.Generator) -> Labels:
    """At most k clusters around their means, the best of ten starts."""
    from sklearn.cluster import KMeans

    distinct = len(np.unique(points, axis=0))
    found = KMeans(min(k, distinct), n_init=10, random_state=int(rng.integers(2**31))).fit_predict(points)
    return np.asarray(found, np.int64)
