"""What server and sites say to each other, as Flower's records; everything received is checked here first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from holdfast.flower.wire import Form, Packed, WireError, pack, unpack
from holdfast.methods.base import Tree

DESCRIBE, TRAIN, SURVEY, SAMPLES = "query", "train", "query.survey", "query.samples"
"""Kinds of messages: who is there, train, speak of the final model, hand out samples."""

NUMPY = "numpy.ndarray"  # Flower's own name for the format, so that its mods can read it


def record_of(tree: Tree) -> ArrayRecord:
    """A tree of tensors as a record."""
    arrays = {
        manifest: Array(dtype=one.dtype, shape=one.shape, stype=NUMPY, data=one.data)
        for manifest, one in pack(tree).items()
    }
    return ArrayRecord(arrays)


def tree_of(content: RecordDict, name: str, expected: Form | None = None, free: str | None = None) -> Tree:
    """The tree in a record, which must be as ``expected``, but for the group ``free``; without ``expected`` any."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise WireError("wrong keys", f"there are no tensors called '{name}'")
    packed = {manifest: Packed(one.dtype, tuple(one.shape), one.data) for manifest, one in record.items()}
    return unpack(packed, expected, free)


class FieldReader:
    """The plain values in a message, each read with its type and range."""

    def __init__(self, content: RecordDict, name: str) -> None:
        record = content.get(name)
        if not isinstance(record, ConfigRecord):
            raise WireError("wrong keys", f"there is no record called '{name}'")
        self._record, self._name = record, name

    def whole(self, key: str, low: int = 0, high: int = 2**62) -> int:
        """A whole number."""
        value = self._record.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._record.get(key)
        if type(value) is not float or not math.isfinite(value):
            raise WireError("not finite", f"'{key}' is {value!r:.40}; it must be a finite number")
        return value

    def text(self, key: str, longest: int = 10_000) -> str:
        """Text."""
        value = self._record.get(key)
        if not isinstance(value, str) or len(value) > longest:
            raise self._wrong(key, f"text of at most {longest} letters")
        return value

    def wholes(self, key: str, count: int | None = None) -> list[int]:
        """Whole numbers of at least 0, ``count`` of them."""
        value = self._record.get(key)
        right = isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)
        if not right or (count is not None and len(value) != count):
            raise self._wrong(key, "whole numbers" if count is None else f"{count} whole numbers")
        return list(value)

    def numbers(self, key: str, count: int) -> list[float]:
        """Numbers."""
        value = self._record.get(key)
        if not isinstance(value, list) or len(value) != count or any(type(n) is not float for n in value):
            raise self._wrong(key, f"{count} numbers")
        return list(value)

    def _wrong(self, key: str, right: str) -> WireError:
        value = self._record.get(key)
        return WireError("wrong values", f"'{key}' of {self._name} is {value!r:.40}; it must be {right}")


@dataclass(frozen=True)
class RoundRequest:
    """What a site is told beside the model when it is to work."""

    run: str  # this run's name for the site's disk
    round: int
    stage: int
    clients: Sequence[int]
    remembers: Sequence[int]  # the round whose memory each client shall go on from; 0: none
    num_clients: int
    class_counts: Sequence[int]
    bounds: tuple[float, float]  # the smallest and largest value that any sample of the federation has
    stages: int

    def record(self) -> ConfigRecord:
        """As it travels."""
        return ConfigRecord(
            {
                "run": self.run,
                "round": self.round,
                "stage": self.stage,
                "clients": list(self.clients),
                "remembers": list(self.remembers),
                "num-clients": self.num_clients,
                "class-counts": list(self.class_counts),
                "bounds": [float(value) for value in self.bounds],
                "stages": self.stages,
            }
        )

    @classmethod
    def read(cls, content: RecordDict, classes: int) -> RoundRequest:
        """As it arrived."""
        facts = FieldReader(content, "orders")
        run, clients, bounds = facts.text("run", 32), facts.wholes("clients"), facts.numbers("bounds", 2)
        if len(run) != 32 or not all(letter in "0123456789abcdef" for letter in run):
            raise WireError("wrong values", "a run's name must be 32 hexadecimal digits")
        return cls(
            run=run,
            round=facts.whole("round", 1),
            stage=facts.whole("stage"),
            clients=clients,
            remembers=facts.wholes("remembers", len(clients)),
            num_clients=facts.whole("num-clients", 1),
            class_counts=facts.wholes("class-counts", classes),
            bounds=(bounds[0], bounds[1]),
            stages=facts.whole("stages", 1),
        )


def message(kind: str, node: int, content: Mapping[str, Any], ttl: float | None = None) -> Message:
    """A message to a node."""
    return Message(RecordDict(dict(content)), node, kind, ttl=ttl)
