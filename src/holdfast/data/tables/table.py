"""A table as columns by name, from a frame, a mapping of columns, a CSV or a Parquet file."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import named

TableSource = Any
"""A pandas or polars frame, a pyarrow table, a mapping of columns, or the path of a CSV or Parquet file."""

SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "None", "<NA>"})
"""Texts in a file that mark a missing value."""

_PANDAS_INDEX = re.compile(
    r"__index_level_\d+__"
)  # what pandas calls an index without a name in Parquet files
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+")


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length by name.

    A column is a float64 array with NaN for missing values, or an object array of texts with None for missing values.
    Errors use ``name`` for the table, ``row`` for the kind of a row and ``numbers`` for the rows' numbers.
    """

    columns: Mapping[str, np.ndarray]
    name: str = "the table"
    row: str = "row"
    numbers: np.ndarray | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, column: str) -> np.ndarray:
        if column not in self.columns:
            raise unknown(f"column of {self.name}", column, self.columns)
        return self.columns[column]

    def rows(self, chosen: np.ndarray) -> Table:
        """The table with these rows only."""
        numbers = np.arange(len(self)) if self.numbers is None else self.numbers
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return Table(columns, self.name, self.row, numbers[chosen])

    def at(self, row: int) -> str:
        """A row in words: ``row 3 of the table``, ``line 5 of 'paris.csv'``."""
        return f"{self.row} {row if self.numbers is None else self.numbers[row]} of {self.name}"


def read_table(source: TableSource, name: str = "the table") -> Table:
    """The table in ``source``; only the marks of missing values are converted."""
    if isinstance(source, Table):
        return source
    if isinstance(source, (str, Path)):
        return _read_file(Path(source).expanduser(), name)
    names = _column_names(source)
    if names is None:
        raise HoldfastError(
            f"{name} is {named(source)}; it must be a frame, a mapping of columns, or the path of a .csv or "
            ".parquet file"
        )
    texts = [str(column) for column in names]
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise HoldfastError(f"{name} has two columns called '{twice}'; their names must differ")
    columns = {text: _column(source[column], text, name) for text, column in zip(texts, names, strict=True)}
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise HoldfastError(
            f"the columns of {name} have {min(lengths)} to {max(lengths)} rows; they must have the same length"
        )
    return Table(columns, name)


def is_table(source: object) -> bool:
    """Whether `read_table` accepts it."""
    if isinstance(source, (str, Path)):
        return Path(source).suffix in SUFFIXES
    return isinstance(source, Table) or _column_names(source) is not None


def is_missing(value: object) -> bool:
    """Whether a value marks a missing one: None, NaN, pandas' NA and NaT."""
    return value is None or value != value or type(value).__name__ in ("NAType", "NaTType")


def as_numbers(table: Table, column: str) -> np.ndarray:
    """A column as float64, NaN for missing values; raises an error that names the first value that is not a number."""
    values = table[column]
    numbers = values if values.dtype != object else np.full(len(values), np.nan)
    for row, value in enumerate(values) if values.dtype == object else ():
        if value is None:
            continue
        number = _number(value)
        if number is None:
            raise HoldfastError(
                f"column '{column}' holds '{value}' in {table.at(row)}, where other values are numbers; correct it, or "
                f"name the column in categorical or drop"
            )
        numbers[row] = number
    if np.isinf(numbers).any():
        row = int(np.isinf(numbers).argmax())
        raise HoldfastError(
            f"column '{column}' holds an infinite value in {table.at(row)}; correct it or leave the row out"
        )
    return numbers


def as_texts(table: Table, column: str) -> np.ndarray:
    """A column as an object array of texts, None for missing values; the numbers 3.0 and 3 both become ``3``."""
    values = table[column]
    known = [None if is_missing(value) else value for value in values.tolist()]
    numbers = [None if value is None else _number(value) for value in known]
    if all((number is None) == (value is None) for number, value in zip(numbers, known, strict=True)):
        known = [None if number is None else f"{number:.15g}" for number in numbers]
    return _objects(known)


def refuse_decimal_commas(tables: Sequence[Table], column: str) -> None:
    """Raise an error if all texts of a column are numbers with a decimal comma: each would become a category."""
    known = [
        (table, row, text) for table in tables for row, text in enumerate(table[column]) if text is not None
    ]
    if known and all(isinstance(text, str) and _DECIMAL_COMMA.fullmatch(text) for _, _, text in known):
        table, row, text = known[0]
        raise HoldfastError(
            f"column '{column}' holds '{text}' in {table.at(row)}; write numbers with a decimal point, not a comma"
        )


def holds_numbers(values: np.ndarray) -> tuple[bool, bool]:
    """Whether a column contains numbers (also as text), and whether it contains other texts."""
    if values.dtype != object:
        return not bool(np.isnan(values).all()), False
    parsed = [_number(value) is not None for value in values if value is not None]
    return any(parsed), not all(parsed)


def _number(value: str | float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return None if isinstance(value, str) and "_" in value else number


def _column_names(source: Any) -> list[Any] | None:
    if isinstance(source, Mapping):
        return list(source)
    names = getattr(source, "column_names", None)  # pyarrow, Hugging Face datasets
    names = getattr(source, "columns", None) if names is None else names  # pandas, polars
    return None if names is None or callable(names) or not hasattr(source, "__getitem__") else list(names)


def _column(given: Any, column: str, table: str) -> np.ndarray:
    if isinstance(given, str) or not (hasattr(given, "__array__") or hasattr(given, "__iter__")):
        raise HoldfastError(
            f"column '{column}' of {table} is {given!r}; it must hold one value a row, such as [{given!r}]"
        )
    values = np.asarray(given) if hasattr(given, "__array__") else _objects(list(given))
    if values.ndim != 1:
        raise HoldfastError(
            f"column '{column}' of {table} has the shape {values.shape}; it must hold one value a row"
        )
    kind = values.dtype.kind
    if kind in "mM":
        raise HoldfastError(
            f"column '{column}' of {table} holds dates or times; convert them to numbers, such as the days since "
            "a date, or name it in drop"
        )
    if kind in "biuf":
        return values.astype(np.float64)
    if kind not in "OUST":
        raise HoldfastError(
            f"column '{column}' of {table} holds {values.dtype.name} values; it must hold numbers or texts"
        )
    known = [(row, value) for row, value in enumerate(values.tolist()) if not is_missing(value)]
    for row, value in known:
        if not isinstance(value, (str, bool, int, float, np.number, np.bool_)):
            raise HoldfastError(
                f"column '{column}' of {table} holds {named(value)} in row {row}; it must hold numbers or texts, or be "
                "named in drop"
            )
    if not any(isinstance(value, str) for _, value in known):
        numbers = np.full(len(values), np.nan)
        numbers[[row for row, _ in known]] = [float(value) for _, value in known]
        return numbers
    texts = _objects([None] * len(values))
    for row, value in known:
        texts[row] = value if isinstance(value, str) else f"{float(value):.15g}"
    return texts


def _objects(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def _read_file(path: Path, name: str) -> Table:
    name = f"'{path.name}'" if name == "the table" else f"{name} ('{path.name}')"
    if path.suffix not in SUFFIXES:
        raise HoldfastError(f"{name} must be a file that ends in {', '.join(SUFFIXES)}, not '{path}'")
    if not path.is_file():
        raise HoldfastError(f"there is no file '{path}'")
    return _read_parquet(path, name) if path.suffix == ".parquet" else _read_csv(path, name)


def _read_parquet(path: Path, name: str) -> Table:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise HoldfastError(f"reading '{path}' needs pyarrow: pip install pyarrow") from None
    try:
        content = parquet.read_table(path)
        unnamed = [column for column in content.column_names if _PANDAS_INDEX.fullmatch(column)]
        return read_table(content.drop_columns(unnamed), name)
    except (OSError, ValueError) as error:
        raise HoldfastError(f"'{path}' cannot be read as a Parquet file: {error}") from None


def _read_csv(path: Path, name: str) -> Table:
    """The columns of a file whose first line has their names; commas, semicolons or tabs separate values."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            header = stream.readline()
            stream.seek(0)
            separator = max(",;\t", key=header.count)
            reader = csv.reader(stream, delimiter=separator, strict=True)
            names = [column.strip() for column in next(reader, [])]
            lines, rows = [], []
            for row in reader:
                if row:
                    lines.append(reader.line_num)
                    rows.append(row)
    except UnicodeDecodeError as error:
        raise HoldfastError(f"'{path}' is not UTF-8 text ({error}); save it in this encoding") from None
    except (OSError, csv.Error) as error:
        raise HoldfastError(f"'{path}' cannot be read as a CSV file: {error}") from None
    if not names:
        raise HoldfastError(f"'{path}' is empty; its first line must have the names of the columns")
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            raise HoldfastError(
                f"line {line} of {name} has {len(row)} values, but there are {len(names)} columns"
            )
    if "" in names:
        raise HoldfastError(
            f"column {names.index('') + 1} of {name} has no name; give it one in the first line, or leave it out "
            "(pandas writes none for an index: to_csv(..., index=False))"
        )
    if len(set(names)) < len(names):
        twice = next(column for column in names if names.count(column) > 1)
        raise HoldfastError(f"{name} has two columns called '{twice}'; their names must differ")
    cells = zip(*rows, strict=True) if rows else ((),) * len(names)
    columns = {column: _texts(values) for column, values in zip(names, cells, strict=True)}
    return Table(columns, name, "line", np.array(lines, np.int64))


def _texts(cells: Sequence[str]) -> np.ndarray:
    return _objects([None if cell.strip() in MISSING else cell.strip() for cell in cells])
