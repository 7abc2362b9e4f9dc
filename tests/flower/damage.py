"""Random damage to messages."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from holdfast.flower.sealing import SEAL, seal_of
from holdfast.flower.wire import DTYPES

NONSENSE = [float("nan"), float("inf"), -1, 2**63 - 1, "x" * 20, "", b"\0", [1, -2], [0.5], [], 2.5, True]

LETTERS = "params/bw 0123,\n\0é"


def copied(content: RecordDict) -> RecordDict:
    return RecordDict({k: type(v)(dict(v)) for k, v in content.items()})


def resealed(asked: Message, reply: Message, content: RecordDict) -> None:
    """Give the reply another content, sealed as by a site that sends it on purpose."""
    content[SEAL] = seal_of(asked.content, content)
    reply.__dict__["_content"] = content


def damaged(content: RecordDict, rng: np.random.Generator) -> RecordDict:
    """A copy with one to three faults: records and entries lost, swapped, of other kinds, shapes, types or values."""
    content = copied(content)
    names = list(content)
    for _ in range(rng.integers(1, 4)):
        name = names[rng.integers(len(names))]
        record = content.get(name)
        if record is None:
            continue
        keys = list(record)
        key = keys[rng.integers(len(keys))] if keys else "none"
        match rng.integers(7):
            case 0:
                content.pop(name)
            case 1:
                record.pop(key, None)
            case 2 if isinstance(record, ArrayRecord):
                shape = tuple(int(n) for n in rng.integers(-1, 2 ** rng.integers(2, 40), rng.integers(4)))
                dtype = [*DTYPES, "object", "<V8"][rng.integers(len(DTYPES) + 2)]
                record[key] = Array(dtype=dtype, shape=shape, stype="x", data=rng.bytes(rng.integers(200)))
            case 3 if isinstance(record, ArrayRecord) and keys and record[key].data:
                old = record[key]
                data = bytearray(old.data)
                data[rng.integers(len(data))] ^= 1 << rng.integers(8)
                record[key] = Array(dtype=old.dtype, shape=old.shape, stype=old.stype, data=bytes(data))
            case 4 if isinstance(record, ConfigRecord):
                record[key] = NONSENSE[rng.integers(len(NONSENSE))]
            case 5:
                content.pop(name)
                content[name] = ConfigRecord({"a": 1}) if isinstance(record, ArrayRecord) else ArrayRecord()
            case 6 if (
                isinstance(record, ArrayRecord) and keys
            ):  # a letter of the manifest more, fewer or another
                at, letter = rng.integers(len(key) + 1), LETTERS[rng.integers(len(LETTERS))]
                record[key[:at] + letter * rng.integers(2) + key[at + rng.integers(2) :]] = record.pop(key)
    return content
