"""metrics.jsonl: one JSON object a round, and what to make of a file that was cut short."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.runs import files

Record = dict[str, Any]


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
                f"{path} is damaged: line {number} is not the JSON object of a round;"
                " restore the file from a copy or remove that line"
            )


def last_records(path: Path, tail_bytes: int = 1 << 16) -> list[Record]:
    """The last record and those before it within ``tail_bytes``, found without reading the whole file.

    Empty where there is none yet; raises ``HoldfastError`` where no line at the end can be read.
    """
    with files.reading(path), open(path, "rb") as file:
        start = size = file.seek(0, 2)
        while True:
            # Grows until a whole line lies in it: one of a large federation may be longer than the tail.
            start = max(0, min(start, size) - tail_bytes)
            file.seek(start)
            complete = file.read(size - start).split(b"\n")[:-1]
            if start > 0:
                complete = complete[1:]  # the first began before the tail
            records = [record for line in complete if (record := parse(line)) is not None]
            if records or start == 0:
                break
            tail_bytes *= 2
    if len(complete) > 1 and not records:
        raise HoldfastError(f"{path} is damaged: its last lines are not the JSON objects of rounds")
    return records
