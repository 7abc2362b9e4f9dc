import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import dead_unit_share, neuron_alignment

LABELS = [0, 0, 2]
FIRST = [[1.0, 0.0, 0.0, 2.0], [3.0, 0.0, 0.0, 2.0], [1.0, 5.0, 0.0, 2.0]]  # prefer 0, 2, 0 (dead), 0 (tie)
SECOND = [[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [9.0, 4.0, 0.2, 0.0]]  # prefer 2, 2, 0, 0 (dead)


@st.composite
def two_layers(draw):
    samples, units = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    layer = arrays(np.float64, (samples, units), elements=st.integers(0, 30))
    labels = arrays(np.int64, samples, elements=st.integers(0, 3))
    return draw(layer), draw(layer), draw(labels)


def test_neuron_alignment_by_hand():
    assert neuron_alignment(FIRST, SECOND, LABELS) == pytest.approx(3 / 4)
    assert neuron_alignment(torch.tensor(FIRST), torch.tensor(SECOND), torch.tensor(LABELS)) == 0.75


def test_preference_is_by_mean_not_by_sum():
    # class 0 sums to 3 over three samples, class 1 to 2 over one
    assert neuron_alignment([[1.0], [1.0], [1.0], [2.0]], [[0.0], [0.0], [0.0], [1.0]], [0, 0, 0, 1]) == 1.0


def test_dead_unit_share_by_hand():
    assert dead_unit_share(FIRST) == 0.25
    assert dead_unit_share(SECOND) == 0.25
    assert dead_unit_share(np.zeros((2, 3))) == 1.0


def test_layers_that_do_not_match_are_refused():
    with pytest.raises(HoldfastError, match="agree on D"):
        neuron_alignment(np.ones((2, 3)), np.ones((2, 4)), [0, 1])
    with pytest.raises(HoldfastError, match="agree on N"):
        neuron_alignment(np.ones((2, 3)), np.ones((2, 3)), [0, 1, 2])
    with pytest.raises(HoldfastError, match="at least 1 sample"):
        neuron_alignment(np.ones((0, 3)), np.ones((0, 3)), [])
    with pytest.raises(HoldfastError, match="at least 1 sample"):
        dead_unit_share(np.ones((0, 3)))


@given(two_layers(), st.randoms(use_true_random=False))
def test_alignment_is_symmetric_and_free_of_order_and_scale(layers, random):
    first, second, labels = layers
    alignment = neuron_alignment(first, second, labels)
    assert 0 <= alignment <= 1
    assert neuron_alignment(first, first, labels) == 1
    assert neuron_alignment(second, first, labels) == alignment
    samples, units = list(range(len(labels))), list(range(first.shape[1]))
    random.shuffle(samples)
    random.shuffle(units)
    shuffled = neuron_alignment(first[samples][:, units], second[samples][:, units], labels[samples])
    assert shuffled == pytest.approx(alignment)
    assert neuron_alignment(first * 4, second * 0.5, labels) == pytest.approx(alignment)
