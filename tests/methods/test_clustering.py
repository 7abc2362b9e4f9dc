import numpy as np
import pytest

from holdfast.methods.clustering import cluster, finch, k_means


def at(*degrees: float, lengths: tuple[float, ...] = ()) -> np.ndarray:
    """Points on rays at these angles."""
    angles = np.deg2rad(degrees)
    rays = np.stack([np.cos(angles), np.sin(angles)], 1)
    return rays * np.array(lengths or [1.0] * len(rays))[:, None]


def groups(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


def test_finch_looks_at_directions_not_at_lengths() -> None:
    points = at(0, 2, 90, 93, 4, 88, lengths=(1, 50, 1, 60, 9, 0.1))
    assert groups(finch(points)) == {frozenset({0, 1, 4}), frozenset({2, 3, 5})}


def test_finch_merges_clusters_until_only_one_would_be_left() -> None:
    # Pairs at 0 and 10, and at 100 and 110 degrees: four clusters first, two of their means next, then one.
    points = at(0, 1, 10, 11, 100, 101, 110, 111)
    assert groups(finch(points)) == {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}


def test_finch_chains_neighbours() -> None:
    # Each point's nearest is the one before it, so all hang together although the ends are far apart.
    assert groups(finch(at(0, 1, 3, 6, 10, 15, 21))) == {frozenset(range(7))}


def test_finch_does_not_depend_on_the_order() -> None:
    points = np.random.default_rng(0).normal(size=(30, 5))
    order = np.random.default_rng(1).permutation(30)
    found, shuffled = groups(finch(points)), groups(finch(points[order]))
    assert found == {frozenset(int(order[i]) for i in group) for group in shuffled}


@pytest.mark.parametrize("how", ["finch", "kmeans"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_points_make_few_clusters(how: str, count: int) -> None:
    labels = cluster(np.eye(3)[:count], how, 3, np.random.default_rng(0))  # type: ignore[arg-type]
    assert labels.shape == (count,)
    assert labels.dtype == np.int64
    if how == "finch" or count < 2:
        assert (labels == 0).all()


def test_finch_survives_a_prototype_of_zeros() -> None:
    labels = finch(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.1]]))
    assert labels[1] == labels[2]


def test_k_means_makes_as_many_clusters_as_wanted() -> None:
    points = np.random.default_rng(0).normal(size=(10, 4))
    labels = cluster(points, "kmeans", 4, np.random.default_rng(0))
    assert len(set(labels.tolist())) == 4
    assert (labels == cluster(points, "kmeans", 4, np.random.default_rng(0))).all()


def test_k_means_finds_separate_groups() -> None:
    points = np.array([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0], [9.1, 9.0]])
    assert groups(k_means(points, 2, np.random.default_rng(0))) == {frozenset({0, 1}), frozenset({2, 3})}


def test_k_means_of_equal_points_is_one_cluster() -> None:
    assert (k_means(np.ones((5, 2)), 3, np.random.default_rng(0)) == 0).all()
