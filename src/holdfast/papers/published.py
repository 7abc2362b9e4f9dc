"""The papers' tables and figures: published numbers, and the settings to reproduce them with the source of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from holdfast.core.errors import HoldfastError, unknown

PAPERS = ("fedntd", "fedka", "flashback", "fedfa", "fedmlp", "flamby")
RECIPE = (
    "recipe"  # the file of the library's own method: its tables have the federations and rows of the papers
)
SOURCES = ("paper", "official-code", "inferred", "tuned-by-us")


@dataclass(frozen=True)
class Setting:
    """A value and its source, one of `SOURCES`."""

    value: Any
    source: str
    note: str = ""


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Number:
    """A published number, with its deviation over seeds if printed; infinite for a target that was never reached."""

    value: float
    deviation: float | None = None


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a method. ``needs`` names the missing requirement, if any."""

    key: str
    label: str
    method: Setting | None
    settings: Settings
    needs: str | None = None


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: a federation.

    Attributes:
        key, label: its name in the YAML file and in print.
        settings: those that differ from the table's.
        methods: methods, by row, that differ from the row's.
        seeds: the paper's seeds.
        fixed_seeds: whether only these seeds count, as for the output of a released notebook.
        needs: the missing requirement, if any.
    """

    key: str
    label: str
    settings: Settings
    methods: Settings
    seeds: Setting
    fixed_seeds: bool = False
    needs: str | None = None


@dataclass(frozen=True)
class Target:
    """The accuracy to which rounds are counted.

    It is ``share`` times the baseline's last accuracy, the best accuracy of all methods, or the published accuracy
    in ``levels``, in percent by column.
    """

    of: Literal["baseline", "best", "published"]
    share: float = 1.0
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Exclusion:
    """Cells whose published numbers are not targets, and the reason."""

    rows: Collection[str]
    columns: Collection[str]
    reason: str


@dataclass(frozen=True)
class FigureContent:
    """What a figure of a paper shows.

    Attributes:
        panels: names in `holdfast.papers.figure_panels.PANELS`, each drawn for every column.
        shows: what the paper's figure shows, in words.
        ours: what ours shows, if there are runs.
        client: the client whose local models are tested class by class, if any is.
        classes: the class, by column, that the panels are about; all classes for other columns.
        swept: settings; for each of them one panel with the values that the columns have, all others as in the first.
    """

    panels: Sequence[str]
    shows: str
    ours: str = ""
    client: int | None = None
    classes: Mapping[str, int] = field(default_factory=dict)
    swept: Sequence[str] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or a figure or a search for settings, which have no published numbers.

    Attributes:
        measures: names for `holdfast.papers.measures.measure`.
        published: for each row and column one number for each measure, None where the paper has none.
        findings: pairs of rows, of which the first leads the second in the paper.
        settings: the paper's, and those that the table changes.
        exclusions: cells whose published numbers are not targets.
        drawing: what is drawn of a figure; None for tables and searches.
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
    exclusions: Sequence[Exclusion] = ()
    notes: Sequence[str] = ()
    drawing: FigureContent | None = None

    @property
    def id(self) -> str:
        """The name on the command line, such as ``fedntd/table1-lda`` or ``fedka/fig3``."""
        return f"{self.paper.key}/{self.key}"

    @property
    def is_search(self) -> bool:
        """Whether this is a search for settings rather than a table or a figure of the paper."""
        return not self.published and self.drawing is None

    def pairs(self) -> list[tuple[TableColumn, TableRow]]:
        """The cells of the table, without those that the paper leaves empty.

        A row without any published number is not the paper's; it has a cell in every column.
        """
        printed = {row for (row, _), numbers in self.published.items() if any(numbers)}
        return [
            (column, row)
            for column in self.columns.values()
            for row in self.rows.values()
            if row.key not in printed or any(self.published[row.key, column.key])
        ]

    def settings_of(self, column: TableColumn, row: TableRow) -> dict[str, Setting]:
        """Every setting of a cell, including its method.

        A row's settings take precedence over its column's, and these over the table's.
        """
        merged = {**self.settings, **column.settings, **row.settings}
        method = column.methods.get(row.key, row.method)
        return merged if method is None else merged | {"method": method}

    def exclusion_reason(self, column: str, row: str) -> str | None:
        """The reason why a cell's published numbers are not targets; None if they are."""
        for exclusion in self.exclusions:
            if row in exclusion.rows and column in exclusion.columns:
                return exclusion.reason
        return None


@dataclass(frozen=True)
class Overview:
    """Tables and measures, by name, whose published numbers and ours one figure shows."""

    tables: Sequence[str]
    measures: Sequence[str]


@dataclass(frozen=True, eq=False)
class Paper:
    """A paper.

    Attributes:
        key: its name on the command line.
        name: the name of its method, or its own, in print.
        title, reference: as it is cited.
        verdict: a one-line summary of the reproduction.
        summary: a few sentences on it.
        proposed: the row of its method.
        baseline: the row that its method is compared with.
        overview: the tables and measures that the figure of the paper on the first page shows, if there is one.
    """

    key: str
    name: str
    title: str
    reference: str
    verdict: str
    summary: str
    proposed: str
    baseline: str
    overview: Overview | None = None


@cache
def load_tables() -> Mapping[str, PaperTable]:
    """The tables and figures of the papers and of the recipe by id, followed by the searches."""
    tables = [table for paper in (*PAPERS, RECIPE) for table in _read(paper)]
    tables.sort(key=lambda table: table.is_search)
    return {table.id: table for table in tables}


def select_tables(name: str) -> list[PaperTable]:
    """The table or figure with this id, or all that a prefix names: ``fedntd``, ``fedntd/table1``."""
    tables = load_tables()
    if name in tables:
        return [tables[name]]
    chosen = [t for key, t in tables.items() if key.startswith((f"{name}/", f"{name}-"))]
    if not chosen:
        raise unknown("figure" if "/fig" in name else "table", name, tables)
    return chosen


def select(kind: str, text: str, known: Collection[str]) -> list[str]:
    """The keys in ``known`` that a comma-separated text names, in the order of ``known``.

    ``cifar10`` also names ``cifar10:s=2``. A key may contain commas itself: ``fedka:beta=0.1,gamma=0.05``.
    """
    names: list[str] = []
    parts = [part for part in map(str.strip, text.split(",")) if part]
    while parts:
        ends = [end for end in range(len(parts), 0, -1) if ",".join(parts[:end]) in known]
        end = ends[0] if ends else 1
        names.append(",".join(parts[:end]))
        parts = parts[end:]
    if not names:
        raise HoldfastError(f"no {kind} is named; name one, or leave the option out for all")
    for name in names:
        if not any(_matches(name, key) for key in known):
            raise unknown(kind, name, known)
    return [key for key in known if any(_matches(name, key) for name in names)]


def _matches(name: str, key: str) -> bool:
    return key == name or key.startswith(f"{name}:")


def _read(key: str) -> list[PaperTable]:
    content = _content(key)
    rows = _rows(content["rows"])
    paper = Paper(
        key=key,
        name=content.get("name") or rows[content["proposed"]].label,
        title=content["title"],
        reference=content["reference"],
        verdict=content["verdict"],
        summary=content["summary"],
        proposed=content["proposed"],
        baseline=content["baseline"],
        overview=Overview(**content["overview"]) if "overview" in content else None,
    )
    tables = []
    blocks = (content["tables"], content.get("figures", {}), content.get("searches", {}))
    for name, table in ((name, table) for block in blocks for name, table in block.items()):
        of = _content(table["of"]) if "of" in table else content
        seeds = table.get("seeds", of["seeds"])
        columns = _columns(of["columns"] | table.get("own_columns", {}), seeds)
        if "table" in table:
            table = _with_rows_of(of["tables"][table["table"]], table)
        settings = _settings(of.get("settings")) | _settings(table.get("settings"))
        if "candidates" in table:
            tables.append(_search(paper, name, table, columns, settings))
        else:
            known = _rows(of["rows"]) | rows | _rows(table.get("own_rows", {}))
            make = _figure if "panels" in table else _table
            tables.append(make(paper, name, table, columns, known, settings))
    return tables


def _with_rows_of(original: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of another paper, or some of its columns, with further rows that have no published numbers."""
    columns = table.get("columns", original["columns"])
    positions = [original["columns"].index(column) for column in columns]
    empty = " | ".join("–" for _ in original["measures"])
    published = {row: [empty] * len(columns) for row in table["rows"]}
    published |= {row: [cells[i] for i in positions] for row, cells in original["published"].items()}
    inherited = {key: original[key] for key in ("title", "measures", "settings", "target") if key in original}
    return {**inherited, **table, "columns": columns, "published": published}


@cache
def _content(key: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(f"{key}.yaml").read_text("utf-8"))
    return content


def _rows(rows: Mapping[str, Any]) -> dict[str, TableRow]:
    return {
        name: TableRow(
            key=name,
            label=row["label"],
            method=_setting(row["method"]) if "method" in row else None,
            settings=_settings(row.get("settings")),
            needs=row.get("needs"),
        )
        for name, row in rows.items()
    }


def _columns(columns: Mapping[str, Any], seeds: Mapping[str, Any]) -> dict[str, TableColumn]:
    return {
        name: TableColumn(
            key=name,
            label=column["label"],
            settings=_settings(column.get("settings")),
            methods=_settings(column.get("methods")),
            seeds=_setting(column.get("seeds", seeds)),
            fixed_seeds="seeds" in column,
            needs=column.get("needs"),
        )
        for name, column in columns.items()
    }


def _table(
    paper: Paper,
    key: str,
    table: dict[str, Any],
    columns: Mapping[str, TableColumn],
    rows: Mapping[str, TableRow],
    settings: Settings,
) -> PaperTable:
    column_keys, measures = table["columns"], table["measures"]
    published = {
        (row, column): _numbers(cell, len(measures), f"{paper.key}/{key}, {row}, {column}")
        for row, cells in table["published"].items()
        for column, cell in zip(column_keys, cells, strict=True)
    }
    main = (paper.proposed, paper.baseline)
    default = [main] if set(main) <= set(table["published"]) else []
    return PaperTable(
        paper=paper,
        key=key,
        title=table["title"],
        measures=measures,
        columns={key: columns[key] for key in column_keys},
        rows={key: rows[key] for key in table["published"]},
        published=published,
        findings=[(ahead, behind) for ahead, behind in table.get("findings", default)],
        settings=settings,
        target=Target(**table["target"]) if "target" in table else None,
        exclusions=[
            Exclusion(one.get("rows", rows), one.get("columns", column_keys), one["reason"])
            for one in table.get("exclusions", ())
        ],
        notes=table.get("notes", ()),
    )


def _figure(
    paper: Paper,
    key: str,
    figure: dict[str, Any],
    columns: Mapping[str, TableColumn],
    rows: Mapping[str, TableRow],
    settings: Settings,
) -> PaperTable:
    return PaperTable(
        paper=paper,
        key=key,
        title=figure["title"],
        measures=figure["measures"],
        columns={name: columns[name] for name in figure["columns"]},
        rows={name: rows[name] for name in figure["rows"]},
        published={},
        findings=(),
        settings=settings,
        notes=figure.get("notes", ()),
        drawing=FigureContent(
            **{one.name: figure[one.name] for one in fields(FigureContent) if one.name in figure}
        ),
    )


def _search(
    paper: Paper,
    key: str,
    table: dict[str, Any],
    columns: Mapping[str, TableColumn],
    settings: Settings,
) -> PaperTable:
    rows = {text: TableRow(text, text, Setting(text, "tuned-by-us"), {}) for text in table["candidates"]}
    return PaperTable(
        paper=paper,
        key=key,
        title=table["title"],
        measures=table["measures"],
        columns={name: columns[name] for name in table["columns"]},
        rows=rows,
        published={},
        findings=(),
        settings=settings,
        target=Target(**table["target"]) if "target" in table else None,
    )


def _settings(content: Mapping[str, Any] | None) -> dict[str, Setting]:
    return {key: _setting(value) for key, value in (content or {}).items()}


def _setting(content: Mapping[str, Any]) -> Setting:
    """Parse ``{paper: 200, note: ...}``: a value under its source, and an optional note."""
    sources = [key for key in content if key != "note"]
    if len(sources) != 1 or sources[0] not in SOURCES:
        raise HoldfastError(f"{dict(content)} must have one of {', '.join(SOURCES)} as its key")
    return Setting(content[sources[0]], sources[0], content.get("note", ""))


def _numbers(cell: object, measures: int, where: str) -> list[Number | None]:
    """Parse ``40.14 | 0.59``: one number for each measure."""
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
