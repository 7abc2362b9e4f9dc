"""Reads label counts from .csv files, with or without headers, as spreadsheets and pandas write them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    import numpy as np

CLIENTS = ("", "client", "clients", "client_id", "site", "site_id", "id", "index", "name")
"""Lower-case headers of a first column that identifies the clients."""


def read_counts(text: str) -> np.ndarray:
    """Parse samples per client and class ``[K, C]``; a header row and a column of client names are left out."""
    import numpy as np

    reader = csv.reader(text.splitlines())
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    has_header = bool(rows) and _has_header([row for _, row in rows])
    header, body = (rows[0][1] if has_header else None), rows[has_header:]
    if not body:
        raise HoldfastError(
            "it contains no numbers; it must have one row per client and one column per class"
        )
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise HoldfastError(f"line {line} has {len(row)} columns, but the first line has {width}")
    first = int(_identifies_clients(header, [row[0] for _, row in body]))
    if width == first:
        raise HoldfastError("its only column contains names; separate columns by commas")
    return np.array([[_count(cell, line) for cell in row[first:]] for line, row in body])


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row holds the names of classes: words, or 0, 1, 2, … above rows of counts."""
    header = rows[0]
    if not all(map(_is_number, header[1:])):
        return True
    consecutive = [str(number) for number in range(len(header))]
    if len(rows) > 1 and (
        header == consecutive or (not _is_number(header[0]) and header[1:] == consecutive[:-1])
    ):
        return True
    # A word above numbers is the header of their column; above words it is the first client's name.
    return not _is_number(header[0]) and (
        header[0].lower() in CLIENTS or any(_is_number(row[0]) for row in rows)
    )


def _identifies_clients(header: Sequence[str] | None, column: Sequence[str]) -> bool:
    """Whether the first column identifies clients: by its header, with words, or with consecutive numbers."""
    if all(cell and not _is_number(cell) for cell in column):
        return True
    if header is None or _is_number(header[0]):
        return False
    consecutive = len(column) > 1 and list(column) == [str(number) for number in range(len(column))]
    return header[0].lower() in CLIENTS or consecutive


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _count(cell: str, line: int) -> int:
    value = float(cell) if _is_number(cell) else -1.0
    if value < 0 or not value.is_integer():
        raise HoldfastError(f"'{cell}' in line {line} is not a number of samples: 0, 1, 2 and so on")
    return int(value)
