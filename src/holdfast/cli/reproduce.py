"""``reproduce``: the papers' tables and figures, published numbers compared with ours."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.papers.cells import Cell
    from holdfast.papers.cost import Estimates
    from holdfast.papers.findings import ResultRow, TableComparison
    from holdfast.papers.published import PaperTable
    from holdfast.papers.results import Results
    from holdfast.papers.sweep import Sweep
    from holdfast.sweeps.queue import Lease

INCOMPLETE = 1  # exit code: a cell could not be run
DATA_HINT = "Data sets are looked up in HOLDFAST_DATA; docs/data.md lists the files."


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(
            help="A table or figure, such as fedntd/table1 or fedka/fig3, or a paper (default: list them)."
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Only these columns, such as cifar10:s=2,mnist.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods, such as fedavg,fedntd.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds of each cell (default: run one, print all that are stored)."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(help="Number of parallel processes.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; no cell is started that is expected to end later.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Directory of stored results.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Working directory of the runs.")] = Path("runs/reproduce"),
    status: Annotated[
        bool, typer.Option("--status", help="Only print which runs are finished; run nothing.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Test every table on tiny synthetic data.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write the page of all results, such as docs/results.md.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the missing cells of a paper's table or figure, and print our numbers next to the published ones.

    Every cell is a separate run. The command can be stopped at any time: finished cells are stored, unfinished ones
    continue from their checkpoints, and several processes can work at the same time.

    Example:  holdfast reproduce fedntd/table1 --columns cifar10:s=2 --methods fedavg,fedntd --seeds 3
    """
    of_all_tables = "--smoke" if smoke else "--page" if page is not None else None
    selection = {"TABLE": table, "--columns": columns, "--methods": methods, "--time-limit": time_limit}
    given = [name for name, value in selection.items() if value is not None]
    if of_all_tables and given:
        raise HoldfastError(f"{of_all_tables} applies to all tables; leave out {given[0]}")
    if table is None and given:
        raise HoldfastError(f"{given[0]} is given without a table; name one, such as fedntd/table1")
    if time_limit is not None and not time_limit > 0:
        raise HoldfastError(f"--time-limit is {time_limit:g}; it must be more than 0 seconds")
    if smoke:
        _smoke()
    elif page is not None:
        from holdfast.papers.results_page import write_page

        figures = write_page(results, page)
        console().print(f"Page: {page}, figures: {figures}", soft_wrap=True)
    elif table is None:
        _print_list(results, work, 1 if seeds is None else seeds, status, as_json)
    else:
        from holdfast.papers.sweep import Sweep

        deadline = None if time_limit is None else time.time() + time_limit
        sweep = Sweep(results, work, device, deadline)
        _reproduce(table, columns, methods, seeds, sweep, None if status else workers, as_json)


def log_line(line: str) -> None:
    """Print a line about a cell to stderr at once; stdout is for the result. Workers import this function."""
    print(line, file=sys.stderr, flush=True)


# The list of tables ----------------------------------------------------------------------------------------


def _print_list(results: Path, work: Path, seeds: int, status: bool, as_json: bool) -> None:
    from holdfast.papers.cost import Estimates, available_data
    from holdfast.papers.published import load_tables
    from holdfast.papers.results import Results

    stored, available = Results(results), available_data()
    estimates = Estimates(stored.all())
    rows = [_overview(table, seeds, stored, available, estimates) for table in load_tables().values()]
    leases = _leases(work) if status else []
    if as_json:
        running = [{"cell": c.label, "host": c.host, "pid": c.pid, "alive": c.alive} for c in leases]
        print_json({"tables": rows, "running": running})
        return
    cells = [
        [
            f"{row['table']}\n  {row['title']}",
            "\n".join(name if found else f"({name})" for name, found in row["data"].items()),
            f"{row['gpu_minutes']:.0f}",
            f"{row['done']} of {row['runs']}",
        ]
        for row in rows
    ]
    print_table("", ["table", "data", " GPU min", " run"], cells)
    console().print(
        f"(data) is missing. {DATA_HINT} Times are estimates for {seeds} seed{'s' * (seeds > 1)}; "
        "cells with the same settings are run once.",
        style="dim",
        soft_wrap=True,
    )
    for lease in leases:
        state = "running" if lease.alive else "abandoned"
        console().print(f"{state}: {lease.label} (process {lease.pid} on {lease.host})", soft_wrap=True)


def _overview(
    table: PaperTable, seeds: int, stored: Results, available: set[str], estimates: Estimates
) -> dict[str, Any]:
    """A table's data sets, estimated time and number of runs: all, done and blocked."""
    from holdfast.papers.cells import plan
    from holdfast.papers.cost import data_sets, missing_requirement

    cells = plan(table, seeds=seeds)
    runs = {cell.hash: cell for cell in cells}.values()
    data = list(dict.fromkeys(name for cell in cells for name in data_sets(cell.settings)))
    return {
        "table": table.id,
        "title": table.title,
        "data": {name: name in available for name in data},
        "gpu_minutes": sum(estimates.seconds(cell) for cell in runs if not cell.needs) / 60,
        "runs": len(runs),
        "done": sum(stored.get(cell) is not None for cell in runs),
        "blocked": sum(missing_requirement(cell, available) is not None for cell in runs),
    }


def _leases(work: Path) -> list[Lease]:
    from holdfast.sweeps.queue import FOLDER, Queue

    return Queue(work).leases() if (work / FOLDER).exists() else []  # listing must not create the directory


# One or several tables -------------------------------------------------------------------------------------


def _reproduce(
    name: str,
    columns: str | None,
    methods: str | None,
    seeds: int | None,
    sweep: Sweep,
    workers: int | None,
    as_json: bool,
) -> None:
    """Run the selected cells with ``workers`` processes, or none of them for None, and print their tables."""
    from holdfast.papers.cells import plan
    from holdfast.papers.cost import available_data, missing_requirement
    from holdfast.papers.findings import compare
    from holdfast.papers.published import select, select_tables
    from holdfast.papers.results import Results

    tables = select_tables(name)
    known_columns = list(dict.fromkeys(key for t in tables for key in t.columns))
    known_methods = list(dict.fromkeys(key for t in tables for key in t.rows))
    column_keys = None if columns is None else select("column", columns, known_columns)
    method_keys = None if methods is None else select("method", methods, known_methods)
    planned = {t.id: plan(t, column_keys, method_keys, 1 if seeds is None else seeds) for t in tables}
    cells = [cell for of_table in planned.values() for cell in of_table]
    if not cells:
        raise HoldfastError(f"no table of {name} has these methods in these columns")
    available, complete = available_data(), True
    if workers is not None:
        runnable = [cell for cell in cells if missing_requirement(cell, available) is None]
        complete = sweep.run(runnable, workers, log_line)
    stored = Results(sweep.results)
    if seeds is None:
        planned = {t.id: stored.of_table(t, column_keys, method_keys) for t in tables}
    states = {key: _states(of_table, stored, sweep.work, available) for key, of_table in planned.items()}
    comparisons = [compare(t, planned[t.id], stored) for t in tables if planned[t.id]]
    if as_json:
        print_json([_as_dict(comparison, states[comparison.table.id]) for comparison in comparisons])
    else:
        for comparison in comparisons:
            _print_comparison(comparison, states[comparison.table.id])
        if any(state.startswith("needs data") for of_table in states.values() for state in of_table.values()):
            console().print(DATA_HINT, style="dim", soft_wrap=True)
    if not complete:
        raise typer.Exit(INCOMPLETE)


def _print_comparison(comparison: TableComparison, states: Mapping[tuple[str, str], str]) -> None:
    from holdfast.papers.formatting import format_averaged, format_difference, format_ours, format_published
    from holdfast.papers.measures import measure

    table, out = comparison.table, console()
    out.print(f"\n{table.id}: {table.title}", style="bold")
    if table.drawing is not None:
        out.print(f"In the paper: {table.drawing.shows}", soft_wrap=True)
    measures = [measure(name) for name in table.measures]
    has_average = {
        each.label: any(row.values[position].averaged for row in comparison.rows)
        for position, each in enumerate(measures)
    }
    reasons: list[str] = []
    for key, column in table.columns.items():
        lines = []
        for row in comparison.rows:
            if row.column != key:
                continue
            line = [row.label]
            for each, value in zip(measures, row.values, strict=True):
                ours = format_ours(value, each, row)
                published = [format_published(value, each), ours, format_difference(value, each)]
                line += published if table.published else [ours]
                line += [format_averaged(value, each)] if has_average[each.label] else []
            if row.excluded and row.excluded not in reasons:
                reasons.append(row.excluded)
            mark = f"not a target [{reasons.index(row.excluded) + 1}]" if row.excluded else ""
            state = row.failed or states[key, row.row]
            lines.append([*line, "; ".join(filter(None, (state, mark)))])
        if not lines:
            continue
        head = ["method"]
        for each in measures:
            head += [f" {each.label}", " ours", " difference"] if table.published else [f" {each.label}"]
            head += [" last ten"] if has_average[each.label] else []
        title = f"{key}: {column.label}"
        if key in comparison.targets:
            title += f" (target {comparison.targets[key]:.1%})"
        print_table(title, [*head, ""], lines)
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    notes += dict.fromkeys(f"Not measured: {each.not_measured}" for each in measures if each.not_measured)
    for note in notes:
        out.print(note, style="dim", soft_wrap=True)
    for finding in comparison.findings:
        out.print(f"Finding, {finding}", style="green" if finding.holds else "red", soft_wrap=True)
    if table.notes:
        out.print("Notes on the results that come with Holdfast:", style="dim")
    for note in table.notes:
        out.print(f"- {note}", style="dim", soft_wrap=True)


def _states(
    cells: Sequence[Cell], stored: Results, work: Path, available: set[str]
) -> dict[tuple[str, str], str]:
    """The state of each column and row in words: how many seeds have been run, and why others have not."""
    from holdfast.papers.cost import missing_requirement

    running = {lease.hash for lease in _leases(work) if lease.alive}
    states: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if stored.get(cell) is not None:
            state = "run"
        elif cell.hash in running:
            state = "running"
        else:
            state = missing_requirement(cell, available) or "not run"
        states.setdefault((cell.column, cell.row), []).append(state)
    return {
        key: ", ".join(
            name if len(each) == 1 or name.startswith("needs") else f"{each.count(name)} {name}"
            for name in dict.fromkeys(each)
        )
        for key, each in states.items()
    }


def _as_dict(comparison: TableComparison, states: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    return {
        "table": comparison.table.id,
        "title": comparison.table.title,
        "measures": list(comparison.table.measures),
        "targets": comparison.targets,
        "lines": [_row_as_dict(row, states[row.column, row.row]) for row in comparison.rows],
        "findings": [asdict(finding) | {"holds": finding.holds} for finding in comparison.findings],
    }


def _row_as_dict(row: ResultRow, state: str) -> dict[str, Any]:
    from holdfast.metrics.summary import mean_and_deviation

    return {
        "column": row.column,
        "method": row.row,
        "seeds": row.seeds,
        "state": state,
        "failed": row.failed,
        "not_a_target": row.excluded,
        "values": [
            {
                "published": _or_never(None if value.published is None else value.published.value),
                "ours": _or_never(value.ours),
                "deviation": value.deviation,
                "mean_of_last_ten_rounds": mean_and_deviation(value.averaged.values())[0],
                "difference": value.difference,
            }
            for value in row.values
        ],
    }


def _or_never(value: float | None) -> float | str | None:
    return "never" if value is not None and math.isinf(value) else value


# The smoke test --------------------------------------------------------------------------------------------


def _smoke() -> None:
    import tempfile

    from holdfast.papers.published import load_tables
    from holdfast.papers.smoke import smoke

    with tempfile.TemporaryDirectory() as folder:
        for line in smoke(Path(folder), list(load_tables().values())):
            log_line(line)
