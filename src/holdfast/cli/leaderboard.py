"""``leaderboard``: every method, tuned by the same rule."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.cli.reproduce import INCOMPLETE, log_line
from holdfast.cli.train import advice_on_interrupt
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.tuning.leaderboard import Protocol


def leaderboard(
    protocol: Annotated[
        str | None, typer.Argument(help="A protocol, such as digits, or all (default: list the protocols).")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods, such as fedavg,fedntd.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(help="Number of parallel processes on the device.")] = 1,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which the command stops; repeat it to continue."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Directory of stored results.")] = Path("results/leaderboard"),
    work: Annotated[Path, typer.Option(help="Working directory of the runs.")] = Path("runs/leaderboard"),
    status: Annotated[
        bool, typer.Option("--status", help="Only print which runs are finished; run nothing.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write the page of all protocols, such as docs/leaderboard.md.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tune every method in the same way on validation samples, train it with new seeds, and print the ranking.

    Only missing results are computed. The command can be stopped at any time: finished runs are stored, and the
    others continue from their checkpoints when it is repeated.

    Example:  holdfast leaderboard digits --workers 2
    """
    from holdfast.tuning.leaderboard import load_protocols, select_protocols
    from holdfast.tuning.leaderboard_page import write_leaderboard

    if time_limit is not None and not time_limit > 0:
        raise HoldfastError(f"--time-limit is {time_limit:g}; it must be more than 0 seconds")
    if protocol is None and methods is not None:
        raise HoldfastError("--methods is given without a protocol; name one, such as digits")
    chosen = [] if protocol is None else select_protocols(protocol)
    deadline = None if time_limit is None else time.time() + time_limit
    complete = True
    if not status:
        for one in chosen:
            complete &= _run(one, methods, len(chosen) > 1, device, workers, deadline, results, work)
    if page is not None:
        write_leaderboard(results, page)
    if as_json:
        print_json(_as_dicts(chosen or list(load_protocols().values()), results))
    elif chosen:
        for one in chosen:
            _print_standings(one, results)
    else:
        _print_list(results)
    if page is not None and not as_json:
        console().print(f"Page: {page}", soft_wrap=True)
    if not complete:
        raise typer.Exit(INCOMPLETE)


def _run(
    protocol: Protocol, methods: str | None, lenient: bool, device: str, workers: int, deadline: float | None,
    results: Path, work: Path,
) -> bool:  # fmt: skip
    """Compute the missing results of a protocol; returns whether all could be computed.

    ``lenient``: whether a protocol whose data is missing is skipped with a message instead of an error.
    """
    from holdfast.core.device import choose_device
    from holdfast.papers.published import select
    from holdfast.sweeps.workers import run_jobs
    from holdfast.tuning.jobs import TrainingWork
    from holdfast.tuning.leaderboard import board, refuse_without_data

    try:
        refuse_without_data(protocol)
    except HoldfastError as error:
        if not lenient:
            raise
        log_line(f"holdfast: {error}")
        return True
    choose_device(device)
    chosen = None if methods is None else select("method", methods, protocol.methods)
    with advice_on_interrupt("the same command continues from there"):
        plan = board(protocol, chosen)
        return run_jobs(
            TrainingWork(plan, results / protocol.key, work / protocol.key, device, workers, deadline),
            log_line,
        )


def _print_list(results: Path) -> None:
    from holdfast.tuning.leaderboard import load_protocols, standings
    from holdfast.tuning.results import StoredRuns

    rows = []
    for protocol in load_protocols().values():
        table = standings(protocol, StoredRuns(results / protocol.key))
        done = [row for row in table if row.averaged]
        first = done[0].method if done else ""
        rows.append([protocol.key, protocol.title, f"{len(done)} of {len(table)}", first])
    print_table("Protocols", ["protocol", "title", " methods run", "first"], rows)


def _print_standings(protocol: Protocol, results: Path) -> None:
    from holdfast.metrics.summary import UNKNOWN
    from holdfast.tuning.leaderboard import standings
    from holdfast.tuning.leaderboard_page import COLUMNS, cells, settings_text
    from holdfast.tuning.results import StoredRuns

    rows = [
        [row.method, *cells(row), UNKNOWN if row.published is None else f"{row.published:.2f}", settings_text(row),
         row.state]
        for row in standings(protocol, StoredRuns(results / protocol.key))
    ]  # fmt: skip
    columns = ["method", *(f" {name}" for name in COLUMNS), " published %", "settings", ""]
    print_table(f"{protocol.key}: {protocol.title}", columns, rows)


def _as_dicts(protocols: list[Protocol], results: Path) -> list[dict[str, object]]:
    from holdfast.tuning.leaderboard import standings
    from holdfast.tuning.results import StoredRuns

    return [
        {
            "protocol": protocol.key,
            "title": protocol.title,
            "methods": [asdict(row) for row in standings(protocol, StoredRuns(results / protocol.key))],
        }
        for protocol in protocols
    ]
