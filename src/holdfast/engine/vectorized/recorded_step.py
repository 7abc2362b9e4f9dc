"""Steps that are recorded once and replayed without Python's overhead: the equivalent of CUDA graphs on a CPU.

In every step, ``vmap``, ``grad`` and autograd determine which operations to compute, although these are always the
same. A `RecordedStep` records the plain tensor operations below these layers and assigns memory to their results. A
replay therefore allocates no memory and creates no views. Tensors that existed before the recording (weights, tables,
counters) are read and written in place, with their current values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The results of such operations depend on more than the memory they read, or Python sees a value.
_NOT_REPLAYABLE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_FILLS: dict[Any, Callable[..., Any]] = {  # and the value they fill with
    _ATEN.zeros.default: lambda *_: 0,
    _ATEN.zeros_like.default: lambda *_: 0,
    _ATEN.new_zeros.default: lambda *_: 0,
    _ATEN.ones.default: lambda *_: 1,
    _ATEN.ones_like.default: lambda *_: 1,
    _ATEN.new_ones.default: lambda *_: 1,
    _ATEN.full.default: lambda _, value: value,
    _ATEN.full_like.default: lambda _, value: value,
    _ATEN.new_full.default: lambda _, __, value: value,
}
_TENSOR_OPTIONS = {
    "dtype",
    "layout",
    "device",
    "pin_memory",
}  # implied by the memory for the results, if it is given


class NotReplayable(Exception):
    """A step cannot be recorded, because it uses a value in Python, draws random numbers or needs too much memory."""


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Operation(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]  # storages
    writes: frozenset[int]


class BlockPool:
    """Memory blocks for the results of recorded steps, which share them: only one step runs at a time."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes_left = max_bytes
        self.blocks: list[torch.UntypedStorage] = []

    def new_block(self, size: int) -> torch.UntypedStorage:
        self.bytes_left -= size
        self.blocks.append(torch.empty(size, dtype=torch.uint8).untyped_storage())
        return self.blocks[-1]


class RecordedStep:
    """The operations of one call of ``step``, which is run to record them; calling the object replays them.

    Their results are in blocks of the ``pool``. Raises `NotReplayable`, also if all results together exceed its memory.
    """

    def __init__(self, step: Callable[[], None], pool: BlockPool) -> None:
        recorder = _Recorder(pool.bytes_left)
        with recorder:
            step()
        operations = _without_unused(_without_constants(recorder.operations), recorder.created)
        self.calls = _assign_blocks(operations, recorder.created, pool)

    def __call__(self) -> None:
        with torch.inference_mode():
            for function, args, kwargs in self.calls:
                function(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, max_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_bytes, self.bytes = max_bytes, 0
        self.operations: list[_Operation] = []
        self.created: dict[int, Tensor] = {}  # one tensor of each storage created here, so that none is freed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_replayable(func, args):
            raise NotReplayable(str(func))
        out = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return out  # the tensor object keeps its new shape, so there is nothing to replay
        # Fills read only the shapes of their arguments.
        reads = frozenset() if func in _FILLS else frozenset(map(_storage, _tensors((args, kwargs))))
        if func._schema.is_mutable:
            writes = frozenset(_storage(t) for t in _mutated_arguments(func, args, kwargs))
            self.operations.append(_Operation(func._op, args, kwargs, reads, writes))
            return out
        results = list(_tensors(out))
        new = [i for i, t in enumerate(results) if _storage(t) not in reads]
        if new:  # otherwise they are views, which need no replay
            created = [results[i].detach() for i in new]  # in their present shape
            self.created |= {_storage(t): t for t in created}
            self.bytes += sum(t.untyped_storage().nbytes() for t in created)
            if self.bytes > self.max_bytes:
                raise NotReplayable(f"{self.max_bytes:,} bytes are too few")
            writes = frozenset(map(_storage, created))
            call = _write_to(created, new, func, args, kwargs)
            self.operations.append(_Operation(*call, reads, writes))
        return out


def _is_replayable(func: Any, args: tuple[Any, ...]) -> bool:
    if func is _ATEN.index.Tensor:  # only masks select a number of rows that depends on their values
        return all(t.dtype not in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return _NOT_REPLAYABLE.isdisjoint(func.tags)


def _write_to(
    targets: Sequence[Tensor],
    results: Sequence[int],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Call:
    """The same operation, writing its results with these indices to the ``targets``."""
    if func in _COPIES:
        return _ATEN.copy_.default._op, (targets[0], args[0]), {}
    if func in _FILLS:
        return _ATEN.fill_.Scalar._op, (targets[0], _FILLS[func](*args)), {}
    if func is _ATEN.relu.default:  # it calls clamp_min
        return _ATEN.clamp_min.out._op, (args[0], 0), {"out": targets[0]}
    variant = _out_variant(func)
    if variant is not None and len(targets) == len(func._schema.returns):
        names = [a.name for a in variant._schema.arguments if a.is_out]
        kept = {k: v for k, v in kwargs.items() if k not in _TENSOR_OPTIONS}
        if not _TENSOR_OPTIONS.isdisjoint(a.name for a in variant._schema.arguments):
            kept = kwargs  # for example a reduction, whose dtype is that of its arithmetic
        return variant._op, args, kept | dict(zip(names, targets, strict=True))

    def compute_and_copy(targets: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        values = list(_tensors(func(*args, **kwargs)))
        for i, target in zip(results, targets, strict=True):
            target.copy_(values[i])

    return compute_and_copy, (targets, *args), kwargs


def _out_variant(func: Any) -> Any:
    """The overload with the same arguments and an ``out``, if torch implements one."""
    signature = _signature(func)
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        arguments = other._schema.arguments
        outs = sum(a.is_out for a in arguments)
        genuine = (
            torch.Tag.generated not in other.tags
        )  # generated overloads copy the results of the usual one
        if genuine and outs == len(func._schema.returns) and _signature(other) == signature:
            return other
    return None


def _signature(func: Any) -> dict[str, str]:
    arguments = (a for a in func._schema.arguments if not a.is_out)
    return {a.name: str(a.type) for a in arguments if a.name not in _TENSOR_OPTIONS}


def _without_constants(operations: Sequence[_Operation]) -> list[_Operation]:
    """Drop the operations whose results are the same constants in every step."""
    writers = Counter(storage for operation in operations for storage in operation.writes)
    constant: set[int] = set()
    kept = []
    for operation in operations:
        if operation.reads <= constant and all(writers[storage] == 1 for storage in operation.writes):
            constant |= operation.writes
        else:
            kept.append(operation)
    return kept


def _without_unused(operations: Sequence[_Operation], created: dict[int, Tensor]) -> list[_Operation]:
    """Drop the operations whose results are never read."""
    needed: set[int] = set()
    kept = []
    for operation in reversed(operations):
        if any(storage in needed or storage not in created for storage in operation.writes):
            needed |= operation.reads
            kept.append(operation)
    return kept[::-1]


def _assign_blocks(
    operations: Sequence[_Operation], created: dict[int, Tensor], pool: BlockPool
) -> list[_Call]:
    """The calls of these operations, with their results in blocks of the pool.

    A block is reused after the last use of its result, so that more of the memory stays in the CPU's caches.
    """
    last_use = {storage: i for i, op in enumerate(operations) for storage in op.reads | op.writes}
    free, blocks = list(pool.blocks), dict[int, torch.UntypedStorage]()
    calls = []
    for i, operation in enumerate(operations):
        for storage in operation.writes & created.keys() - blocks.keys():
            size = created[storage].untyped_storage().nbytes()
            large_enough = [j for j, block in enumerate(free) if block.nbytes() >= size]
            smallest = min(large_enough, key=lambda j: free[j].nbytes(), default=None)
            blocks[storage] = pool.new_block(size) if smallest is None else free.pop(smallest)
        calls.append((operation.function, _rebind(operation.args, blocks), _rebind(operation.kwargs, blocks)))
        free += [blocks[storage] for storage in blocks if last_use[storage] == i]
    constants = last_use.keys() & created.keys() - blocks.keys()
    pool.bytes_left -= sum(created[storage].untyped_storage().nbytes() for storage in constants)
    return calls


def _rebind(value: Any, blocks: dict[int, torch.UntypedStorage]) -> Any:
    """An argument of an operation, with the tensors of these storages moved to their blocks."""
    if isinstance(value, Tensor) and _storage(value) in blocks:
        block = blocks[_storage(value)]
        return value.new_empty(0).set_(block, value.storage_offset(), value.size(), value.stride())
    if isinstance(value, (tuple, list)):
        return type(value)(_rebind(item, blocks) for item in value)
    if isinstance(value, dict):
        return {key: _rebind(item, blocks) for key, item in value.items()}
    return value


def _mutated_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
