import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import average_accuracy, average_forgetting, backward_transfer, forward_transfer

MATRIX = [[0.8, 0.2, 0.1], [0.9, 0.7, 0.3], [0.5, 0.6, 0.9]]
matrices = st.integers(2, 5).flatmap(
    lambda n: arrays(np.float64, (2, n, n), elements=st.floats(0, 1, width=32))
)


def test_by_hand():
    assert average_accuracy(MATRIX) == pytest.approx(2.0 / 3)
    assert average_forgetting(MATRIX) == pytest.approx(((0.9 - 0.5) + (0.7 - 0.6)) / 2)
    assert backward_transfer(torch.tensor(MATRIX)) == pytest.approx(((0.5 - 0.8) + (0.6 - 0.7)) / 2)
    assert forward_transfer(MATRIX, [0.9, 0.1, 0.2]) == pytest.approx(((0.2 - 0.1) + (0.3 - 0.2)) / 2)
    assert isinstance(average_accuracy(MATRIX), float)


def test_clients_are_kept_apart():
    matrices = np.stack([MATRIX, np.eye(3)])
    np.testing.assert_allclose(average_accuracy(matrices), [2.0 / 3, 1.0 / 3])
    np.testing.assert_allclose(average_forgetting(matrices), [0.25, 1.0])
    np.testing.assert_allclose(backward_transfer(matrices), [-0.2, -1.0])
    np.testing.assert_allclose(forward_transfer(matrices, np.zeros((2, 3))), [0.25, 0.0])
    np.testing.assert_allclose(forward_transfer(matrices, np.zeros(3)), [0.25, 0.0])


def test_a_task_a_client_never_had_is_left_out():
    matrix = np.array(MATRIX)
    matrix[:, 1] = np.nan
    assert average_accuracy(matrix) == pytest.approx(0.7)
    assert average_forgetting(matrix) == pytest.approx(0.4)
    assert backward_transfer(matrix) == pytest.approx(-0.3)
    assert forward_transfer(matrix, np.full(3, 0.1)) == pytest.approx(0.2)
    lower_triangle = np.where(np.tri(3) > 0, MATRIX, np.nan)
    assert average_forgetting(lower_triangle) == pytest.approx(0.25)
    assert np.isnan(forward_transfer(lower_triangle, np.zeros(3)))


def test_matrices_of_other_shapes_are_refused():
    with pytest.raises(HoldfastError, match="2 trained and 3 tested"):
        average_accuracy(np.ones((2, 3)))
    for metric in (average_forgetting, backward_transfer, lambda matrix: forward_transfer(matrix, [0.5])):
        with pytest.raises(HoldfastError, match="at least 2"):
            metric([[0.5]])
    with pytest.raises(HoldfastError, match="agree on T"):
        forward_transfer(MATRIX, [0.1, 0.1])
    with pytest.raises(HoldfastError, match="leading axes"):
        forward_transfer(np.ones((2, 3, 3)), np.ones((5, 3)))
    assert average_accuracy([[0.5]]) == 0.5


@given(matrices)
def test_bounds_and_relations(matrix):
    stages = matrix.shape[-1]
    assert np.all((average_accuracy(matrix) >= 0) & (average_accuracy(matrix) <= 1))
    forgetting, transfer = average_forgetting(matrix), backward_transfer(matrix)
    # the best stage is at least as good as the one that taught the task
    assert np.all(forgetting >= -transfer - 1e-12)
    assert np.all(np.abs(forgetting) <= 1)
    assert np.all(average_forgetting(np.sort(matrix, axis=-2)) <= 0)
    assert np.all(np.abs(forward_transfer(matrix, np.zeros(stages))) <= 1)
    assert forward_transfer(matrix, np.ones(stages)) == pytest.approx(
        forward_transfer(matrix, np.zeros(stages)) - 1
    )
