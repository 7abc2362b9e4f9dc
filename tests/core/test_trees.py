"""Trees of tensors: addition, and copies to and from lanes."""

import pytest
import torch

from holdfast.core.trees import (
    add_,
    changes,
    copies_of_lanes,
    copy_,
    leaves,
    stack_like,
    tree_map,
    unflatten,
    where,
    write_lanes,
)


def tree(value: float) -> dict:
    return {
        "a": torch.full((3,), value),
        "b": {"c": torch.full((2, 2), value + 1), "n": torch.tensor(int(value))},
    }


def test_add_copies_new_leaves_and_adds_to_others():
    first, total = tree(1), {}
    add_(total, first)
    add_(total, tree(2))
    add_(total, {"new": torch.ones(1)})
    assert total["a"].tolist() == [3, 3, 3]
    assert total["b"]["c"].tolist() == [[5, 5], [5, 5]]
    assert total["b"]["n"].item() == 3
    assert total["new"].item() == 1
    assert first["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("lanes", [[2, 1, 3], [0, 3], [1]])
def test_lanes_are_written_and_copied_by_number(lanes):
    stacked = stack_like(tree(0), 5)
    write_lanes(stacked, [tree(10 + lane) for lane in lanes], lanes)
    for lane in range(5):
        here = 10 + lane if lane in lanes else 0
        assert stacked["a"][lane].tolist() == [here] * 3
        assert stacked["b"]["n"][lane].item() == here
    copies = copies_of_lanes(stacked, lanes)
    write_lanes(stacked, [tree(0)] * len(lanes), lanes)
    for lane, copy in zip(lanes, copies, strict=True):
        assert copy["b"]["c"].tolist() == [[11 + lane] * 2] * 2


@pytest.mark.parametrize("lanes", [[1, 2, 3], [0, 2]])
def test_a_shared_tensor_is_written_to_the_given_lanes_only(lanes):
    stacked, shared = stack_like(tree(0), 5), tree(7)
    write_lanes(stacked, [shared] * len(lanes), lanes)
    assert [lane for lane in range(5) if stacked["b"]["c"][lane, 0, 0] == 8] == lanes
    write_lanes(stacked, [{"a": torch.tensor(4.0)}] * len(lanes), lanes)  # one number for all elements
    assert stacked["a"].sum().item() == 4 * 3 * len(lanes)


def test_copy_writes_a_part_of_a_tree():
    target, part = tree(1), {"b": {"n": torch.tensor(9)}}
    copy_(target, part)
    assert target["b"]["n"].item() == 9
    assert target["a"].tolist() == [1, 1, 1]


def test_changes_are_the_new_tensors_at_any_depth():
    old = tree(1)
    new = {"a": old["a"], "b": old["b"] | {"n": torch.tensor(9)}}
    assert changes(new, old) == {"b": {"n": new["b"]["n"]}}
    assert changes({"a": new["b"]["c"], "b": old["b"]}, old) == {"a": new["b"]["c"]}


def test_tree_map_applies_a_function_to_leaves_at_the_same_path():
    part = {"b": {"c": torch.ones(2, 2)}}
    assert tree_map(lambda a, b: (a + b).tolist(), part, tree(1)) == {"b": {"c": [[3, 3], [3, 3]]}}
    assert tree_map(torch.numel, tree(0)) == {"a": 3, "b": {"c": 4, "n": 1}}
    chosen = where(torch.tensor(False), part, tree(1))
    assert chosen["b"]["c"].tolist() == [[2, 2], [2, 2]]


def test_unflatten_is_the_inverse_of_leaves():
    flat = dict(leaves(tree(1)))
    assert list(flat) == ["a", "b/c", "b/n"]
    assert dict(leaves(unflatten(flat))) == flat
