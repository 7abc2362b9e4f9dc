"""Small helpers for nested dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import named

if TYPE_CHECKING:
    from holdfast.methods.base import Method

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


def tensors_only(tree: Tree, method: Method, hook: str) -> Tree:
    """What a hook gave, which must be able to travel, to be stacked for many clients and to be written to a file."""
    if not isinstance(tree, dict):
        raise _no_tree(method, hook, named(tree))
    for key, value in tree.items():
        if not isinstance(key, str) or "/" in key:
            raise _no_tree(method, hook, f"a dictionary with the key {key!r}")
        if isinstance(value, dict):
            tensors_only(value, method, hook)
        elif not isinstance(value, Tensor):
            raise _no_tree(method, hook, f"{named(value)} as '{key}'")
    return tree


def _no_tree(method: Method, hook: str, given: str) -> HoldfastError:
    return HoldfastError(
        f"{method.name}: {hook} gives {given}; it must give a dictionary of tensors, or of such dictionaries, with "
        "texts without '/' as keys; task.scalar(...) makes a tensor of a number"
    )


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """The tree whose leaves these are."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def add_(total: Tree, other: Tree) -> Tree:
    """Add ``other`` to ``total`` leaf by leaf, in place; an empty total takes a copy."""
    known, values = list[Tensor](), list[Tensor]()
    _meet(total, other, known, values)
    if known:
        torch._foreach_add_(known, values)
    return total


def _meet(total: Tree, other: Tree, known: list[Tensor], values: list[Tensor]) -> None:
    """List the leaves that both have; those that are new to ``total`` are copied there."""
    for key, value in other.items():
        if isinstance(value, dict):
            _meet(total.setdefault(key, {}), value, known, values)
        elif key in total:
            known.append(total[key])
            values.append(value)
        else:
            total[key] = value.clone()


def detached(tree: Tree, device: torch.device | str) -> Tree:
    """A contiguous copy on another device."""
    return {
        key: detached(value, device)
        if isinstance(value, dict)
        else value.detach().to(device, copy=True).contiguous()
        for key, value in tree.items()
    }


def size_in_bytes(tree: Tree) -> int:
    """What a tree weighs on the wire."""
    return sum(value.numel() * value.element_size() for _, value in leaves(tree))


def changes(new: Tree, old: Tree) -> Tree:
    """The part of ``new`` whose tensors are not those of ``old``."""
    out: Tree = {}
    for key, value in new.items():
        if isinstance(value, dict):
            inner = changes(value, old[key])
            if inner:
                out[key] = inner
        elif value is not old[key]:
            out[key] = value
    return out


def copy_(target: Tree, source: Tree) -> None:
    """Write the leaves of ``source`` into those of ``target`` at the same paths."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for to, value in _pairs(target, source):
        to_all, values = kinds.setdefault(value.dtype, ([], []))
        to_all.append(to)
        values.append(value)
    for to_all, values in kinds.values():  # those of one kind in one go
        torch._foreach_copy_(to_all, values)


def _pairs(target: Tree, source: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    for key, value in source.items():
        if isinstance(value, dict):
            yield from _pairs(target[key], value)
        else:
            yield target[key], value


# Trees of many lanes: each leaf has one more dimension, the lane's, in front.


def stack_like(tree: Tree, lanes: int) -> Tree:
    """Zeros for as many trees like this one."""
    return {
        k: stack_like(v, lanes) if isinstance(v, dict) else v.new_zeros((lanes, *v.shape))
        for k, v in tree.items()
    }


def write_lanes(stacked: Tree, trees: Sequence[Tree], lanes: Sequence[int]) -> None:
    """Write each tree into its lane; a leaf that neighbouring lanes share, in one go."""
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
    """Each lane's tree, in memory that no lane uses; neighbours are copied in one go."""
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


def first_lanes(stacked: Tree, n: int) -> Tree:
    """The first n lanes, as views."""
    return {k: first_lanes(v, n) if isinstance(v, dict) else v[:n] for k, v in stacked.items()}


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """Leaves of ``new`` where the condition holds, else of ``old``; ``new`` may be a part of ``old``."""
    return {
        k: where(condition, v, old[k]) if isinstance(v, dict) else torch.where(condition, v, old[k])
        for k, v in new.items()
    }
