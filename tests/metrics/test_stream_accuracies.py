import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.core.errors import HoldfastError
from holdfast.metrics import (
    global_stream_accuracy,
    local_stream_accuracy,
    minority_accuracy,
    seen_task_accuracy,
)


def fractions(*shape):
    return arrays(np.float64, shape, elements=st.floats(0, 1, width=32))


def test_seen_task_accuracy_by_hand():
    accuracy = [[1.0, 0.5, 0.0], [0.4, 0.0, 0.0]]
    sizes = [[10, 30, 5], [20, 20, 5]]
    assert seen_task_accuracy(accuracy, sizes, stage=1) == pytest.approx((1.0 + 0.4) / 2)
    # client 0: (10 + 15) / 40, client 1: 8 / 40
    assert seen_task_accuracy(torch.tensor(accuracy), sizes, stage=2) == pytest.approx((0.625 + 0.2) / 2)


def test_seen_task_accuracy_leaves_out_clients_without_tasks():
    accuracy = [[np.nan, 0.5], [0.8, np.nan]]
    sizes = [[0, 10], [10, 0]]
    assert seen_task_accuracy(accuracy, sizes, stage=1) == pytest.approx(0.8)
    assert seen_task_accuracy(accuracy, sizes, stage=2) == pytest.approx((0.5 + 0.8) / 2)
    assert np.isnan(seen_task_accuracy([[np.nan]], [[0]], stage=1))


@pytest.mark.parametrize("stage", [0, 3, -1])
def test_seen_task_accuracy_refuses_missing_stages(stage):
    with pytest.raises(HoldfastError, match="stage must be from 1 to 2"):
        seen_task_accuracy([[0.1, 0.2]], [[1, 1]], stage)


def test_seen_task_accuracy_refuses_sizes_of_others():
    with pytest.raises(HoldfastError, match="agree on K"):
        seen_task_accuracy([[0.1, 0.2]], [[1, 1], [1, 1]], 1)
    with pytest.raises(HoldfastError, match="agree on T"):
        seen_task_accuracy([[0.1, 0.2]], [[1, 1, 1]], 1)


def test_global_stream_accuracy_averages_the_last_epochs():
    accuracy = [[0.0, 0.0], [0.2, 0.4], [0.6, 0.8]]
    assert global_stream_accuracy(accuracy, last=2) == pytest.approx(0.5)
    assert global_stream_accuracy(accuracy) == pytest.approx(2.0 / 6)
    assert global_stream_accuracy(accuracy, minority=[False, True], last=1) == pytest.approx(0.8)
    eleven = np.vstack([np.ones((1, 2)), np.zeros((10, 2))])
    assert global_stream_accuracy(eleven) == 0.0


def test_local_stream_accuracy_averages_clients_too():
    accuracy = np.array([[[1.0, 1.0], [1.0, 1.0]], [[0.1, 0.3], [0.5, 0.9]]])
    assert local_stream_accuracy(accuracy, last=1) == pytest.approx(0.45)
    assert local_stream_accuracy(accuracy, minority=torch.tensor([False, True]), last=1) == pytest.approx(0.6)
    assert local_stream_accuracy(accuracy, last=2) == pytest.approx(0.725)
    eleven = np.vstack([np.ones((1, 3, 2)), np.zeros((10, 3, 2))])
    assert local_stream_accuracy(eleven) == 0.0


def test_minority_accuracy_by_hand():
    accuracy = [[0.9, 0.8, 0.2], [0.5, np.nan, 0.4]]
    np.testing.assert_allclose(minority_accuracy(accuracy, [0, 1, 1]), [0.5, 0.4])
    assert minority_accuracy(accuracy[0], [0, 1, 1]) == pytest.approx(0.5)
    assert np.isnan(minority_accuracy(accuracy[0], [0, 0, 0]))


def test_stream_accuracies_refuse_what_does_not_fit():
    with pytest.raises(HoldfastError, match="agree on C"):
        minority_accuracy([0.1, 0.2], [1])
    with pytest.raises(HoldfastError, match="last must be at least 1"):
        global_stream_accuracy([[0.1]], last=0)
    with pytest.raises(HoldfastError, match=r"\[E, K, C\]"):
        local_stream_accuracy([[0.1]])


@given(fractions(4, 3, 5), arrays(np.bool_, 5), st.integers(1, 6))
def test_all_classes_lie_between_minority_and_majority(accuracy, minority, last):
    minority[:2] = [True, False]
    few, many = (local_stream_accuracy(accuracy, mask, last) for mask in (minority, ~minority))
    everything = local_stream_accuracy(accuracy, last=last)
    assert min(few, many) - 1e-12 <= everything <= max(few, many) + 1e-12
    assert local_stream_accuracy(accuracy[:, ::-1, ::-1], minority[::-1], last) == pytest.approx(few)
    one_model = global_stream_accuracy(accuracy[:, 0], minority, last)
    assert local_stream_accuracy(accuracy[:, :1], minority, last) == pytest.approx(one_model)


@given(fractions(3, 4), arrays(np.int64, (3, 4), elements=st.integers(1, 50)), st.integers(1, 4))
def test_seen_task_accuracy_is_free_of_client_order_and_of_future_tasks(accuracy, sizes, stage):
    value = seen_task_accuracy(accuracy, sizes, stage)
    assert 0 <= value <= 1
    assert seen_task_accuracy(accuracy[::-1], sizes[::-1] * 3, stage) == pytest.approx(value)
    assert seen_task_accuracy(accuracy[:, :stage], sizes[:, :stage], stage) == pytest.approx(value)
