import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.metrics import rounds_to_target
from holdfast.metrics.progress import default_target


def test_rounds_count_from_one():
    assert rounds_to_target([0.5, 0.2], 0.5) == 1
    assert rounds_to_target([0.1, 0.3, 0.2, 0.9], 0.3) == 2
    assert rounds_to_target([0.1, 0.3], 0.31) is None
    assert rounds_to_target([], 0.5) is None


def test_rounds_without_evaluation_reach_nothing():
    assert rounds_to_target([np.nan, np.nan, 0.7], 0.5) == 3


def test_the_rounds_own_numbers_are_returned_where_not_every_round_was_tested():
    assert rounds_to_target([0.1, 0.3, 0.9], 0.3, rounds=[5, 10, 15]) == 10
    assert rounds_to_target([0.1, 0.3], 0.5, rounds=[5, 10]) is None
    with pytest.raises(HoldfastError, match="agree on T: accuracy has 2, rounds has 1"):
        rounds_to_target([0.1, 0.3], 0.5, rounds=[5])


def test_the_default_target_is_a_share_of_the_best_methods_mean():
    assert default_target([[0.5, 0.7], [0.9, 0.1]]) == pytest.approx(0.95 * 0.6)
    assert default_target([[0.5], [np.nan]]) == pytest.approx(0.95 * 0.5)
    assert np.isnan(default_target([[np.nan]]))


def test_accuracy_must_be_one_row():
    with pytest.raises(HoldfastError, match=r"accuracy must have the shape \[T\]"):
        rounds_to_target([[0.1]], 0.5)


@given(st.lists(st.floats(0, 1)), st.floats(0, 1))
def test_the_round_found_is_the_first_to_reach_the_target(accuracy, target):
    found = rounds_to_target(accuracy, target)
    if found is None:
        assert all(value < target for value in accuracy)
    else:
        assert accuracy[found - 1] >= target
        assert all(value < target for value in accuracy[: found - 1])
