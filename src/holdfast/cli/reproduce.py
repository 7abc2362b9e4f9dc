"""``reproduce``: the papers' tables, ours beside theirs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.papers.cells import Cell
    from holdfast.papers.findings import ResultRow, TableComparison
    from holdfast.papers.results import Results

INCOMPLETE = 1  # exit code: a cell could not be run
DATA_HINT = "Data sets are looked for in HOLDFAST_DATA; docs/data.md says what to put where."


def reproduce(
    table: Annotated[
        str | None, typer.Argument(help="Such as fedntd/table1, or fedntd for all; without it, the list.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Some columns, such as cifar10:s=2,mnist.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some methods, such as fedavg,fedntd.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Seeds of each cell: by default one is run, and all that were are shown."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes side by side.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; begin no cell that would probably take longer.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Where runs and claims are kept.")] = Path("runs/reproduce"),
    status: Annotated[bool, typer.Option("--status", help="Run nothing; say where it stands.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Every table on tiny made-up data.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write the page of all results, such as docs/results.md.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run what is missing of a paper's table, and print it beside what was published.

    Every cell is a run of its own. Stop at any moment: what is finished is stored, what was running goes on
    from its checkpoint, and several processes may work at once.

    Example:  holdfast reproduce fedntd/table1 --columns cifar10:s=2 --methods fedavg,fedntd --seeds 3
    """
    everything = "--smoke" if smoke else "--page" if page is not None else None
    selection = {"TABLE": table, "--columns": columns, "--methods": methods, "--time-limit": time_limit}
    given = [name for name, value in selection.items() if value is not None]
    if everything and given:
        raise HoldfastError(f"{everything} is of every table; leave out {given[0]}")
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
        _reproduce(
            table, columns, methods, seeds, device, workers, time_limit, results, work, status, as_json
        )


def _reproduce(
    name: str,
    columns: str | None,
    methods: str | None,
    seeds: int | None,
    device: str,
    workers: int,
    time_limit: float | None,
    results: Path,
    work: Path,
    status: bool,
    as_json: bool,
) -> None:
    from holdfast.papers.cells import plan
    from holdfast.papers.cost import available_data, lacking
    from holdfast.papers.findings import compare
    from holdfast.papers.published import select, select_tables
    from holdfast.papers.results import Results
    from holdfast.papers.sweep import Sweep

    tables = select_tables(name)
    known_columns = list(dict.fromkeys(key for t in tables for key in t.columns))
    known_methods = list(dict.fromkeys(key for t in tables for key in t.rows))
    chosen_columns = None if columns is None else select("column", columns, known_columns)
    chosen_methods = None if methods is None else select("method", methods, known_methods)
    wanted = 1 if seeds is None else seeds
    planned = {t.id: plan(t, chosen_columns, chosen_methods, wanted) for t in tables}
    cells = [cell for of_table in planned.values() for cell in of_table]
    if not cells:
        raise HoldfastError(f"no table of {name} has these methods in these columns")
    complete = True
    if not status:
        available = available_data()
        deadline = None if time_limit is None else time.time() + time_limit
        sweep = Sweep(results, work, device, deadline)
        complete = sweep.run([cell for cell in cells if lacking(cell, available) is None], workers, say)
    found = Results(results)
    if seeds is None:
        planned = {t.id: found.of_table(t, chosen_columns, chosen_methods) for t in tables}
    states = {key: _states(of_table, found, work) for key, of_table in planned.items()}
    compared = [compare(t, planned[t.id], found) for t in tables if planned[t.id]]
    if as_json:
        print_json([_as_dict(one, states[one.table.id]) for one in compared])
    else:
        for one in compared:
            _print_comparison(one, states[one.table.id])
        if any(state.startswith("needs data") for of_table in states.values() for state in of_table.values()):
            console().print(DATA_HINT, style="dim", soft_wrap=True)
    if not complete:
        raise typer.Exit(INCOMPLETE)


def say(line: str) -> None:
    """A line about a cell, at once, also from another process; what is asked for goes to the other stream."""
    print(line, file=sys.stderr, flush=True)


# What there is ---------------------------------------------------------------------------------------------


def _print_list(results: Path, work: Path, seeds: int, status: bool, as_json: bool) -> None:
    from holdfast.papers.cells import plan
    from holdfast.papers.cost import Estimates, available_data, data_sets, lacking
    from holdfast.papers.published import load_tables
    from holdfast.papers.queue import Queue
    from holdfast.papers.results import Results

    found, available = Results(results), available_data()
    estimates = Estimates(found.all())
    rows: list[dict[str, Any]] = []
    for table in load_tables().values():
        cells = plan(table, seeds=seeds)
        runs = {cell.hash: cell for cell in cells}
        done = [cell for cell in runs.values() if found.get(cell) is not None]
        blocked = [cell for cell in runs.values() if lacking(cell, available) is not None]
        data = list(dict.fromkeys(name for cell in cells for name in data_sets(cell.settings)))
        rows.append(
            {
                "table": table.id,
                "title": table.title,
                "data": {name: name in available for name in data},
                "gpu_minutes": sum(estimates.seconds(cell) for cell in runs.values() if not cell.needs) / 60,
                "runs": len(runs),
                "done": len(done),
                "blocked": len(blocked),
            }
        )
    claims = Queue(work).claims() if status and (work / "claims").exists() else []
    if as_json:
        running = [{"cell": c.label, "host": c.host, "pid": c.pid, "alive": c.alive} for c in claims]
        print_json({"tables": rows, "running": running})
        return
    shown = [
        [
            f"{row['table']}\n  {row['title']}",
            "\n".join(name if here else f"({name})" for name, here in row["data"].items()),
            f"{row['gpu_minutes']:.0f}",
            f"{row['done']} of {row['runs']}",
        ]
        for row in rows
    ]
    print_table("", ["table", "data", " GPU min", " run"], shown)
    notes = [
        f"(data) is not here. {DATA_HINT}",
        f"Times are estimates for {seeds} seed{'s' * (seeds > 1)}",
    ]
    console().print(
        f"{notes[0]} {notes[1]}; cells with the same settings are run once.", style="dim", soft_wrap=True
    )
    for claim in claims:
        told = "running" if claim.alive else "left behind"
        console().print(f"{told}: {claim.label} (process {claim.pid} on {claim.host})", soft_wrap=True)


# One table -------------------------------------------------------------------------------------------------


def _print_comparison(one: TableComparison, states: Mapping[tuple[str, str], str]) -> None:
    from holdfast.papers import wording
    from holdfast.papers.measures import measure

    table, out = one.table, console()
    out.print(f"\n{table.id}: {table.title}", style="bold")
    measures = [measure(name) for name in table.measures]
    reasons: list[str] = []
    for key, column in table.columns.items():
        lines = [line for line in one.lines if line.column == key]
        if not lines:
            continue
        head = ["method"]
        for each in measures:
            head += [f" {each.label}", " ours"] if not table.is_search else [f" {each.label}"]
            head += [" difference"] if not table.is_search else []
        rows = []
        for line in lines:
            row = [line.label]
            for each, value in zip(measures, line.values, strict=True):
                if table.is_search:
                    row.append(wording.ours(value, each, line))
                else:
                    row += [
                        wording.published(value, each),
                        wording.ours(value, each, line),
                        wording.difference(value, each),
                    ]
            if line.no_target and line.no_target not in reasons:
                reasons.append(line.no_target)
            mark = f"not a target [{reasons.index(line.no_target) + 1}]" if line.no_target else ""
            state = line.failed or states[key, line.row]
            rows.append([*row, "; ".join(filter(None, (state, mark)))])
        title = f"{key}: {column.label}"
        if key in one.targets:
            title += f" (target {one.targets[key]:.1%})"
        print_table(title, [*head, ""], rows)
    for number, reason in enumerate(reasons, 1):
        out.print(f"[{number}] {reason}", style="dim", soft_wrap=True)
    for finding in one.findings:
        out.print(f"Finding, {finding}", style="green" if finding.holds else "red", soft_wrap=True)
    if table.notes:
        out.print("Notes, on the results that come with Holdfast:", style="dim")
    for note in table.notes:
        out.print(f"- {note}", style="dim", soft_wrap=True)


def _states(cells: Sequence[Cell], found: Results, work: Path) -> dict[tuple[str, str], str]:
    """Where each line of a table stands: how many seeds are run, and what keeps the others."""
    from holdfast.papers.cost import available_data, lacking
    from holdfast.papers.queue import Queue

    available = available_data()
    running = {c.hash for c in Queue(work).claims() if c.alive} if (work / "claims").exists() else set()
    states: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if found.get(cell) is not None:
            state = "run"
        elif cell.hash in running:
            state = "running"
        else:
            state = lacking(cell, available) or "not run"
        states.setdefault((cell.column, cell.row), []).append(state)
    return {
        key: ", ".join(
            name if len(each) == 1 or name.startswith("needs") else f"{each.count(name)} {name}"
            for name in dict.fromkeys(each)
        )
        for key, each in states.items()
    }


def _as_dict(one: TableComparison, states: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    return {
        "table": one.table.id,
        "title": one.table.title,
        "measures": list(one.table.measures),
        "targets": one.targets,
        "lines": [_line_as_dict(line, states[line.column, line.row]) for line in one.lines],
        "findings": [
            {
                "column": finding.column,
                "ahead": finding.ahead,
                "behind": finding.behind,
                "measure": finding.measure,
                "kind": finding.kind,
                "published": finding.published,
                "ours": finding.ours,
                "level": finding.level,
                "holds": finding.holds,
            }
            for finding in one.findings
        ],
    }


def _line_as_dict(line: ResultRow, state: str) -> dict[str, Any]:
    return {
        "column": line.column,
        "method": line.row,
        "seeds": line.seeds,
        "state": state,
        "failed": line.failed,
        "not_a_target": line.no_target,
        "values": [
            {
                "published": _plain(None if value.published is None else value.published.value),
                "ours": _plain(value.ours),
                "deviation": value.deviation,
                "difference": value.difference,
            }
            for value in line.values
        ],
    }


def _plain(value: float | None) -> float | str | None:
    return "never" if value is not None and math.isinf(value) else value


# All of it, tiny -------------------------------------------------------------------------------------------


def _smoke() -> None:
    import tempfile

    from holdfast.papers.published import load_tables
    from holdfast.papers.smoke import smoke

    with tempfile.TemporaryDirectory() as folder:
        for line in smoke(Path(folder), list(load_tables().values())):
            say(line)
