import json
import warnings

import numpy as np
import pytest
import torch

from holdfast import metrics
from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import agree, as_array, as_counts, as_labels, mean_measured, unit_vectors


@pytest.mark.parametrize(
    "values",
    [
        [[1, 2], [3, 4]],
        ((1.0, 2.0), (3.0, 4.0)),
        np.array([[1, 2], [3, 4]], dtype=np.int32),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16),
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0], requires_grad=True)],
    ],
)
def test_arrays_of_every_kind_are_read_alike(values):
    array = as_array(values, "x", "T C")
    assert array.dtype == np.float64
    assert array.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_none_of_a_json_file_becomes_nan():
    assert np.isnan(as_array(json.loads("[0.5, null]"), "x", "C")).tolist() == [False, True]


@pytest.mark.parametrize("values", [[[1, 2], [3]], ["a", "b"], {"a": 1}])
def test_what_is_no_array_is_refused(values):
    with pytest.raises(HoldfastError, match=r"accuracy must be an array of numbers of shape \[T, C\]"):
        as_array(values, "accuracy", "T C")


def test_wrong_shapes_are_refused_by_name():
    with pytest.raises(HoldfastError, match=r"accuracy must have the shape \[T, C\], not \[3\]"):
        as_array(np.zeros(3), "accuracy", "T C")
    with pytest.raises(HoldfastError, match=r"\[\.\.\., C\], not \[\]"):
        as_array(1.0, "accuracy", "... C")
    assert as_array(np.zeros((2, 3, 4)), "accuracy", "... C").shape == (2, 3, 4)


@pytest.mark.parametrize("labels", [[0.5], [-1], [np.nan], [np.inf], [[0, 1]]])
def test_labels_must_be_whole_numbers_in_one_row(labels):
    with pytest.raises(HoldfastError):
        as_labels(labels, "labels")


@pytest.mark.parametrize("counts", [[-1, 2], [np.nan, 2]])
def test_counts_must_not_be_negative(counts):
    with pytest.raises(HoldfastError, match="numbers of samples"):
        as_counts(counts, "label_counts", "C")


def test_disagreeing_sizes_are_named():
    agree("C", a=2, b=2)
    with pytest.raises(HoldfastError, match="agree on C: a has 2, b has 3"):
        agree("C", a=2, b=3)


def test_means_leave_out_nan_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        means = mean_measured(np.array([[1.0, np.nan, 3.0], [np.nan] * 3]))
    assert means[0] == 2.0
    assert np.isnan(means[1])
    assert isinstance(mean_measured(np.array([1.0, 3.0])), float)


def test_unit_vectors_leave_zero_alone():
    assert unit_vectors(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [[0.6, 0.8], [0.0, 0.0]]


def test_unit_vectors_shrink_noise():
    np.testing.assert_allclose(unit_vectors(np.array([1e-10, 0.0])), [0.01, 0.0])


def test_every_public_name_is_documented_with_shape_and_source():
    for name in metrics.__all__:
        text = getattr(metrics, name).__doc__
        assert "[" in text, name
        assert "Returns:" in text, name
        assert "Source:" in text or name == "paired_test", name
