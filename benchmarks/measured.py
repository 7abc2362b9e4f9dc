"""Gather what was measured, by setting, for `holdfast diagnose`: results/ into src/holdfast/papers/measured.json.

    python benchmarks/measured.py

Run it after new results have come in; it needs the data sets of the settings, to tell how their clients differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import learning
from holdfast.data.diagnosis import diagnose
from holdfast.metrics.summary import mean_and_deviation
from holdfast.papers.measured import FILE, Measured, Score
from holdfast.papers.measures import measure
from holdfast.papers.published import load_tables
from holdfast.training.experiment import Experiment

ROOT = Path(__file__).resolve().parent.parent
AT_LEAST = 3  # methods that must have been run for a setting to tell which does best
FEDERATION = ("data", "partition", "clients", "stream", "long_tail", "public", "partition_seed")


def main() -> None:
    settings = [setting for setting in [*from_tables(), *from_learning()] if len(setting.scores) >= AT_LEAST]
    FILE.write_text(json.dumps([asdict(setting) for setting in settings], indent=1) + "\n", encoding="utf-8")
    for setting in settings:
        print(setting.table, setting.score, setting.scores[0])


def from_tables() -> Iterator[Measured]:
    """The columns of tables, those of the papers and that of streams."""
    groups: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    searches = {table.id for table in load_tables().values() if table.is_search}
    for path in sorted((ROOT / "results").glob("*/*.json")):
        if f"{path.parent.name}/{path.stem}" in searches:
            continue  # strengths tried in short runs, not methods at their best
        table = f"results/{path.parent.name}/{path.name}"
        for entry in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            given = entry["settings"]
            if entry.get("failed") or str(given.get("partition")).startswith("by-domain"):
                continue  # domains are not seen in how classes are spread
            # A column may have rows without skew, to compare with: those are another federation.
            federation = json.dumps({key: given[key] for key in FEDERATION if key in given})
            rows = groups.setdefault((table, entry["column"], federation), {})
            rows.setdefault(given["method"], []).append(entry)
    for (table, column, federation), rows in groups.items():
        settings = json.loads(federation)
        streaming = "stream" in settings
        measures = measures_of(settings)
        for name in ("A_sel", "A_loc", "A_glo") if streaming else ("accuracy",):
            values = {
                method: [measure(name).of(entry, None) for entry in entries]
                for method, entries in rows.items()
            }
            yield Measured(f"{table}, {column}", measure(name).label, measures, streaming, ranked(values))


def from_learning() -> Iterator[Measured]:
    """Every method of the library on two data sets and two splits."""
    rows = json.loads(learning.RESULTS.read_text(encoding="utf-8"))
    for data, setting in learning.DATA.items():
        for split, partition in learning.SPLITS.items():
            here = [r for r in rows if (r["data"], r["split"]) == (data, split) and "accuracy" in r]
            values: dict[str, list[float | None]] = {}
            for row in here:
                values.setdefault(row["method"], []).append(100 * row["accuracy"])
            measures = measures_of(
                {
                    "data": data,
                    "partition": partition,
                    "clients": setting["clients"],
                    "public": learning.PUBLIC,
                }
            )
            where = f"results/learning.json, {data}, {split}"
            yield Measured(where, "accuracy %", measures, False, ranked(values))


def measures_of(settings: Mapping[str, Any]) -> dict[str, float]:
    """How the clients of a setting differ."""
    return diagnose(Experiment(**settings).build_federation().label_counts())


def ranked(values: Mapping[str, Sequence[float | None]]) -> tuple[Score, ...]:
    """Methods by their mean over seeds, the best first."""
    scores = []
    for method, found in values.items():
        mean, deviation = mean_and_deviation(found)
        if mean is not None:
            spread = None if deviation is None else round(deviation, 2)
            scores.append(Score(method, round(mean, 2), spread, len(found)))
    return tuple(sorted(scores, key=lambda score: -score.mean))


if __name__ == "__main__":
    main()
