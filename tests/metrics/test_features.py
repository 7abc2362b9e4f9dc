import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import feature_distance, linear_cka, pair_similarity


def whole(shape):
    return arrays(np.float64, shape, elements=st.integers(-9, 9))


stacks = array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=4).flatmap(whole)


@st.composite
def labelled_stacks(draw):
    clients, samples, units, classes = (draw(st.integers(1, 4)) for _ in range(4))
    labels = draw(arrays(np.int64, samples, elements=st.integers(0, classes - 1)))
    return draw(whole((clients, samples, units))), labels, draw(arrays(np.bool_, (clients, classes)))


@st.composite
def two_representations(draw):
    samples = draw(st.integers(2, 6))
    return draw(whole((samples, draw(st.integers(1, 8))))), draw(whole((samples, draw(st.integers(1, 8)))))


def rotation(size, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def test_feature_distance_by_hand():
    # sample 0: 5 apart; sample 1: 0 apart; two of four ordered pairs differ
    features = [[[0.0, 0.0], [1.0, 1.0]], [[3.0, 4.0], [1.0, 1.0]]]
    assert feature_distance(features) == pytest.approx(5 * 2 / 4 / 2)
    assert feature_distance(torch.tensor(features), include_self=False) == pytest.approx(2.5)


def test_feature_distance_needs_models_to_compare():
    assert feature_distance(np.ones((1, 3, 2))) == 0
    with pytest.raises(HoldfastError, match="at least 2 models"):
        feature_distance(np.ones((1, 3, 2)), include_self=False)
    with pytest.raises(HoldfastError, match=r"\[K, N, D\]"):
        feature_distance(np.ones((3, 2)))


def test_pair_similarity_by_hand():
    features = [[[1.0, 0.0], [0.0, 2.0]], [[3.0, 4.0], [0.0, 1.0]]]
    positive, negative = pair_similarity(features, [0, 1], [[1, 1], [1, 1]])
    np.testing.assert_allclose(sorted(positive), [0.6, 1.0])
    np.testing.assert_allclose(sorted(negative), [0.0, 0.8])


def test_pair_similarity_counts_only_owned_classes():
    features = [[[1.0, 0.0], [0.0, 2.0]], [[3.0, 4.0], [0.0, 1.0]]]
    positive, negative = pair_similarity(features, [0, 1], [[True, False], [True, True]])
    np.testing.assert_allclose(positive, [0.6])
    np.testing.assert_allclose(negative, [0.0], atol=1e-12)
    nothing = pair_similarity(features, [0, 1], np.zeros((2, 2)))
    assert [part.shape for part in nothing] == [(0,), (0,)]


def test_pair_similarity_refuses_what_does_not_fit():
    features = np.ones((2, 3, 4))
    with pytest.raises(HoldfastError, match="agree on K"):
        pair_similarity(features, [0, 1, 1], np.ones((3, 2)))
    with pytest.raises(HoldfastError, match="agree on N"):
        pair_similarity(features, [0, 1], np.ones((2, 2)))
    with pytest.raises(HoldfastError, match="below the 2 classes of owned, not 2"):
        pair_similarity(features, [0, 1, 2], np.ones((2, 2)))


def test_linear_cka_by_hand():
    # centred: a = (-1, 0, 1), b = (-1, 2, -1) share nothing; a and c = (-1, 0, 1) + b/3 share part
    a, b = np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [3.0], [0.0]])
    assert linear_cka(a, b) == pytest.approx(0.0)
    assert linear_cka(a, -5 * a + 3) == pytest.approx(1.0)
    both = np.hstack([a, b])
    # a'a = 2; with both: (2, 0), square 4; both'both = diag(2, 6)
    assert linear_cka(a, both) == pytest.approx(4 / (2 * np.sqrt(4 + 36)))


def test_linear_cka_of_a_collapsed_model_is_zero():
    assert linear_cka(np.full((7, 3), 0.1), np.random.default_rng(0).normal(size=(7, 3))) == 0.0
    with pytest.raises(HoldfastError, match="agree on N"):
        linear_cka(np.ones((2, 3)), np.ones((3, 3)))
    with pytest.raises(HoldfastError, match="at least 1 sample"):
        linear_cka(np.ones((0, 3)), np.ones((0, 3)))


@given(stacks)
def test_feature_distance_against_all_pairs(features):
    clients, samples, _ = features.shape
    distances = [
        np.sqrt(((features[i, n] - features[j, n]) ** 2).sum())
        for i in range(clients)
        for j in range(clients)
        for n in range(samples)
    ]
    distance = feature_distance(features)
    assert distance == pytest.approx(np.mean(distances))
    assert feature_distance(features[::-1, ::-1]) == pytest.approx(distance)
    assert feature_distance(3 * features + 1) == pytest.approx(3 * distance)
    if clients > 1:
        expected = distance * clients / (clients - 1)
        assert feature_distance(features, include_self=False) == pytest.approx(expected)


@given(labelled_stacks())
def test_pair_similarity_against_a_plain_loop(case):
    features, labels, owned = case
    positive, negative = [], []
    for i in range(len(features)):
        for j in range(i + 1, len(features)):
            for n, first in enumerate(labels):
                for m, second in enumerate(labels):
                    if owned[i, first] and owned[j, second]:
                        x, y = features[i, n], features[j, m]
                        length = np.sqrt((x @ x) * (y @ y))
                        (positive if first == second else negative).append(x @ y / length if length else 0.0)
    for cosines, expected in zip(pair_similarity(features, labels, owned), (positive, negative), strict=True):
        np.testing.assert_allclose(np.sort(cosines), np.sort(expected), atol=1e-12)
        assert np.all(np.abs(cosines) <= 1 + 1e-12)


@given(two_representations())
@example((np.ones((3, 8)), np.array([[0.0], [1.0], [1.0]])))  # constant, and after rotation up to rounding
def test_linear_cka_bounds_and_invariances(pair):
    a, b = pair
    similarity = linear_cka(a, b)
    assert -1e-12 <= similarity <= 1 + 1e-12
    assert linear_cka(b, a) == pytest.approx(similarity)
    assert linear_cka(a * 0.01, b * -70) == pytest.approx(similarity)
    assert linear_cka(a + 5, b - 2) == pytest.approx(similarity)
    assert linear_cka(a @ rotation(a.shape[1]), b) == pytest.approx(similarity, abs=1e-9)
    assert linear_cka(a[::-1], b[::-1]) == pytest.approx(similarity)
    if np.ptp(a, axis=0).any():
        assert linear_cka(a, a) == pytest.approx(1.0)


@given(two_representations())
def test_linear_cka_is_the_normalised_hsic_of_the_gram_matrices(pair):
    a, b = pair
    samples = len(a)
    centring = np.eye(samples) - 1 / samples

    def hsic(x, y):
        return np.trace(x @ x.T @ centring @ y @ y.T @ centring)

    spread = np.sqrt(abs(hsic(a, a) * hsic(b, b)))
    expected = hsic(a, b) / spread if spread > 1e-9 else 0.0
    assert linear_cka(a, b) == pytest.approx(expected, abs=1e-9)
