"""Methods on streams: clients' data arrive in stages, under a long-tailed class distribution.

    python benchmarks/streams.py [--columns mnist:s=4 cifar10:s=2] [--cumulative] [--seeds 3] [--workers 2]

The settings and methods of FedMLP's Table 1 (20 clients, 10 a round, 5 tasks each, imbalance 0.5, every global
epoch through the stages 1 to 5), with a shorter schedule and, on CIFAR-10, a smaller network. Every run is stored
in results/streams/short.json as it ends; what is there is not run again, so that the same command goes on where
it was stopped. ``--page`` writes docs/streams.md from what is there.
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
from holdfast.papers.published import Table, load_tables
from holdfast.papers.results import Results
from holdfast.papers.sweep import Sweep

ROOT = Path(__file__).resolve().parent.parent
RESULTS, WORK, PAGE = ROOT / "results", ROOT / "runs" / "streams", ROOT / "docs" / "streams.md"
NOTES = Path(__file__).with_name("streams_notes.md")  # what stands above the tables
NAME = "streams/short"
MOST_SEEDS = 10
COLUMNS = ("mnist:s=4", "cifar10:s=2")
SHORTER = {"rounds": 100, "local_epochs": 5, "local_test_samples": 1000}
MODELS = {"mnist": "mlp-cnn5", "cifar10": "ntd-cifar"}
METHODS = {
    "fedrep": "fedrep:body_epochs=2",
    "creff": "creff:epochs=50",
    "fedmlp-personal": "fedmlp:alpha=1",
    "fedmlp-reversed": "fedmlp:alpha=1,head=epoch,inter_task_kl=memory-feature",
}
"""Where the shorter schedule needs another parameter, and rows of our own: heads that are never averaged, and the
divergence of L_I in the other direction."""

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
    """The runs, seed by seed, FedMLP and FedAvg first and CReFF last; ``tiny`` is a few seconds on digits."""
    planned = []
    for cell in plan(_table(), columns, seeds=seeds):
        for row in OF_FEDMLP if cell.row == "fedmlp" else (cell.row,):
            settings = {**cell.settings, **SHORTER, "model": MODELS[cell.settings["data"]]}
            settings["method"] = METHODS.get(row, settings["method"])
            settings["stream"] = "5,cumulative=true" if cumulative else "5"
            column = f"{cell.column}:cumulative" if cumulative else cell.column
            if tiny:
                settings |= {**TINY, "lr": 0.05}
            planned.append(replace(cell, table=NAME, column=column, row=row, settings=settings))
    return sorted(planned, key=lambda cell: cell.row == "creff")  # its server works longer than all clients


def page(results: Path) -> str:
    """The page: the notes, a table for each stream, and what it says of FedMLP."""
    stored = {entry["hash"]: entry for entry in Results(results).all() if not entry.get("failed")}
    lines = [NOTES.read_text(encoding="utf-8").rstrip()]
    for key, cumulative in product(_columns(), (False, True)):
        by_row: dict[str, list[Entry]] = {}
        for cell in cells([key], MOST_SEEDS, cumulative):
            if cell.hash in stored:
                by_row.setdefault(cell.row, []).append(stored[cell.hash])
        if by_row:
            head = f"## {_table().columns[key].label}{', cumulative' if cumulative else ''}"
            lines += ["", head, "", *_rows(key, by_row), "", _finding(by_row)]
    return "\n".join(lines) + "\n"


def _rows(column: str, by_row: dict[str, list[Entry]]) -> list[str]:
    lines = [
        f"| method | {' | '.join(MEASURES.values())} | forgetting | paper | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, entries in sorted(by_row.items(), key=lambda item: -_mean(item[1], "A_glo")):
        values = [
            format_mean(*mean_and_deviation(measure(name).of(e, None) for e in entries), 1)
            for name in MEASURES
        ]
        lost = mean_and_deviation(100 * e["curves"]["average_forgetting"][-1] for e in entries)
        published = _table().published.get((row, column), ())
        paper = " / ".join(f"{number.value:.1f}" for number in published if number is not None) or "–"
        name = f"**{row}**" if row.startswith("fedmlp") else row
        lines.append(
            f"| {name} | {' | '.join([*values, format_mean(*lost, 1)])} | {paper} | {len(entries)} |"
        )
    return lines


def _finding(by_row: dict[str, list[Entry]]) -> str:
    """FedMLP against the best of the others, by each measure."""
    others = {row: entries for row, entries in by_row.items() if not row.startswith("fedmlp")}
    if "fedmlp" not in by_row or not others:
        return "FedMLP or the methods to compare it with have not been run yet."
    told = []
    for name, label in MEASURES.items():
        best = max(others, key=lambda row: _mean(others[row], name))
        lead = _mean(by_row["fedmlp"], name) - _mean(others[best], name)
        base = _mean(by_row["fedmlp"], name) - _mean(others["fedavg"], name) if "fedavg" in others else None
        against = "" if base is None else f", {base:+.1f} against FedAvg"
        told.append(f"{label} {lead:+.1f} against the best other method ({best}){against}")
    return f"FedMLP in points: {'; '.join(told)}."


def _mean(entries: Sequence[Entry], name: str) -> float:
    mean, _ = mean_and_deviation(measure(name).of(entry, None) for entry in entries)
    return float("-inf") if mean is None else mean


def _table() -> Table:
    return load_tables()["fedmlp/table1"]


def _columns() -> list[str]:
    """The columns whose data a small network learns."""
    return [key for key, column in _table().columns.items() if column.settings["data"].value in MODELS]


def tell(line: str) -> None:
    """Print what a worker has to say."""
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--columns", nargs="+", choices=_columns(), default=list(COLUMNS))
    parser.add_argument("--cumulative", action="store_true", help="clients keep the data of earlier stages")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes side by side")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, help="begin no run that would end after so many minutes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--work", type=Path, default=WORK, help="where the runs themselves are kept")
    parser.add_argument("--tiny", action="store_true", help="the same on digits, in seconds, as a trial")
    parser.add_argument("--page", action="store_true", help="only write docs/streams.md")
    asked = parser.parse_args()
    if not asked.page:
        deadline = None if asked.minutes is None or asked.tiny else time.time() + 60 * asked.minutes
        sweep = Sweep(asked.results, asked.work, asked.device, deadline)
        sweep.run(cells(asked.columns, asked.seeds, asked.cumulative, asked.tiny), asked.workers, tell)
    if not asked.tiny:
        PAGE.write_text(page(asked.results), encoding="utf-8")


if __name__ == "__main__":
    main()
