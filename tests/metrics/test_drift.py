import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import classifier_update_similarity, gradient_diversity, weight_divergence

numbers = st.floats(-100, 100, width=32)
matrices = array_shapes(min_dims=2, max_dims=2, max_side=6).flatmap(
    lambda s: arrays(np.float64, s, elements=numbers)
)


def vectors_not_tiny(shape):
    return arrays(np.float64, shape, elements=st.integers(-20, 20))


def test_weight_divergence_by_hand():
    distance = weight_divergence([1.0, 1.0], [[4.0, 5.0], [1.0, 1.0]])
    assert distance.tolist() == [5.0, 0.0]


def test_weight_divergence_takes_a_list_of_tensors():
    locals_ = [torch.tensor([3.0, 0.0], dtype=torch.bfloat16), torch.tensor([0.0, 0.0], requires_grad=True)]
    assert weight_divergence(torch.zeros(2), locals_).tolist() == [3.0, 0.0]
    assert weight_divergence(torch.zeros(2), torch.eye(2)).tolist() == [1.0, 1.0]


def test_weight_divergence_keeps_double_precision_over_many_weights():
    assert weight_divergence(
        np.zeros(10**6, np.float32), np.full((1, 10**6), 0.1, np.float32)
    ) == pytest.approx(np.float64(np.float32(0.1)) * 1000, rel=1e-12)


@pytest.mark.parametrize("rows", [[1.0, 2.0], np.zeros(2), np.zeros((1, 1, 2)), 3.0])
def test_weights_of_other_shapes_are_refused(rows):
    with pytest.raises(HoldfastError, match="local_weights must have the shape"):
        weight_divergence([0.0, 0.0], rows)


def test_weights_of_other_models_are_refused():
    with pytest.raises(HoldfastError, match="agree on P"):
        weight_divergence([0.0, 0.0], [[1.0, 2.0, 3.0]])


def test_gradient_diversity_by_hand():
    # squares 1 and 4, mean 2.5; mean gradient (.5, 1), square 1.25
    assert gradient_diversity([[1.0, 0.0], [0.0, 2.0]]) == pytest.approx(2.0)
    assert gradient_diversity(torch.tensor([[3.0, 4.0], [3.0, 4.0]])) == pytest.approx(1.0)


def test_gradients_that_cancel_or_vanish():
    assert gradient_diversity([[1.0, 2.0], [-1.0, -2.0]]) == float("inf")
    assert gradient_diversity([[0.0, 0.0], [0.0, 0.0]]) == 1.0


def test_gradient_diversity_needs_equal_rows():
    with pytest.raises(HoldfastError, match="agree on P"):
        gradient_diversity([[1.0, 2.0], [1.0]])
    with pytest.raises(HoldfastError, match="at least 1 client"):
        gradient_diversity(np.zeros((0, 3)))


def test_gradient_diversity_does_not_change_its_input():
    gradients = np.array([[1.0, 0.0], [0.0, 2.0]])
    gradient_diversity(gradients)
    assert gradients.tolist() == [[1.0, 0.0], [0.0, 2.0]]


def test_classifier_update_similarity_by_hand():
    # class 0: equal directions, all four cosines 1; class 1: orthogonal, two of four cosines 1
    updates = [[[1.0, 0.0], [1.0, 0.0]], [[5.0, 0.0], [0.0, 3.0]]]
    assert classifier_update_similarity(updates) == pytest.approx((1.0 + 0.5) / 2)


def test_classifier_update_similarity_of_a_client_that_did_not_move():
    assert classifier_update_similarity([[[0.0, 0.0]], [[1.0, 1.0]]]) == pytest.approx(0.25)
    with pytest.raises(HoldfastError, match=r"\[K, C, D\]"):
        classifier_update_similarity(np.zeros((2, 3)))
    with pytest.raises(HoldfastError, match="at least 1 client"):
        classifier_update_similarity(np.zeros((0, 2, 3)))


@given(matrices)
def test_weight_divergence_is_a_distance(local):
    start = local[0]
    distance = weight_divergence(start, local)
    expected = [np.sqrt(sum((a - b) ** 2 for a, b in zip(row, start, strict=True))) for row in local]
    np.testing.assert_allclose(distance, expected)
    np.testing.assert_allclose(weight_divergence(start + 1, local + 1), distance, atol=1e-9)


@given(
    array_shapes(min_dims=2, max_dims=2, max_side=6).flatmap(vectors_not_tiny),
    st.sampled_from([0.01, 3.0, -7.0]),
)
def test_gradient_diversity_is_at_least_one_and_free_of_scale_and_order(gradients, scale):
    diversity = gradient_diversity(gradients)
    assert diversity >= 1 - 1e-12
    assume(np.isfinite(diversity))
    assert gradient_diversity(gradients * scale) == pytest.approx(diversity)
    assert gradient_diversity(gradients[::-1, ::-1]) == pytest.approx(diversity)


@given(
    array_shapes(min_dims=3, max_dims=3, max_side=4).flatmap(vectors_not_tiny),
    st.sampled_from([0.01, 3.0, -7.0]),
)
def test_classifier_update_similarity_against_all_pairs(updates, scale):
    def cosine(a, b):
        length = np.sqrt((a @ a) * (b @ b))
        return a @ b / length if length else 0.0

    clients, classes, _ = updates.shape
    pairs = [
        cosine(updates[i, c], updates[j, c])
        for i in range(clients)
        for j in range(clients)
        for c in range(classes)
    ]
    similarity = classifier_update_similarity(updates)
    assert similarity == pytest.approx(np.mean(pairs))
    assert -1e-12 <= similarity <= 1 + 1e-12
    assert classifier_update_similarity(updates * scale) == pytest.approx(similarity)
    assert classifier_update_similarity(updates[::-1, ::-1, ::-1]) == pytest.approx(similarity)
