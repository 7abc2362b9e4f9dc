"""The page of one paper: its tables with published numbers and ours, findings, notes, settings, curves and searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from os.path import relpath
from pathlib import Path

from holdfast.metrics.summary import UNKNOWN
from holdfast.papers.findings import Finding, TableComparison
from holdfast.papers.formatting import (
    anchor,
    format_averaged,
    format_ours,
    format_published,
    format_published_lead,
    format_score,
)
from holdfast.papers.measures import measure
from holdfast.papers.published import Paper, PaperTable, Setting

MARKS = ("†", "‡", "§", "¶")

HEAD = """Each cell shows the published number, followed by ours in bold type: 52.61 · **53.40**, or *not run*. For
several seeds our number is the mean, with the deviation and the number of seeds: **53.40 ± 1.20** (3). A third number,
without bold type, is the mean of the last ten rounds. A dash marks a number that the paper does not print or that a run
did not record. † and ‡ mark published numbers that are not used as targets; the reason is given below the table. See
[how findings are judged](../results.md#findings)."""

SEARCHES = "Searches for settings that the paper does not state, and for the causes of differences."


@dataclass(frozen=True)
class Section:
    """A table on the page.

    Attributes:
        comparison: its published numbers and ours.
        done, planned: the number of cells with a stored run, and of all cells.
        figures: the files of the figures.
    """

    comparison: TableComparison
    done: int
    planned: int
    figures: Sequence[Path]

    @property
    def table(self) -> PaperTable:
        return self.comparison.table

    @property
    def findings(self) -> Sequence[Finding]:
        return self.comparison.findings


def paper_page(paper: Paper, sections: Sequence[Section], folder: Path) -> str:
    """The page of a paper in Markdown; links to figures are relative to ``folder``."""
    title = paper.title if paper.title.startswith(paper.name) else f"{paper.name}: {paper.title}"
    tables = [section for section in sections if section.table.published]
    figures = [section for section in sections if section.table.drawing is not None]
    searches = [section for section in sections if section.table.is_search]
    parts = [f"# {title}", f"{paper.reference}.", paper.summary, HEAD, _contents(tables)]
    parts += [_section(section, folder) for section in tables]
    if figures:
        parts += [figure_contents(figures), *(figure_section(section, folder) for section in figures)]
    if searches:
        parts.append(f"## Searches\n\n{SEARCHES}")
        parts += [_search(section, folder) for section in searches]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def figure_contents(sections: Sequence[Section]) -> str:
    """A line for each figure of the paper."""
    lines = ["## Figures", "", "| figure | title | cells run |", "|---|---|---|"]
    for section in sections:
        link = f"[{section.table.id}](#{anchor(section.table)})"
        lines.append(f"| {link} | {section.table.title} | {section.done} of {section.planned} |")
    return "\n".join(lines)


def figure_section(section: Section, folder: Path) -> str:
    """A figure of the paper: what it shows there, ours as far as it has been run, and what that shows."""
    table, drawing = section.table, section.table.drawing
    assert drawing is not None
    parts = [
        f'<a id="{anchor(table)}"></a>\n\n## {table.id}: {table.title}',
        f"In the paper: {drawing.shows}",
    ]
    if section.figures:
        parts += _figures(section, folder)
        parts += [f"Ours: {drawing.ours}"] if drawing.ours else []
    parts += [] if section.figures else ["Not run."]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    parts.append(_settings(table))
    return "\n\n".join(parts)


def _contents(sections: Sequence[Section]) -> str:
    lines = ["| table | title | cells run | findings that hold |", "|---|---|---|---|"]
    for section in sections:
        hold = (
            f"{sum(f.holds for f in section.findings)} of {len(section.findings)}"
            if section.findings
            else UNKNOWN
        )
        link = f"[{section.table.id}](#{anchor(section.table)})"
        lines.append(f"| {link} | {section.table.title} | {section.done} of {section.planned} | {hold} |")
    return "\n".join(lines)


def _section(section: Section, folder: Path) -> str:
    table = section.table
    parts = [f'<a id="{anchor(table)}"></a>\n\n## {table.id}: {table.title}', *_numbers(section.comparison)]
    if section.findings:
        parts.append(_findings(section.comparison))
    parts += _figures(section, folder)
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    parts.append(_settings(table))
    return "\n\n".join(parts)


def _search(section: Section, folder: Path) -> str:
    table = section.table
    state = "not run" if not section.done else f"{section.done} of {section.planned} cells run"
    parts = [*_numbers(section.comparison), *_figures(section, folder)] if section.done else []
    parts += [f"- {note}" for note in table.notes]
    summary = f"{table.id}: {table.title} ({state})"
    candidates = ", ".join(f"`{row}`" for row in table.rows)
    columns = ", ".join(column.label for column in table.columns.values())
    body = "\n\n".join(parts or [f"Candidates: {candidates}.", f"On: {columns}."])
    return f'<a id="{anchor(table)}"></a>\n\n{_folded(summary, body)}'


def _numbers(comparison: TableComparison) -> list[str]:
    """The table with the footnotes of its numbers."""
    table = comparison.table
    if len(table.columns) == 1:
        parts = [_grid(comparison, range(len(table.measures)))]
    else:
        parts = [_grid(comparison, [position]) for position in range(len(table.measures))]
    parts += [f"{mark} {reason}" for reason, mark in _marks(comparison).items()]
    parts += _not_measured(table)
    if comparison.targets:
        targets = ", ".join(
            f"{table.columns[key].label} {value:.1%}" for key, value in comparison.targets.items()
        )
        published = table.target is not None and table.target.of == "published"
        parts.append(f"Target accuracies, {'published' if published else 'ours'}: {targets}.")
    return parts


def _findings(comparison: TableComparison) -> str:
    """A line for each finding; the score that is the criterion is in bold type."""
    lines = [
        "| finding | published lead | last ten rounds | last round, or only score | criterion | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for finding in comparison.findings:
        column = comparison.table.columns[finding.column].label
        label = measure(finding.measure).label
        averaged, last = (format_score(finding, score) for score in (finding.averaged, finding.last))
        scores = f"**{averaged}** | {last}" if averaged else f" | **{last}**"
        verdict = "holds" if finding.holds else "falls short"
        seeds = f"{finding.seeds} seed{'s' * (finding.seeds > 1)}"
        lines.append(
            f"| {column}: {finding.ahead} over {finding.behind}, {label} | {format_published_lead(finding)} "
            f"| {scores} | {finding.judged_by}, {seeds} | {verdict} |"
        )
    return "\n".join(lines)


def _figures(section: Section, folder: Path) -> list[str]:
    return [
        f"![{section.table.id}: {path.stem}]({Path(relpath(path, folder)).as_posix()})"
        for path in section.figures
    ]


def _marks(comparison: TableComparison) -> dict[str, str]:
    """The reasons why numbers are not targets, each with its footnote mark."""
    reasons = dict.fromkeys(row.excluded for row in comparison.rows if row.excluded)
    return dict(zip(reasons, MARKS, strict=False))


def _not_measured(table: PaperTable) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for one in map(measure, table.measures):
        if one.not_measured:
            reasons.setdefault(one.not_measured, []).append(one.label)
    return [f"Not measured ({'; '.join(labels)}): {reason}." for reason, labels in reasons.items()]


def _grid(comparison: TableComparison, positions: Sequence[int]) -> str:
    """A line for each method and a column for each federation, or for each measure if there is one federation."""
    table = comparison.table
    by_key = {(row.column, row.row): row for row in comparison.rows}
    marks = _marks(comparison)
    measures = [measure(table.measures[position]) for position in positions]
    title, labels = measures[0].label, [column.label for column in table.columns.values()]
    if len(measures) > 1:
        title, labels = labels[0], [one.label for one in measures]
    lines = [f"| {title} | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for method in table.rows.values():
        cells = []
        for column, (position, one) in product(table.columns, zip(positions, measures, strict=True)):
            row = by_key.get((column, method.key))
            if row is None:
                cells.append(UNKNOWN)
                continue
            value = row.values[position]
            ours = format_ours(value, one, row)
            if not one.not_measured:
                ours = f"**{ours}**" if row.seeds else "not run"
            averaged = format_averaged(value, one)
            ours += f" · {averaged}" if averaged else ""
            ours += f" ({value.seeds})" if value.deviation is not None else ""
            published = format_published(value, one) + (marks[row.excluded] if row.excluded else "")
            cells.append(ours if table.is_search else f"{published} · {ours}")
        name = f"`{method.label}`" if table.is_search else method.label
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _settings(table: PaperTable) -> str:
    """A list of the settings that the paper does not print."""
    settings = list(table.settings.items())
    settings += [(row.label, row.method) for row in table.rows.values() if row.method is not None]
    for column in table.columns.values():
        settings += [
            (f"{column.label}, {name}", setting)
            for name, setting in {**column.settings, **column.methods}.items()
        ]
    lines = [f"- {name}: {_value(setting)}" for name, setting in settings if setting.source != "paper"]
    lines += [f"- {row.label}: needs {row.needs}" for row in table.rows.values() if row.needs]
    lines += [f"- {column.label}: needs {column.needs}" for column in table.columns.values() if column.needs]
    return _folded(f"{len(lines)} settings that the paper does not print", "\n".join(lines))


def _folded(summary: str, body: str) -> str:
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{body}\n\n</details>'


def _value(setting: Setting) -> str:
    note = f"; {setting.note}" if setting.note else ""
    return f"`{setting.value}` ({setting.source}{note})"
