"""Ranks methods by their stored results, for `holdfast diagnose`: results/ to src/holdfast/papers/rankings.json.

    python benchmarks/rankings.py

Run it after new results have been stored. It needs the data sets of all settings, to measure their heterogeneity.
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
from holdfast.papers.measures import measure
from holdfast.papers.published import load_tables
from holdfast.papers.rankings import FILE, MethodScore, Ranking
from holdfast.training.experiment import Experiment

ROOT = Path(__file__).resolve().parent.parent
MIN_METHODS = 3  # in a ranking
FEDERATION = ("data", "partition", "clients", "stream", "long_tail", "public", "partition_seed")


def main() -> None:
    settings = [
        setting for setting in [*from_tables(), *from_learning()] if len(setting.scores) >= MIN_METHODS
    ]
    FILE.write_text(json.dumps([asdict(setting) for setting in settings], indent=1) + "\n", encoding="utf-8")
    for setting in settings:
        print(setting.table, setting.score, setting.scores[0])


def from_tables() -> Iterator[Ranking]:
    """The columns of the papers' tables and of the benchmark on streams."""
    groups: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    others = {table.id for table in load_tables().values() if not table.published}
    for path in sorted((ROOT / "results").glob("*/*.json")):
        if f"{path.parent.name}/{path.stem}" in others:
            continue  # searches for hyper-parameters, and figures
        table = f"results/{path.parent.name}/{path.name}"
        for entry in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            given = entry["settings"]
            if entry.get("failed") or str(given.get("partition")).startswith("by-domain"):
                continue  # label counts do not show domains
            # Rows without label skew, which some columns have for comparison, are a different federation.
            federation = json.dumps({key: given[key] for key in FEDERATION if key in given})
            rows = groups.setdefault((table, entry["column"], federation), {})
            rows.setdefault(given["method"], []).append(entry)
    for (table, column, federation), rows in groups.items():
        settings = json.loads(federation)
        streaming = "stream" in settings
        measures = measures_of(settings)
        for name in ("A_sel", "A_loc", "A_glo") if streaming else ("accuracy",):
            values = {
                method: [measure(name).compute(entry, None) for entry in entries]
                for method, entries in rows.items()
            }
            yield Ranking(f"{table}, {column}", measure(name).label, measures, streaming, ranked(values))


def from_learning() -> Iterator[Ranking]:
    """Every method of the library on two data sets and two partitions."""
    rows = json.loads(learning.RESULTS.read_text(encoding="utf-8"))
    for data, setting in learning.DATA.items():
        for split, partition in learning.SPLITS.items():
            selected = [r for r in rows if (r["data"], r["split"]) == (data, split) and "accuracy" in r]
            values: dict[str, list[float | None]] = {}
            for row in selected:
                values.setdefault(row["method"], []).append(100 * row["accuracy"])
            measures = measures_of(
                {
                    "data": data,
                    "partition": partition,
                    "clients": setting["clients"],
                    "public": learning.PUBLIC,
                }
            )
            table = f"results/learning.json, {data}, {split}"
            yield Ranking(table, "accuracy %", measures, False, ranked(values))


def measures_of(settings: Mapping[str, Any]) -> dict[str, float]:
    """`diagnose` of the federation of these settings."""
    return diagnose(Experiment(**settings).build_federation().label_counts())


def ranked(values: Mapping[str, Sequence[float | None]]) -> tuple[MethodScore, ...]:
    """The methods by their mean over seeds, the best first."""
    scores = []
    for method, found in values.items():
        mean, deviation = mean_and_deviation(found)
        if mean is not None:
            spread = None if deviation is None else round(deviation, 2)
            scores.append(MethodScore(method, round(mean, 2), spread, len(found)))
    return tuple(sorted(scores, key=lambda score: -score.mean))


if __name__ == "__main__":
    main()
