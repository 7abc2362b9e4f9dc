"""metrics.jsonl: one JSON object a round, and what to make of a file that was cut short."""

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
    """The value as strict JSON can hold it: arrays and tensors as lists, NaN and infinities as None."""
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
    """One record as one line."""
    line = json.dumps(plain(record), allow_nan=False, ensure_ascii=False).encode()
    if parse(line) is None:
        raise ValueError("a record has its round, an integer, under 'round'")
    return line + b"\n"


def parse(line: bytes) -> Record | None:
    """The record of one line, or None where the line is not a JSON object with a round."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("round"), int) else None


def lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Every record with the offset in bytes at which its line ends; nothing where there is no file.

    A last line that was cut short is left out. A damaged line before it raises ``HoldfastError``.
    """
    if not path.exists():
        return
    with files.reading(path):
        data = path.read_bytes()
    complete = data.split(b"\n")[:-1]  # what follows the last line break was never finished
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
    """The records from the last one backwards, reading no more of the file than is asked for.

    Tolerates and raises what ``lines`` does.
    """
    with files.reading(path), open(path, "rb") as file:
        for number, line in enumerate(
            islice(_lines_backwards(file), 1, None)
        ):  # the first was never finished
            record = parse(line)
            if record is not None:
                yield record
            elif number > 0:
                raise HoldfastError(
                    f"{path} is damaged: a line near its end is not the JSON object of a round"
                )


def _lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """What stands between line breaks, from the end of the file to its beginning."""
    begun = b""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        begun, *whole = (file.read(end - start) + begun).split(b"\n")
        yield from reversed(whole)
        end = start
    yield begun
