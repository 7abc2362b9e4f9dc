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
from holdfast.core.schema import Mismatch, validate_schema
from holdfast.runs import schemas

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
    content = plain(record)
    if type(content.get("round")) is not int:
        raise ValueError("a record needs an integer 'round'")
    return json.dumps(content, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def parse(line: bytes) -> Record:
    """The record in one line; ``ValueError`` with the reason if the line is damaged."""
    try:
        record: Record = json.loads(line)
        validate_schema(record, schemas.Record)
    except Mismatch:
        raise
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    return record


def lines(path: Path, data: bytes) -> Iterator[tuple[int, Record]]:
    """Every record in the content ``data`` of ``path``, each with the offset in bytes of the end of its line.

    An incomplete last line is left out. A damaged line before it raises ``HoldfastError``.
    """
    complete = data.split(b"\n")[:-1]  # what follows the last line break is incomplete
    end = 0
    for number, line in enumerate(complete, start=1):
        end += len(line) + 1
        try:
            yield end, parse(line)
        except ValueError as error:
            if number < len(complete):
                raise HoldfastError(
                    f"{path} is damaged: line {number} is not the JSON object of a round ({error}); "
                    "restore it from a copy"
                ) from None


def newest_first(path: Path) -> Iterator[Record]:
    """The records from last to first, reading only as much of the file as is consumed.

    Incomplete and damaged lines are handled as in ``lines``.
    """
    with files.reading(path), open(path, "rb") as file:
        backwards = islice(
            _lines_backwards(file), 1, None
        )  # without the incomplete line after the last break
        for number, line in enumerate(backwards):
            try:
                yield parse(line)
            except ValueError as error:
                if number > 0:
                    raise HoldfastError(
                        f"{path} is damaged: a line near its end is not the JSON object of a round ({error})"
                    ) from None


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
