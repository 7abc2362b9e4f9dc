"""A step's arithmetic written down once and done again without Python's part in it: a CUDA graph for the CPU.

``vmap``, ``grad`` and autograd decide anew in every step what is to be computed, though it is always the same. A
`Tape` listens below them, where only plain tensor operations arrive, and gives each of them memory to write to. So
a replay allocates nothing and makes no views; tensors that were there before (weights, tables, counters) are read
and written where they lie, with whatever they hold then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What such operations give depends on more than the memory they read, or Python sees their value.
_UNREPEATABLE = {
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
_MADE_LIKE = {"dtype", "layout", "device", "pin_memory"}  # said by the memory itself when it is given


class NotReplayable(Exception):
    """A tape cannot do this: a value goes to Python, something is drawn at random, or it takes too much memory."""


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Entry(NamedTuple):
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]  # storages
    writes: frozenset[int]


class BlockPool:
    """Memory for the results of tapes, which share it: only one of them runs at a time."""

    def __init__(self, most_bytes: int) -> None:
        self.left = most_bytes
        self.blocks: list[torch.UntypedStorage] = []

    def new_block(self, size: int) -> torch.UntypedStorage:
        """More of it."""
        self.left -= size
        self.blocks.append(torch.empty(size, dtype=torch.uint8).untyped_storage())
        return self.blocks[-1]


class RecordedStep:
    """The operations of one call of ``work``, which is done while recording; calling the tape does it again.

    Their results lie in a ``room``, which must have place for all of them together.
    """

    def __init__(self, work: Callable[[], None], room: BlockPool) -> None:
        recorder = _Recorder(room.left)
        with recorder:
            work()
        entries = _needed(_changing(recorder.entries), recorder.fresh)
        self.calls = _housed(entries, recorder.fresh, room)

    def __call__(self) -> None:
        """Do the recorded operations once more, in the same memory."""
        with torch.inference_mode():
            for call, args, kwargs in self.calls:
                call(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, most_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes, self.bytes = most_bytes, 0
        self.entries: list[_Entry] = []
        self.fresh: dict[int, Tensor] = {}  # one tensor of each storage made here; held, so none is freed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _repeatable(func, args):
            raise NotReplayable(str(func))
        out = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return out  # the tensor was given another shape, which it keeps
        # Of another tensor, fills read the shape alone.
        reads = frozenset() if func in _FILLS else frozenset(map(_storage, _tensors((args, kwargs))))
        if func._schema.is_mutable:
            writes = frozenset(_storage(t) for t in _written(func, args, kwargs))
            self.entries.append(_Entry(func._op, args, kwargs, reads, writes))
            return out
        results = list(_tensors(out))
        places = [i for i, t in enumerate(results) if _storage(t) not in reads]
        if places:  # else they are views, which stay what they are
            made = [results[i].detach() for i in places]  # in the shape they have now
            self.fresh |= {_storage(t): t for t in made}
            self.bytes += sum(t.untyped_storage().nbytes() for t in made)
            if self.bytes > self.most_bytes:
                raise NotReplayable(f"{self.most_bytes:,} bytes are too few")
            writes = frozenset(map(_storage, made))
            self.entries.append(_Entry(*_into(func, args, kwargs, made, places), reads, writes))
        return out


def _repeatable(func: Any, args: tuple[Any, ...]) -> bool:
    if func is _ATEN.index.Tensor:  # only masks choose a number of rows that differs from time to time
        return all(t.dtype not in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return _UNREPEATABLE.isdisjoint(func.tags)


def _into(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Tensor], places: Sequence[int]
) -> _Call:
    """The same operation, writing those of its results that have these places where they are."""
    if func in _COPIES:
        return _ATEN.copy_.default._op, (made[0], args[0]), {}
    if func in _FILLS:
        return _ATEN.fill_.Scalar._op, (made[0], _FILLS[func](*args)), {}
    if func is _ATEN.relu.default:  # clamp_min is what it calls
        return _ATEN.clamp_min.out._op, (args[0], 0), {"out": made[0]}
    variant = _out_variant(func)
    if variant is not None and len(made) == len(func._schema.returns):
        names = [a.name for a in variant._schema.arguments if a.is_out]
        kept = {k: v for k, v in kwargs.items() if k not in _MADE_LIKE}
        if not _MADE_LIKE.isdisjoint(a.name for a in variant._schema.arguments):
            kept = kwargs  # of a reduction, say: the type it works in
        return variant._op, args, kept | dict(zip(names, made, strict=True))

    def work_and_copy(made: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        results = list(_tensors(func(*args, **kwargs)))
        for place, target in zip(places, made, strict=True):
            target.copy_(results[place])

    return work_and_copy, (made, *args), kwargs


def _out_variant(func: Any) -> Any:
    """The overload that takes the same arguments and memory for the results, if torch has one of its own."""
    wanted = _signature(func)
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        arguments = other._schema.arguments
        outs = sum(a.is_out for a in arguments)
        own = torch.Tag.generated not in other.tags  # generated ones only copy the usual results
        if own and outs == len(func._schema.returns) and _signature(other) == wanted:
            return other
    return None


def _signature(func: Any) -> dict[str, str]:
    arguments = (a for a in func._schema.arguments if not a.is_out)
    return {a.name: str(a.type) for a in arguments if a.name not in _MADE_LIKE}


def _changing(entries: Sequence[_Entry]) -> list[_Entry]:
    """Without the operations that would give the same constants again."""
    writers = Counter(storage for entry in entries for storage in entry.writes)
    constant: set[int] = set()
    kept = []
    for entry in entries:
        if entry.reads <= constant and all(writers[storage] == 1 for storage in entry.writes):
            constant |= entry.writes
        else:
            kept.append(entry)
    return kept


def _needed(entries: Sequence[_Entry], fresh: dict[int, Tensor]) -> list[_Entry]:
    """Without the operations whose results nobody reads."""
    needed: set[int] = set()
    kept = []
    for entry in reversed(entries):
        if any(storage in needed or storage not in fresh for storage in entry.writes):
            needed |= entry.reads
            kept.append(entry)
    return kept[::-1]


def _housed(entries: Sequence[_Entry], fresh: dict[int, Tensor], room: BlockPool) -> list[_Call]:
    """What these entries call, with results where those lay that nobody reads any more: caches hold more of them."""
    last = {storage: at for at, entry in enumerate(entries) for storage in entry.reads | entry.writes}
    free, homes = list(room.blocks), dict[int, torch.UntypedStorage]()
    calls = []
    for at, entry in enumerate(entries):
        for storage in entry.writes & fresh.keys() - homes.keys():
            size = fresh[storage].untyped_storage().nbytes()
            large_enough = [place for place, block in enumerate(free) if block.nbytes() >= size]
            smallest = min(large_enough, key=lambda place: free[place].nbytes(), default=None)
            homes[storage] = room.new_block(size) if smallest is None else free.pop(smallest)
        calls.append((entry.call, _moved(entry.args, homes), _moved(entry.kwargs, homes)))
        free += [homes[storage] for storage in homes if last[storage] == at]
    constants = last.keys() & fresh.keys() - homes.keys()
    room.left -= sum(fresh[storage].untyped_storage().nbytes() for storage in constants)
    return calls


def _moved(value: Any, homes: dict[int, torch.UntypedStorage]) -> Any:
    """An argument of an operation, whose tensors lie in their storages' new homes."""
    if isinstance(value, Tensor) and _storage(value) in homes:
        home = homes[_storage(value)]
        return value.new_empty(0).set_(home, value.storage_offset(), value.size(), value.stride())
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, homes) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, homes) for key, item in value.items()}
    return value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


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
