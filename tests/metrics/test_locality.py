import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import class_split, distribution_distance, in_out_local_accuracy, local_distribution


@st.composite
def accuracy_and_counts(draw):
    clients, classes = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    accuracy = draw(arrays(np.float64, classes, elements=st.floats(0, 1, width=32)))
    counts = draw(arrays(np.int64, (clients, classes), elements=st.integers(0, 500)))
    counts[:, 0] += 1
    return accuracy, counts


def test_local_distribution_by_hand():
    inside, outside = local_distribution([30, 10, 0])
    np.testing.assert_allclose(inside, [0.75, 0.25, 0.0])
    np.testing.assert_allclose(outside, [0.125, 0.375, 0.5])


def test_a_client_without_samples_has_no_distribution():
    inside, outside = local_distribution([[0, 0], [1, 1]])
    assert np.isnan(inside[0]).all()
    assert np.isnan(outside[0]).all()
    assert inside[1].tolist() == [0.5, 0.5]


def test_one_class_has_no_outside():
    inside, outside = local_distribution([5])
    assert inside.tolist() == [1.0]
    assert np.isnan(outside).all()
    within, beyond = in_out_local_accuracy([0.25], [5])
    assert within == 0.25
    assert np.isnan(beyond)


def test_in_out_local_accuracy_by_hand():
    inside, outside = in_out_local_accuracy([1.0, 0.5, 0.1], [30, 10, 0])
    assert inside == pytest.approx(0.75 + 0.125)
    assert outside == pytest.approx(0.125 + 0.1875 + 0.05)
    assert isinstance(inside, float)


def test_in_out_local_accuracy_broadcasts_one_model_over_clients():
    inside, outside = in_out_local_accuracy(torch.tensor([1.0, 0.0]), torch.tensor([[4, 0], [0, 4], [2, 2]]))
    np.testing.assert_allclose(inside, [1.0, 0.0, 0.5])
    np.testing.assert_allclose(outside, [0.0, 1.0, 0.5])


def test_in_out_local_accuracy_gives_an_untested_class_no_weight():
    inside, outside = in_out_local_accuracy([1.0, 0.5, np.nan], [6, 2, 8])
    assert inside == pytest.approx(0.75 * 1.0 + 0.25 * 0.5)
    # p_out of the tested classes: (1 - 6/16)/2 and (1 - 2/16)/2
    assert outside == pytest.approx((0.3125 * 1.0 + 0.4375 * 0.5) / 0.75)


def test_in_out_local_accuracy_refuses_other_shapes():
    with pytest.raises(HoldfastError, match="agree on C"):
        in_out_local_accuracy([1.0, 0.5], [1, 2, 3])
    with pytest.raises(
        HoldfastError, match=r"leading axes .* class_accuracy \[3, 2\] and label_counts \[4, 2\]"
    ):
        in_out_local_accuracy(np.ones((3, 2)), np.ones((4, 2)))


def test_summed_counts_are_the_sample_weighted_mean_of_the_clients_distributions():
    counts = np.array([[30, 10, 0], [0, 5, 5]])
    weights = counts.sum(1) / counts.sum()
    inside, outside = (
        weights @ np.stack(parts) for parts in zip(*map(local_distribution, counts), strict=True)
    )
    accuracy = np.array([0.9, 0.4, 0.2])
    np.testing.assert_allclose(
        in_out_local_accuracy(accuracy, counts.sum(0)), (inside @ accuracy, outside @ accuracy)
    )


def test_distribution_distance_by_hand():
    # view (.5, .5, 0); client 0 holds (1, 0, 0), client 1 holds the view itself
    distance = distribution_distance([0.4, 0.4, 0.0], [[7, 0, 0], [3, 3, 0]])
    np.testing.assert_allclose(distance, [np.sqrt(0.5), 0.0], atol=1e-12)
    # as printed: A / mean(A) = (1.5, 1.5, 0)
    printed = distribution_distance([0.4, 0.4, 0.0], [[7, 0, 0]], paper=True)
    np.testing.assert_allclose(printed, [np.sqrt(0.5**2 + 1.5**2)])


def test_distribution_distance_of_a_model_without_accuracy():
    np.testing.assert_allclose(distribution_distance([0.0, 0.0], [[1, 0], [1, 1]]), [np.sqrt(0.5), 0.0])
    np.testing.assert_allclose(distribution_distance([0.0, 0.0], [[1, 1]], paper=True), [np.sqrt(0.5)])


def test_distribution_distance_leaves_untested_classes_out():
    np.testing.assert_allclose(distribution_distance([0.4, np.nan, 0.4], [[2, 9, 0]]), [np.sqrt(0.5)])
    with pytest.raises(HoldfastError, match="agree on C"):
        distribution_distance([0.4, 0.4], [[1, 2, 3]])


def test_class_split_by_hand():
    missing, non_dominant, dominant = class_split([0, 4, 5, 91], gamma=0.05)
    assert missing.tolist() == [True, False, False, False]
    assert non_dominant.tolist() == [False, True, False, False]
    assert dominant.tolist() == [False, False, True, True]


def test_class_split_of_an_empty_client_is_all_missing():
    missing, non_dominant, dominant = class_split([0, 0], gamma=0.5)
    assert missing.all()
    assert not non_dominant.any()
    assert not dominant.any()


@pytest.mark.parametrize("gamma", [0, -0.1, 1.1, float("nan")])
def test_class_split_refuses_shares_outside_of_zero_to_one(gamma):
    with pytest.raises(HoldfastError, match="gamma"):
        class_split([1, 2], gamma)


@given(accuracy_and_counts())
def test_distributions_sum_to_one_and_bound_the_accuracy(pair):
    accuracy, counts = pair
    for weights in local_distribution(counts):
        np.testing.assert_allclose(weights.sum(-1), 1.0)
        assert (weights >= 0).all()
    for value in in_out_local_accuracy(accuracy, counts):
        assert value.shape == (len(counts),)
        assert np.all((value >= accuracy.min() - 1e-12) & (value <= accuracy.max() + 1e-12))


@given(accuracy_and_counts(), st.integers(2, 9), st.randoms(use_true_random=False))
def test_only_shares_matter_and_no_order(pair, factor, random):
    accuracy, counts = pair
    order = list(range(len(accuracy)))
    random.shuffle(order)
    distance = distribution_distance(accuracy, counts)
    assert np.all((distance >= 0) & (distance <= np.sqrt(2) + 1e-12))
    np.testing.assert_allclose(distribution_distance(accuracy, counts * factor), distance, atol=1e-12)
    np.testing.assert_allclose(distribution_distance(accuracy[order], counts[:, order]), distance, atol=1e-12)
    np.testing.assert_allclose(distribution_distance(accuracy, counts[::-1]), distance[::-1], atol=1e-12)
    inside = in_out_local_accuracy(accuracy, counts)
    np.testing.assert_allclose(in_out_local_accuracy(accuracy[order], counts[:, order] * factor), inside)


@given(accuracy_and_counts(), st.floats(0.01, 1))
def test_each_class_is_in_exactly_one_group(pair, gamma):
    _, counts = pair
    groups = np.stack(class_split(counts, gamma))
    assert (groups.sum(axis=0) == 1).all()
    assert (groups[0] == (counts == 0)).all()
    assert (groups[2].sum(axis=-1) * gamma <= 1 + 1e-9).all()
