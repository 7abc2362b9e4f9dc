"""Messages between server and sites, as Flower's records; everything received is validated here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from holdfast.core.trees import Tree
from holdfast.flower.wire import PackedArray, TreeSpec, WireError, pack, unpack

DESCRIBE = "query"  # report the site's clients
TRAIN = "train"  # train clients for one round
EVALUATE = "evaluate"  # test the global model on the clients' validation samples
STATISTICS = "query.statistics"  # compute statistics of clients under the final model
SAMPLES = "query.samples"  # send single samples
KEYS = "query.secure_keys"  # make keys for a secure sum
SHARES = "query.secure_shares"  # deal shares of the secrets behind them
TRAIN_MASKED = "train.masked"  # train clients for one round and mask their uploads
STATISTICS_MASKED = "query.masked_statistics"  # the same with statistics under the final model
UNMASK = "query.secure_unmask"  # reveal the shares that remove the masks

NUMPY = "numpy.ndarray"  # Flower's name for the array format, so that its mods can read it


def tree_to_record(tree: Tree) -> ArrayRecord:
    arrays = {
        manifest: Array(dtype=packed.dtype, shape=packed.shape, stype=NUMPY, data=packed.data)
        for manifest, packed in pack(tree).items()
    }
    return ArrayRecord(arrays)


def tree_from_record(
    content: RecordDict, name: str, expected: TreeSpec | None = None, unchecked: str | None = None
) -> Tree:
    """The tree in the record called ``name``; for ``expected`` and ``unchecked`` see `unpack`."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise WireError("wrong keys", f"there is no record of tensors called '{name}'")
    packed = {
        manifest: PackedArray(array.dtype, tuple(array.shape), array.data)
        for manifest, array in record.items()
    }
    return unpack(packed, expected, unchecked)


def digest_of(content: RecordDict, client: int) -> str:
    """The SHA-256 of a client's part of a reply as received, valid or not."""
    found = sha256()
    for name in sorted(name for name in content if name.rpartition(" ")[2] == str(client)):
        found.update(f"{name}\n".encode())
        record = content[name]
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                found.update(f"{key}\n{array.dtype} {array.shape}\n".encode())
                found.update(array.data)
        else:
            found.update(repr(sorted(record.items())).encode())
    return found.hexdigest()


class ConfigReader:
    """Typed access to the values of a config record; a value of another type or range raises a `WireError`."""

    def __init__(self, content: RecordDict, name: str) -> None:
        record = content.get(name)
        if not isinstance(record, ConfigRecord):
            raise WireError("wrong keys", f"there is no config record called '{name}'")
        self._record, self._name = record, name

    def has(self, key: str) -> bool:
        return key in self._record

    def integer(self, key: str, low: int = 0, high: int = 2**62) -> int:
        value = self._record.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self._error(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str) -> float:
        value = self._record.get(key)
        if type(value) is not float or not math.isfinite(value):
            raise WireError("not finite", f"'{key}' is {value!r:.40}; it must be a finite number")
        return value

    def text(self, key: str, max_length: int = 10_000) -> str:
        value = self._record.get(key)
        if not isinstance(value, str) or len(value) > max_length:
            raise self._error(key, f"text of at most {max_length} characters")
        return value

    def integers(self, key: str, count: int | None = None) -> list[int]:
        """Whole numbers of at least 0; ``count`` of them, if given."""
        value = self._record.get(key)
        valid = isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)
        if not valid or (count is not None and len(value) != count):
            raise self._error(key, "whole numbers" if count is None else f"{count} whole numbers")
        return list(value)

    def numbers(self, key: str, count: int) -> list[float]:
        """``count`` numbers, which may be infinite or NaN."""
        value = self._record.get(key)
        if not isinstance(value, list) or len(value) != count or any(type(n) is not float for n in value):
            raise self._error(key, f"{count} numbers")
        return list(value)

    def blob(self, key: str, size: int) -> bytes:
        """A string of exactly ``size`` bytes."""
        value = self._record.get(key)
        if type(value) is not bytes or len(value) != size:
            raise self._error(key, f"{size} bytes")
        return value

    def blobs(self, key: str, count: int | None = None, longest: int = 1_000) -> list[bytes]:
        """Strings of bytes, each at most ``longest``; ``count`` of them, if given."""
        value = self._record.get(key)
        valid = isinstance(value, list) and all(type(b) is bytes and len(b) <= longest for b in value)
        if not valid or (count is not None and len(value) != count):
            raise self._error(
                key, f"{'' if count is None else count} strings of at most {longest} bytes".strip()
            )
        return list(value)

    def _error(self, key: str, required: str) -> WireError:
        value = self._record.get(key)
        return WireError("wrong values", f"'{key}' of {self._name} is {value!r:.40}; it must be {required}")


@dataclass(frozen=True)
class RoundRequest:
    """The settings of one round that the server sends to a site with the model."""

    run: str  # id of the run, 32 hexadecimal digits
    round: int
    stage: int
    clients: Sequence[int]
    memory_rounds: Sequence[int]  # for each client, the round whose state it continues from; 0: none
    num_clients: int
    class_counts: Sequence[int]
    bounds: tuple[float, float]  # the smallest and largest value of any sample in the federation
    stages: int
    noise_multipliers: Sequence[
        float
    ]  # for each client, the noise multiplier of sample-level privacy; 0: none

    def to_record(self) -> ConfigRecord:
        return ConfigRecord(
            {
                "run": self.run,
                "round": self.round,
                "stage": self.stage,
                "clients": list(self.clients),
                "memory-rounds": list(self.memory_rounds),
                "num-clients": self.num_clients,
                "class-counts": list(self.class_counts),
                "bounds": [float(value) for value in self.bounds],
                "stages": self.stages,
                "noise-multipliers": [float(value) for value in self.noise_multipliers],
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, num_classes: int) -> RoundRequest:
        config = ConfigReader(content, "request")
        run, clients = config.text("run", 32), config.integers("clients")
        bounds = config.numbers("bounds", 2)
        if len(run) != 32 or not all(letter in "0123456789abcdef" for letter in run):
            raise WireError("wrong values", "a run's id must be 32 hexadecimal digits")
        return cls(
            run=run,
            round=config.integer("round", 1),
            stage=config.integer("stage"),
            clients=clients,
            memory_rounds=config.integers("memory-rounds", len(clients)),
            num_clients=config.integer("num-clients", 1),
            class_counts=config.integers("class-counts", num_classes),
            bounds=(bounds[0], bounds[1]),
            stages=config.integer("stages", 1),
            noise_multipliers=config.numbers("noise-multipliers", len(clients)),
        )


def make_message(kind: str, node: int, content: Mapping[str, Any], ttl: float | None = None) -> Message:
    """A message to a node, valid for ``ttl`` seconds."""
    return Message(RecordDict(dict(content)), node, kind, ttl=ttl)
