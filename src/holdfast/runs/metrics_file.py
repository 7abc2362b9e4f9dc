"""metrics.jsonl, with one JSON object for each round. A process that was killed may leave an incomplete last line."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.core import files
from holdfast.core.errors import HoldfastError

Record = dict[str, Any]

_BLOCK = 1 << 16  # bytes read at a time from the end of a file


def plain(value: Any) -> Any:
    """Convert a value to strict JSON types: arrays and tensors to lists, NaN and infinities to None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def to_line(record: Mapping[str, Any]) -> bytes:
    """Serialise a record to one line; ``ValueError`` if it has no integer ``round``."""
    line = json.dumps(plain(record), allow_nan=False, ensure_ascii=False).encode()
    if parse(line) is None:
        raise ValueError("a record needs an integer 'round'")
    return line + b"\n"


def parse(line: bytes) -> Record | None:
    """Parse one line; None if it is not a JSON object with a round."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("round"), int) else None


def lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Every record, each with the offset in bytes of the end of its line; nothing if the file does not exist.

    An incomplete last line is left out. A damaged line before it raises ``HoldfastError``.
    """
    if not path.exists():
        return
    with files.reading(path):
        data = path.read_bytes()
    complete = data.split(b"\n")[:-1]  # what follows the last line break is incomplete
    end = 0
    for number, line in enumerate(complete, start=1):
        end += len(line) + 1
        record = parse(line)
        if record is not None:
            yield end, record
        elif number < len(complete):
            raise HoldfastError(
                f"{path} is damaged: line {number} is not the JSON object of a round; restore it from a copy"
            )


def newest_first(path: Path) -> Iterator[Record]:
    """The records from last to first, reading only as much of the file as is consumed.

    Incomplete and damaged lines are handled as in ``lines``.
    """
    with files.reading(path), open(path, "rb") as file:
        backwards = islice(
            _lines_backwards(file), 1, None
        )  # without the incomplete line after the last break
        for number, line in enumerate(backwards):
            record = parse(line)
            if record is not None:
                yield record
            elif number > 0:
                raise HoldfastError(
                    f"{path} is damaged: a line near its end is not the JSON object of a round"
                )


def _lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """The parts between line breaks, from the end of the file to its beginning."""
    partial = b""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        partial, *complete = (file.read(end - start) + partial).split(b"\n")
        yield from reversed(complete)
        end = start
    yield partial
