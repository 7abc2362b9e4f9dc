"""Label counts from a .csv file, as people and pandas write them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    import numpy as np

CLIENTS = ("", "client", "clients", "client_id", "site", "site_id", "id", "index", "name")
"""Names, in small letters, of a first column that tells clients apart, whatever is in it."""


def read_counts(text: str) -> np.ndarray:
    """Samples per client and class ``[K, C]``, without a row of classes' names or a column of clients' names."""
    import numpy as np

    reader = csv.reader(text.splitlines())
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    named = bool(rows) and _names_classes([row for _, row in rows])
    head, body = (rows[0][1] if named else None), rows[named:]
    if not body:
        raise HoldfastError("it holds no numbers; it must have one row per client, one column per class")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise HoldfastError(f"line {line} has {len(row)} columns and the first one {width}")
    first = int(_names_clients(head, [row[0] for _, row in body]))
    if width == first:
        raise HoldfastError("its only column is one of names; put commas between columns")
    return np.array([[_count(cell, line) for cell in row[first:]] for line, row in body])


def _names_classes(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the classes: words, or 0, 1, 2, … above rows of counts."""
    head = rows[0]
    if not all(map(_is_number, head[1:])):
        return True
    numbered = [str(number) for number in range(len(head))]
    if len(rows) > 1 and (head == numbered or (not _is_number(head[0]) and head[1:] == numbered[:-1])):
        return True
    # A word above numbers names their column; above words it is the first client's name.
    return not _is_number(head[0]) and (head[0].lower() in CLIENTS or any(_is_number(row[0]) for row in rows))


def _names_clients(head: Sequence[str] | None, column: Sequence[str]) -> bool:
    """Whether the first column tells clients apart: by its name, by words in it, or by counting them."""
    if all(cell and not _is_number(cell) for cell in column):
        return True
    if head is None or _is_number(head[0]):
        return False
    counted = len(column) > 1 and list(column) == [str(number) for number in range(len(column))]
    return head[0].lower() in CLIENTS or counted


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _count(cell: str, line: int) -> int:
    value = float(cell) if _is_number(cell) else -1.0
    if value < 0 or not value.is_integer():
        raise HoldfastError(f"'{cell}' in line {line} is no number of samples: 0, 1, 2 and so on")
    return int(value)
