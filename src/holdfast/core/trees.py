"""Nested dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import named

Tensors = dict[str, Tensor]
"""A flat dictionary of tensors, such as a model's parameters by name."""

Tree = dict[str, Any]
"""A dictionary whose values are tensors or further such dictionaries."""


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a tree with their path, ``a/b/c``."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def unflatten(flat: Tensors) -> Tree:
    """The tree whose leaves these are; inverse of `leaves`."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def tree_map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """The tree of ``function(leaf, *others)``, where ``others`` are the leaves of ``rest`` at the same path.

    The trees in ``rest`` may have more leaves than ``tree``; these are left out.
    """
    mapped: Tree = {}
    for key, value in tree.items():
        others = [other[key] for other in rest]
        mapped[key] = (
            tree_map(function, value, *others) if isinstance(value, dict) else function(value, *others)
        )
    return mapped


def tensors_only(tree: Tree, method: str, hook: str) -> Tree:
    """The ``tree`` that a method's hook returned, or an error if it holds anything but tensors.

    Only tensors can be sent, stacked over clients and written to a file. ``method`` and ``hook`` are names for the
    error message.
    """
    if not isinstance(tree, dict):
        raise _not_a_tree(method, hook, named(tree))
    for key, value in tree.items():
        if not isinstance(key, str) or "/" in key:
            raise _not_a_tree(method, hook, f"a dictionary with the key {key!r}")
        if isinstance(value, dict):
            tensors_only(value, method, hook)
        elif not isinstance(value, Tensor):
            raise _not_a_tree(method, hook, f"{named(value)} as '{key}'")
    return tree


def _not_a_tree(method: str, hook: str, returned: str) -> HoldfastError:
    return HoldfastError(
        f"{method}: {hook} returns {returned}; it must return a dictionary of tensors, or of such dictionaries, "
        "whose keys are strings without '/'; use context.scalar(...) to create a tensor from a number"
    )


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """The tree on a device; tensors that are on it already are not copied."""
    return tree_map(lambda value: value.to(device), tree)


def copy_to_device(tree: Tree, device: torch.device | str) -> Tree:
    """A detached, contiguous copy on a device."""
    return tree_map(lambda value: value.detach().to(device, copy=True).contiguous(), tree)


def clone(tree: Tree) -> Tree:
    """A copy on the same device; gradients flow through it."""
    return tree_map(torch.clone, tree)


def size_in_bytes(tree: Tree) -> int:
    """The bytes of all tensors of a tree."""
    return sum(value.numel() * value.element_size() for _, value in leaves(tree))


def changes(new: Tree, old: Tree) -> Tree:
    """The part of ``new`` whose tensors are not, by identity, those of ``old``."""
    out: Tree = {}
    for key, value in new.items():
        if isinstance(value, dict):
            inner = changes(value, old[key])
            if inner:
                out[key] = inner
        elif value is not old[key]:
            out[key] = value
    return out


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """Leaves of ``new`` where the condition holds, else of ``old``; ``new`` may be a part of ``old``."""
    return tree_map(lambda a, b: torch.where(condition, a, b), new, old)


def add_(total: Tree, other: Tree) -> Tree:
    """Add ``other`` to ``total`` leaf by leaf, in place; leaves that are new to ``total`` are copied."""
    targets, values = list[Tensor](), list[Tensor]()
    _match(total, other, targets, values)
    if targets:
        torch._foreach_add_(targets, values)
    return total


def _match(total: Tree, other: Tree, targets: list[Tensor], values: list[Tensor]) -> None:
    """Append the leaves that both trees have; copy those that are new to ``total`` there."""
    for key, value in other.items():
        if isinstance(value, dict):
            _match(total.setdefault(key, {}), value, targets, values)
        elif key in total:
            targets.append(total[key])
            values.append(value)
        else:
            total[key] = value.clone()


def copy_(target: Tree, source: Tree) -> None:
    """Copy the leaves of ``source`` into those of ``target`` at the same paths."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for destination, value in _pairs(target, source):
        destinations, values = by_dtype.setdefault(value.dtype, ([], []))
        destinations.append(destination)
        values.append(value)
    for destinations, values in by_dtype.values():  # one kernel for all tensors of a dtype
        torch._foreach_copy_(destinations, values)


def _pairs(target: Tree, source: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    for key, value in source.items():
        if isinstance(value, dict):
            yield from _pairs(target[key], value)
        else:
            yield target[key], value


# Trees of many lanes: the first dimension of each leaf is the lane.


def stack_like(tree: Tree, lanes: int) -> Tree:
    """Zeros for ``lanes`` trees like this one."""
    return tree_map(lambda value: value.new_zeros((lanes, *value.shape)), tree)


def first_lanes(stacked: Tree, n: int) -> Tree:
    """The first n lanes, as views."""
    return tree_map(lambda value: value[:n], stacked)


def write_lanes(stacked: Tree, trees: Sequence[Tree], lanes: Sequence[int]) -> None:
    """Write each tree into its lane; a tensor that all trees share goes to neighbouring lanes in one copy."""
    first, last = min(lanes), max(lanes)
    for key, one in trees[0].items():
        values = [tree[key] for tree in trees]
        if isinstance(one, dict):
            write_lanes(stacked[key], values, lanes)
        elif last - first == len(lanes) - 1 and all(value is one for value in values):
            stacked[key][first : last + 1].copy_(one)
        else:
            torch._foreach_copy_([stacked[key][lane] for lane in lanes], values)


def copies_of_lanes(stacked: Tree, lanes: Sequence[int]) -> list[Tree]:
    """A copy of each lane's tree; neighbouring lanes are copied in one operation."""
    first, last = min(lanes), max(lanes)
    copies: list[Tree] = [{} for _ in lanes]
    for key, value in stacked.items():
        if isinstance(value, dict):
            parts: list[Any] = copies_of_lanes(value, lanes)
        elif last - first == len(lanes) - 1:
            together = value[first : last + 1].clone()
            parts = [together[lane - first] for lane in lanes]
        else:
            parts = [value[lane].clone() for lane in lanes]
        for copy, part in zip(copies, parts, strict=True):
            copy[key] = part
    return copies
