import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import (
    backward_transfer_forgetting,
    forgetting_degree,
    local_forgetting,
    prediction_consistency,
    round_forgetting,
)

ACCURACY = [[0.2, 0.8, 0.0], [0.9, 0.4, 0.1], [0.5, 0.6, 0.3]]


def fractions(shape):
    return arrays(np.float64, shape, elements=st.floats(0, 1, width=32))


accuracy_over_rounds = array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6).flatmap(fractions)


@st.composite
def before_and_after(draw):
    clients, classes = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return draw(fractions(classes)), draw(fractions((clients, classes)))


def test_backward_transfer_by_hand():
    # best before the end .9 .8 .1, end .5 .6 .3: gaps .4 .2 -.2
    assert backward_transfer_forgetting(ACCURACY) == pytest.approx(0.4 / 3)


def test_backward_transfer_may_be_negative():
    assert backward_transfer_forgetting([[0.1, 0.2], [0.3, 0.3]]) == pytest.approx(-0.15)


def test_backward_transfer_needs_two_rounds():
    with pytest.raises(HoldfastError, match="at least 2 rounds, not 1"):
        backward_transfer_forgetting([[0.1, 0.2]])


def test_round_forgetting_by_hand():
    # round 2 loses .4 of class 1, round 3 loses .4 of class 0; gains do not count
    np.testing.assert_allclose(round_forgetting(ACCURACY), [0.4 / 3, 0.4 / 3])
    assert round_forgetting([[0.1, 0.2]]).shape == (0,)


def test_a_class_without_test_samples_is_left_out():
    with_gap = np.insert(np.array(ACCURACY), 1, np.nan, axis=1)
    assert backward_transfer_forgetting(with_gap) == pytest.approx(backward_transfer_forgetting(ACCURACY))
    np.testing.assert_allclose(round_forgetting(with_gap), round_forgetting(ACCURACY))
    np.testing.assert_allclose(prediction_consistency(with_gap), prediction_consistency(ACCURACY))


def test_local_forgetting_by_hand():
    lost = local_forgetting(torch.tensor([0.5, 1.0]), torch.tensor([[0.0, 1.0], [1.0, 0.2]]))
    np.testing.assert_allclose(lost, [0.25, 0.4])


def test_forgetting_degree_by_hand():
    degree = forgetting_degree([0.5, 0.0], [[0.0, 0.0], [0.75, 0.2]])
    expected = [[0.5 / 0.50001, 0.0], [-0.25 / 0.50001, -0.2 / 1e-5]]
    np.testing.assert_allclose(degree, expected)
    np.testing.assert_allclose(forgetting_degree([0.5], [[0.1]], xi=0.5), [[0.4]])


def test_forgetting_degree_needs_a_positive_xi():
    with pytest.raises(HoldfastError, match="xi must be above 0"):
        forgetting_degree([0.5], [[0.1]], xi=0)


@pytest.mark.parametrize("metric", [local_forgetting, forgetting_degree])
def test_before_and_after_must_have_the_same_classes(metric):
    with pytest.raises(HoldfastError, match="agree on C"):
        metric([0.1, 0.2], [[0.1, 0.2, 0.3]])
    with pytest.raises(HoldfastError, match=r"local_after must have the shape \[K, C\]"):
        metric([0.1, 0.2], [0.1, 0.2])


def test_prediction_consistency_by_hand():
    consistency = prediction_consistency([[1.0, 0.0], [0.3, 0.4], [0.0, 0.0], [0.5, 0.5]])
    np.testing.assert_allclose(consistency, [0.6, 0.0, 0.0])


@given(accuracy_over_rounds)
def test_bounds(accuracy):
    assert -1 <= backward_transfer_forgetting(accuracy) <= 1
    for per_round in (round_forgetting(accuracy), prediction_consistency(accuracy)):
        assert per_round.shape == (len(accuracy) - 1,)
        assert np.all((per_round >= 0) & (per_round <= 1 + 1e-12))


@given(accuracy_over_rounds, st.randoms(use_true_random=False))
def test_the_order_of_classes_does_not_matter(accuracy, random):
    order = list(range(accuracy.shape[1]))
    random.shuffle(order)
    shuffled = accuracy[:, order]
    assert backward_transfer_forgetting(shuffled) == pytest.approx(backward_transfer_forgetting(accuracy))
    np.testing.assert_allclose(round_forgetting(shuffled), round_forgetting(accuracy), atol=1e-12)
    np.testing.assert_allclose(prediction_consistency(shuffled), prediction_consistency(accuracy), atol=1e-12)


@given(accuracy_over_rounds)
def test_a_model_that_only_gains_forgets_nothing(accuracy):
    rising = np.sort(accuracy, axis=0)
    assert backward_transfer_forgetting(rising) <= 0
    assert not round_forgetting(rising).any()


@given(accuracy_over_rounds)
def test_the_run_never_forgets_more_than_its_rounds_together(accuracy):
    assert backward_transfer_forgetting(accuracy) <= round_forgetting(accuracy).sum() + 1e-12


@given(before_and_after())
def test_local_forgetting_bounds_and_sign(pair):
    before, after = pair
    lost = local_forgetting(before, after)
    degree = forgetting_degree(before, after)
    assert np.all((lost >= 0) & (lost <= 1))
    assert np.all(degree <= 1)
    np.testing.assert_array_equal(np.sign(degree), np.sign(before - after))
    np.testing.assert_array_equal(local_forgetting(before, after[::-1]), lost[::-1])
    assert not local_forgetting(before, before[None]).any()
