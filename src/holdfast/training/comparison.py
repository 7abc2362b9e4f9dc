"""Comparison of methods on the same federations over several seeds, with paired tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import metrics
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import MACHINE_SETTINGS
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.methods.registry import parse_method
from holdfast.metrics.progress import TARGET_SHARE, default_target
from holdfast.runs import RunDirectory
from holdfast.runs.comparison import write_baseline
from holdfast.training.experiment import Experiment

PUBLIC = 0.025  # public share for every method if one of them needs public data and none is given

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class MethodSummary:
    """The results of one method; lists hold one value for each seed, accuracies are fractions."""

    method: str
    seeds: list[int]
    accuracy: list[float]  # of the final model
    forgetting: list[float]  # mean over classes of (best accuracy ever - final accuracy)
    rounds_to_target: list[int | None]
    seconds: list[float]
    megabytes: list[float]  # in both directions
    difference: float | None  # mean accuracy above the first method's, on the same seeds
    p_value: float | None  # of a paired t-test against the first method


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; ``rows`` are in the order of the methods."""

    rows: list[MethodSummary]
    target: float  # accuracy that "rounds to target" counts to
    notes: list[str]
    paths: list[Path]  # the runs' directories


def compare(
    methods: Sequence[str],
    experiment: Experiment,
    seeds: int | Sequence[int] = 3,
    *,
    out: str | Path | None = None,
    target: float | None = None,
    on_start: Callable[[str, int], None] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Comparison:
    """Run every method with every seed and compare them with the first.

    Methods are written as on the command line (``fedavg``, ``fedntd:beta=0.5``, ``fedntd+fedprox``).
    ``seeds`` are their number, counted from the experiment's seed, or the seeds themselves. All methods of
    one seed share federation, initial weights, sampled clients and batches. The experiment's own method is not
    used.

    Each run is kept in ``out/METHOD/seed-N``; called again, finished runs are read, interrupted ones go on.
    ``target`` is the accuracy that rounds are counted to, by default 95 % of the best method's highest. If a
    method needs public data and the experiment has none, all methods get 2.5 % of the training data as such.
    ``on_start`` receives method and seed before each run, ``on_round`` the record of each round.
    """
    if not methods:
        raise HoldfastError("a comparison needs at least one method, such as fedavg fedntd")
    if len(set(methods)) < len(methods):
        raise HoldfastError(f"a method is named twice: {' '.join(methods)}")
    if target is not None and not 0 < target <= 1:
        raise HoldfastError(
            f"target is {target}; it is an accuracy, above 0 and at most 1, such as 0.5 for 50 %"
        )
    chosen = range(experiment.seed, experiment.seed + seeds) if isinstance(seeds, int) else seeds
    if not chosen:
        raise HoldfastError("a comparison needs at least 1 seed")
    experiment, notes = _with_public(methods, experiment)
    variants = {name: replace(experiment, method=name) for name in methods}
    runs, paths = _run_all(variants, chosen, out, on_start, on_round)
    if target is None:
        target = default_target([[max(_accuracy(r)) for r in by_seed.values()] for by_seed in runs.values()])
        notes.append(f"target: {target:.1%} accuracy, {TARGET_SHARE:.0%} of the best method's highest")
    if out is not None:
        write_baseline(Path(out), _folder(methods[0]))
    rows: list[MethodSummary] = []
    for name in methods:
        rows.append(_row(name, runs[name], target, rows[0] if rows else None))
    return Comparison(rows, target, notes, paths)


def _run_all(
    variants: Mapping[str, Experiment],
    seeds: Sequence[int],
    out: str | Path | None,
    on_start: Callable[[str, int], None] | None,
    on_round: Callable[[dict[str, Any]], None] | None,
) -> tuple[dict[str, dict[int, Records]], list[Path]]:
    """The records of every run by method and seed, and the directories; files are written during the next run."""
    runs: dict[str, dict[int, Records]] = {name: {} for name in variants}
    paths = []
    dataset: Dataset | None = None
    written: list[Future[None]] = []
    with ThreadPoolExecutor(max_workers=1) as writer:

        def write(close: Callable[[], None]) -> None:
            written.append(writer.submit(close))
            for before in written[:-1]:
                before.result()  # raises the error of a failed write

        for seed in seeds:
            federation: Federation | None = None
            for name, variant in variants.items():
                one = replace(variant, seed=seed)
                path = None if out is None else Path(out) / _folder(name) / f"seed-{seed}"
                if path is not None:
                    paths.append(path)
                if path is not None and _finished(path, one):
                    runs[name][seed] = RunDirectory.open(path).records()
                    continue
                if on_start is not None:
                    on_start(name, seed)
                if federation is None:
                    first = dataset is None
                    dataset = dataset if dataset is not None and one.data_is_fixed else one.load_data()
                    federation = one.build_federation(dataset)
                    # An error of one method must not come after hours of training the others.
                    for other in variants.values() if first else ():
                        replace(other, seed=seed).refuse_early(federation)
                resume = path is not None and (path / "experiment.yaml").exists()
                run = one.run(
                    path, resume=resume, federation=federation, on_round=on_round, submit_final_write=write
                )
                runs[name][seed] = run.records
    for each in written:
        each.result()
    return runs, paths


def _with_public(methods: Sequence[str], experiment: Experiment) -> tuple[Experiment, list[str]]:
    needy = [name for name in methods if parse_method(name).needs_public]
    if not needy or experiment.public or experiment.federation is not None:
        return experiment, []
    note = (
        f"{', '.join(needy)} learns from public data: {PUBLIC:.1%} of the training data is public for every "
        "method (--public changes that)"
    )
    return replace(experiment, public=PUBLIC), [note]


def _finished(path: Path, experiment: Experiment) -> bool:
    """Whether ``path`` holds this experiment, finished; raise if it holds another one."""
    if not (path / "experiment.yaml").exists():
        return False
    directory = RunDirectory.open(path)
    there = Experiment.from_mapping(directory.experiment).describe()
    for key, value in experiment.describe().items():
        if key not in MACHINE_SETTINGS and there[key] != value:
            raise HoldfastError(
                f"{path} holds a run with another {key}: {there[key]!r}, not {value!r}; choose another --out"
            )
    return directory.finished


def _folder(method: str) -> str:
    return re.sub(r"[^\w.+=,-]", "-", method)


def _accuracy(records: Records) -> list[float]:
    return [record["accuracy"] for record in records if "accuracy" in record]


def _row(name: str, runs: dict[int, Records], target: float, first: MethodSummary | None) -> MethodSummary:
    tested = {seed: [r for r in records if "accuracy" in r] for seed, records in runs.items()}
    accuracy = [records[-1]["accuracy"] for records in tested.values()]
    difference, p_value = (None, None) if first is None else metrics.paired_test(accuracy, first.accuracy)
    return MethodSummary(
        method=name,
        seeds=list(runs),
        accuracy=accuracy,
        forgetting=[
            metrics.backward_transfer_forgetting(np.array([r["class_accuracy"] for r in records], float))
            if len(records) > 1
            else float("nan")
            for records in tested.values()
        ],
        rounds_to_target=[
            metrics.rounds_to_target([r["accuracy"] for r in records], target, [r["round"] for r in records])
            for records in tested.values()
        ],
        seconds=[sum(r["seconds"]["total"] for r in records) for records in runs.values()],
        megabytes=[sum(r["bytes_up"] + r["bytes_down"] for r in records) / 1e6 for records in runs.values()],
        difference=difference,
        p_value=p_value,
    )
