"""Clustering of class prototypes."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Clustering = Literal["finch", "kmeans"]
Points = NDArray[np.float64]
Labels = NDArray[np.int64]


def cluster(points: Points, how: Clustering, clusters: int, rng: np.random.Generator) -> Labels:
    """The cluster of each point, numbered from 0: int64 ``[n]`` from ``[n, d]``.

    ``finch`` determines the number of clusters; ``kmeans`` returns at most ``clusters``.
    """
    if len(points) < 2:
        return np.zeros(len(points), np.int64)
    return finch(points) if how == "finch" else k_means(points, clusters, rng)


def finch(points: Points) -> Labels:
    """FINCH: connected components of the graph of nearest neighbours by cosine, repeated on the clusters' means.

    Returns the coarsest partition with more than one cluster, or a single cluster if the first partition is one.
    Sarfraz et al., CVPR 2019.
    """
    labels = _link_nearest(points)
    while labels.max() > 0:
        merged = _link_nearest(np.stack([points[labels == c].mean(0) for c in range(labels.max() + 1)]))
        if merged.max() == 0:
            break
        labels = merged[labels]
    return labels


def _link_nearest(points: Points) -> Labels:
    """The connected component of each point in the graph that links each point to its nearest."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    each, nearest = np.arange(len(points)), similarity.argmax(1)
    links = coo_array((np.ones(len(points)), (each, nearest)), shape=similarity.shape)
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


def k_means(points: Points, k: int, rng: np.random.Generator) -> Labels:
    """k-means with at most k clusters, the best of ten initialisations; numbered in the order of the points."""
    from sklearn.cluster import KMeans

    distinct = len(np.unique(points, axis=0))
    found = KMeans(min(k, distinct), n_init=10, random_state=int(rng.integers(2**31))).fit_predict(points)
    # With as many clusters as points all initialisations are equally good, and rounding would choose the numbers.
    _, first, number = np.unique(found, return_index=True, return_inverse=True)
    return np.asarray(first.argsort().argsort()[number], np.int64)
