"""What the papers published: tables, settings with where each comes from, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from holdfast.core.errors import HoldfastError, unknown

PAPERS = ("fedntd", "fedka", "flashback", "fedfa", "fedmlp")
SOURCES = ("paper", "official-code", "inferred", "tuned-by-us")


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from, one of `SOURCES`."""

    value: Any
    source: str
    note: str = ""


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Number:
    """A published number; infinite where a target was never reached. ``deviation``: over seeds, if printed."""

    value: float
    deviation: float | None = None


@dataclass(frozen=True)
class TableRow:
    """A line of a table: a method. ``needs``: what would have to exist to run it."""

    key: str
    label: str
    method: Setting | None
    settings: Settings
    needs: str | None = None


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: a federation. ``methods`` are rows whose method differs here.

    ``own_seeds``: it is about its ``seeds`` alone, as of a released notebook.
    """

    key: str
    label: str
    settings: Settings
    methods: Settings
    seeds: Setting
    own_seeds: bool = False
    needs: str | None = None


@dataclass(frozen=True)
class Target:
    """The accuracy that rounds are counted to: a share of the ``baseline``'s last, of the ``best``, or as published.

    ``levels`` are the published ones, in percent, by column.
    """

    of: Literal["baseline", "best", "published"]
    share: float = 1.0
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NotTarget:
    """Cells whose published numbers are not to be met, and why."""

    rows: Collection[str]
    columns: Collection[str]
    reason: str


@dataclass(frozen=True)
class Table:
    """One table of a paper, or a search of ours, which has no published numbers.

    ``published[row, column]`` has one entry for each of ``measures``. ``findings`` are pairs of rows: the
    first is ahead of the second in the paper.
    """

    paper: Paper
    key: str
    title: str
    measures: Sequence[str]
    columns: Mapping[str, TableColumn]
    rows: Mapping[str, TableRow]
    published: Mapping[tuple[str, str], Sequence[Number | None]]
    findings: Sequence[tuple[str, str]]
    settings: Settings
    target: Target | None = None
    not_targets: Sequence[NotTarget] = ()
    notes: Sequence[str] = ()

    @property
    def id(self) -> str:
        """Such as ``fedntd/table1-lda``."""
        return f"{self.paper.key}/{self.key}"

    @property
    def is_search(self) -> bool:
        """Whether this is a search for settings, and no table of the paper."""
        return not self.published

    def pairs(self) -> list[tuple[TableColumn, TableRow]]:
        """The cells that are there: what the paper left out is left out."""
        return [
            (column, row)
            for column in self.columns.values()
            for row in self.rows.values()
            if self.is_search or any(self.published[row.key, column.key])
        ]

    def settings_of(self, column: TableColumn, row: TableRow) -> dict[str, Setting]:
        """Every setting of a cell, its method included; a row's own win over a column's, those over the table's."""
        merged = {**self.paper.settings, **self.settings, **column.settings, **row.settings}
        method = column.methods.get(row.key, row.method)
        return merged if method is None else merged | {"method": method}

    def why_no_target(self, column: str, row: str) -> str | None:
        """Why a cell's published numbers are not to be met, if so."""
        for mark in self.not_targets:
            if row in mark.rows and column in mark.columns:
                return mark.reason
        return None


@dataclass(frozen=True, eq=False)
class Paper:
    """A paper: ``own`` is the row of its method, ``baseline`` the row it is compared with.

    ``in_short`` says in a few sentences what of it was found again.
    """

    key: str
    name: str  # of its method, for people
    title: str
    reference: str
    in_short: str
    own: str
    baseline: str
    settings: Settings


@cache
def load_tables() -> Mapping[str, Table]:
    """Every table of the five papers by its id, then the searches."""
    read = [_read(paper) for paper in PAPERS]
    tables = [table for found in read for table in found if not table.is_search]
    searches = [table for found in read for table in found if table.is_search]
    return {table.id: table for table in [*tables, *searches]}


def select_tables(name: str) -> list[Table]:
    """The table with this id, or all that it is the beginning of: ``fedntd``, ``fedntd/table1``."""
    tables = load_tables()
    if name in tables:
        return [tables[name]]
    chosen = [t for key, t in tables.items() if key.startswith((f"{name}/", f"{name}-"))]
    if not chosen:
        raise unknown("table", name, tables)
    return chosen


def select(kind: str, wanted: str, known: Collection[str]) -> list[str]:
    """Those of ``known`` that are named, in their own order; ``cifar10`` names ``cifar10:s=2`` too.

    Names are separated by commas, which may also be part of one: ``fedka:beta=0.1,gamma=0.05``.
    """
    names: list[str] = []
    parts = [part for part in map(str.strip, wanted.split(",")) if part]
    while parts:
        ends = [end for end in range(len(parts), 0, -1) if ",".join(parts[:end]) in known]
        end = ends[0] if ends else 1
        names.append(",".join(parts[:end]))
        parts = parts[end:]
    if not names:
        raise HoldfastError(f"no {kind} is named; name one, or leave the option out for all")
    for name in names:
        if not any(_named(name, key) for key in known):
            raise unknown(kind, name, known)
    return [key for key in known if any(_named(name, key) for name in names)]


def _named(name: str, key: str) -> bool:
    return key == name or key.startswith(f"{name}:")


def _read(key: str) -> list[Table]:
    content = yaml.safe_load(Path(__file__).with_name(f"{key}.yaml").read_text(encoding="utf-8"))
    paper = Paper(
        key=key,
        name=content["rows"][content["own"]]["label"],
        title=content["title"],
        reference=content["reference"],
        in_short=content["in_short"],
        own=content["own"],
        baseline=content["baseline"],
        settings=_settings(content["settings"]),
    )
    rows = {
        name: TableRow(
            key=name,
            label=row["label"],
            method=_setting(row["method"]) if "method" in row else None,
            settings=_settings(row.get("settings")),
            needs=row.get("needs"),
        )
        for name, row in content["rows"].items()
    }
    columns = {
        name: TableColumn(
            key=name,
            label=column["label"],
            settings=_settings(column.get("settings")),
            methods=_settings(column.get("methods")),
            seeds=_setting(column.get("seeds", content["seeds"])),
            own_seeds="seeds" in column,
            needs=column.get("needs"),
        )
        for name, column in content["columns"].items()
    }
    tables = [_table(paper, name, table, columns, rows) for name, table in content["tables"].items()]
    searches = [_search(paper, name, table, columns) for name, table in content.get("searches", {}).items()]
    return tables + searches


def _table(
    paper: Paper,
    key: str,
    table: dict[str, Any],
    columns: Mapping[str, TableColumn],
    rows: Mapping[str, TableRow],
) -> Table:
    names, measures = table["columns"], table["measures"]
    published = {
        (row, column): _numbers(cell, len(measures), f"{paper.key}/{key}, {row}, {column}")
        for row, cells in table["published"].items()
        for column, cell in zip(names, cells, strict=True)
    }
    default = [[paper.own, paper.baseline]] if {paper.own, paper.baseline} <= set(table["published"]) else []
    return Table(
        paper=paper,
        key=key,
        title=table["title"],
        measures=measures,
        columns={name: columns[name] for name in names},
        rows={name: rows[name] for name in table["published"]},
        published=published,
        findings=[(ahead, behind) for ahead, behind in table.get("findings", default)],
        settings=_settings(table.get("settings")),
        target=Target(**table["target"]) if "target" in table else None,
        not_targets=[
            NotTarget(mark.get("rows", rows), mark.get("columns", names), mark["reason"])
            for mark in table.get("not_targets", ())
        ],
        notes=table.get("notes", ()),
    )


def _search(paper: Paper, key: str, table: dict[str, Any], columns: Mapping[str, TableColumn]) -> Table:
    rows = {text: TableRow(text, text, Setting(text, "tuned-by-us"), {}) for text in table["candidates"]}
    return Table(
        paper=paper,
        key=key,
        title=table["title"],
        measures=table["measures"],
        columns={name: columns[name] for name in table["columns"]},
        rows=rows,
        published={},
        findings=(),
        settings=_settings(table.get("settings")),
        target=Target(**table["target"]) if "target" in table else None,
    )


def _settings(written: Mapping[str, Any] | None) -> dict[str, Setting]:
    return {key: _setting(value) for key, value in (written or {}).items()}


def _setting(written: Mapping[str, Any]) -> Setting:
    """``{paper: 200, note: ...}``: one source with the value, and perhaps a note."""
    sources = [key for key in written if key != "note"]
    if len(sources) != 1 or sources[0] not in SOURCES:
        raise HoldfastError(f"{dict(written)} must have one of {', '.join(SOURCES)} as its key")
    return Setting(written[sources[0]], sources[0], written.get("note", ""))


def _numbers(cell: object, measures: int, where: str) -> list[Number | None]:
    """``40.14 | 0.59``: a number for each measure."""
    parts = [part.strip() for part in str(cell).split("|")]
    if len(parts) != measures:
        raise HoldfastError(f"{where}: '{cell}' must have {measures} numbers, with | between them")
    return [_number(part) for part in parts]


def _number(text: str) -> Number | None:
    if text == "–":
        return None
    if text == "never":
        return Number(math.inf)
    value, _, deviation = text.partition("±")
    return Number(float(value), float(deviation) if deviation else None)
