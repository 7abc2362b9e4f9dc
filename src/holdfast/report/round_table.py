"""A run's records as a table: one row per round, one column per number."""

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from holdfast.core.measures import score_measure

COUNTED = {"clients": "participants", "incidents": "incidents"}
"""Columns that count the entries of a list in a record."""


def round_rows(
    experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> list[dict[str, int | float]]:
    """The numbers of every round, including those by class and domain; unknown numbers are omitted."""
    score = score_measure(experiment).name
    rows = []
    for record in records:
        row = _numbers(record)
        row |= _numbers(record.get("seconds") or {}, "seconds_")
        row |= _numbers(record.get("validation") or {}, "validation_")
        row |= _numbers(by_class(experiment, record), f"{score}_")
        row |= _numbers(record.get(f"domain_{score}") or {}, f"{score}_")
        row |= {name: len(record[key]) for name, key in COUNTED.items() if record.get(key) is not None}
        rows.append(row)
    return rows


def rounds_csv(experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> bytes:
    """The table as a CSV file."""
    rows = round_rows(experiment, records)
    file = StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def by_class(experiment: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a record by class name, or by class number if the run has no names."""
    values = record.get(f"class_{score_measure(experiment).name}") or []
    names = experiment.get("classes") or range(len(values))
    return {str(name): value for name, value in zip(names, values, strict=False) if value is not None}


def _numbers(entries: Mapping[str, Any], prefix: str = "") -> dict[str, int | float]:
    return {
        f"{prefix}{key}": value
        for key, value in entries.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
