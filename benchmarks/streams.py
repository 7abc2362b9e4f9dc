"""Methods on streams: data that arrives in stages, with a long-tailed class distribution.

    python benchmarks/streams.py [--columns mnist:s=4 cifar10:s=2] [--cumulative] [--seeds 3] [--workers 2]

The settings and methods of FedMLP's Table 1 (20 clients, 10 a round, 5 tasks each, imbalance 0.5, every global
epoch through the stages 1 to 5), with a shorter schedule and, on CIFAR-10, a smaller network. Every finished run is
stored in results/streams/short.json and not run again, so the same command continues where it was stopped. ``--page``
writes docs/streams.md from the stored runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from holdfast.metrics.summary import format_mean, mean_and_deviation
from holdfast.papers.cells import Cell, plan
from holdfast.papers.measures import Entry, measure
from holdfast.papers.published import PaperTable, load_tables
from holdfast.papers.results import Results
from holdfast.papers.sweep import Sweep

ROOT = Path(__file__).resolve().parent.parent
RESULTS, WORK, PAGE = ROOT / "results", ROOT / "runs" / "streams", ROOT / "docs" / "streams.md"
NOTES = Path(__file__).with_name("streams_notes.md")  # the beginning of the page
NAME = "streams/short"
MAX_SEEDS = 10
COLUMNS = ("mnist:s=4", "cifar10:s=2")
SHORTER = {"rounds": 100, "local_epochs": 5, "local_test_samples": 1000}
MODELS = {"mnist": "mlp-cnn5", "cifar10": "ntd-cifar"}
METHODS = {
    "fedrep": "fedrep:body_epochs=2",
    "creff": "creff:epochs=50",
    "fedmlp-personal": "fedmlp:alpha=1",
    "fedmlp-reversed": "fedmlp:alpha=1,head=epoch,inter_task_kl=memory-feature",
}
"""Methods that need other parameters for the shorter schedule, and two variants of FedMLP that the paper does not have:
with heads that are never averaged, and with the divergence of L_I in the other direction."""

OF_FEDMLP = ("fedmlp", "fedmlp-reversed", "fedmlp-personal")

MEASURES = {"A_sel": "A_sel", "A_loc": "A_loc", "A_loc_t": "A_loc-t", "A_glo": "A_glo", "A_glo_t": "A_glo-t"}
TINY = {
    "rounds": 5,
    "local_epochs": 3,
    "local_test_samples": 50,
    "data": "digits",
    "model": "mlp:16",
    "preprocess": "plain",
}


def cells(columns: Sequence[str], seeds: int, cumulative: bool = False, tiny: bool = False) -> list[Cell]:
    """The runs, seed by seed, FedMLP and FedAvg first and CReFF last; ``tiny`` ones take seconds on digits."""
    planned = []
    for cell in plan(_table(), columns, seeds=seeds):
        for row in OF_FEDMLP if cell.row == "fedmlp" else (cell.row,):
            settings = {**cell.settings, **SHORTER, "model": MODELS[cell.settings["data"]]}
            settings.pop("drop_last", None)  # for BatchNorm's sake, which these small networks do not have
            settings["method"] = METHODS.get(row, settings["method"])
            settings["stream"] = "5,cumulative=true" if cumulative else "5"
            column = f"{cell.column}:cumulative" if cumulative else cell.column
            if tiny:
                settings |= {**TINY, "lr": 0.05}
            planned.append(replace(cell, table=NAME, column=column, row=row, settings=settings))
    return sorted(planned, key=lambda cell: cell.row == "creff")  # its server takes longer than all clients


def page(results: Path) -> str:
    """The page: the notes, and a table for each stream with the leads of FedMLP."""
    stored = {entry["hash"]: entry for entry in Results(results).all() if not entry.get("failed")}
    lines = [NOTES.read_text(encoding="utf-8").rstrip()]
    for key, cumulative in product(_columns(), (False, True)):
        by_row: dict[str, list[Entry]] = {}
        for cell in cells([key], MAX_SEEDS, cumulative):
            if cell.hash in stored:
                by_row.setdefault(cell.row, []).append(stored[cell.hash])
        if by_row:
            heading = f"## {_table().columns[key].label}{', cumulative' if cumulative else ''}"
            lines += ["", heading, "", *_rows(key, by_row), "", _finding(by_row)]
    return "\n".join(lines) + "\n"


def _rows(column: str, by_row: dict[str, list[Entry]]) -> list[str]:
    lines = [
        f"| method | {' | '.join(MEASURES.values())} | forgetting | paper | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, entries in sorted(by_row.items(), key=lambda item: -_mean(item[1], "A_glo")):
        values = [
            format_mean(*mean_and_deviation(measure(name).compute(e, None) for e in entries), 1)
            for name in MEASURES
        ]
        forgetting = mean_and_deviation(100 * e["curves"]["average_forgetting"][-1] for e in entries)
        published = _table().published.get((row, column), ())
        paper = " / ".join(f"{number.value:.1f}" for number in published if number is not None) or "–"
        name = f"**{row}**" if row.startswith("fedmlp") else row
        lines.append(
            f"| {name} | {' | '.join([*values, format_mean(*forgetting, 1)])} | {paper} | {len(entries)} |"
        )
    return lines


def _finding(by_row: dict[str, list[Entry]]) -> str:
    """The lead of FedMLP over the best other method and over FedAvg, by each measure."""
    others = {row: entries for row, entries in by_row.items() if not row.startswith("fedmlp")}
    if "fedmlp" not in by_row or not others:
        return "FedMLP or the methods to compare it with have not been run yet."
    leads = []
    for name, label in MEASURES.items():
        best = max(others, key=lambda row: _mean(others[row], name))
        lead = _mean(by_row["fedmlp"], name) - _mean(others[best], name)
        base = _mean(by_row["fedmlp"], name) - _mean(others["fedavg"], name) if "fedavg" in others else None
        against = "" if base is None else f", {base:+.1f} against FedAvg"
        leads.append(f"{label} {lead:+.1f} against the best other method ({best}){against}")
    return f"FedMLP in points: {'; '.join(leads)}."


def _mean(entries: Sequence[Entry], name: str) -> float:
    mean, _ = mean_and_deviation(measure(name).compute(entry, None) for entry in entries)
    return float("-inf") if mean is None else mean


def _table() -> PaperTable:
    return load_tables()["fedmlp/table1"]


def _columns() -> list[str]:
    """The columns with data that a small network can learn."""
    return [key for key, column in _table().columns.items() if column.settings["data"].value in MODELS]


def log(line: str) -> None:
    """Print a line of a worker process at once."""
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--columns", nargs="+", choices=_columns(), default=list(COLUMNS))
    parser.add_argument("--cumulative", action="store_true", help="clients keep the data of earlier stages")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="number of parallel processes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, help="start no run that would end later")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of stored results")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of the runs")
    parser.add_argument("--tiny", action="store_true", help="test the program on digits in seconds")
    parser.add_argument("--page", action="store_true", help="only write docs/streams.md")
    arguments = parser.parse_args()
    if not arguments.page:
        deadline = (
            None if arguments.minutes is None or arguments.tiny else time.time() + 60 * arguments.minutes
        )
        sweep = Sweep(arguments.results, arguments.work, arguments.device, deadline)
        sweep.run(
            cells(arguments.columns, arguments.seeds, arguments.cumulative, arguments.tiny),
            arguments.workers,
            log,
        )
    if not arguments.tiny:
        PAGE.write_text(page(arguments.results), encoding="utf-8")


if __name__ == "__main__":
    main()
