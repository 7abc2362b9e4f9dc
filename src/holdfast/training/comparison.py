"""Comparison of methods on the same federations over several seeds, with paired tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from torch import nn

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.settings import MACHINE_SETTINGS, Role, settings_with
from holdfast.core.spec import named, validate
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.own import OwnData
from holdfast.methods.base import Method
from holdfast.methods.registry import parse_method
from holdfast.methods.stack import Stack
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec
from holdfast.report.loading import StoredRun, load_run
from holdfast.report.progress_display import progress_display
from holdfast.runs import RunDirectory
from holdfast.runs.comparison import write_baseline
from holdfast.training.checkpointing import changed_code, is_same
from holdfast.training.checks import check_method_kind
from holdfast.training.compared import Comparison as Comparison
from holdfast.training.compared import MethodSummary as MethodSummary
from holdfast.training.experiment import Experiment, with_defaults
from holdfast.training.interrupt import Interrupt, deferred_interrupt

PUBLIC = 0.025  # public share for every method if one of them needs public data and none is given

Methods = Sequence[Method | str] | Mapping[str, Method | str]
Progress = Callable[[dict[str, Any]], None]


@overload
def compare(
    methods: Methods,
    model: Experiment,
    federation: int | Sequence[int],
    *,
    out: str | Path | None = None,
    target: float | None = None,
    on_start: Callable[[str, int], None] | None = None,
    on_round: Progress | None = None,
    progress: bool = True,
) -> Comparison: ...


@overload
def compare(
    methods: Methods,
    model: ModelSpec | OwnModel | nn.Module | Callable[..., nn.Module] | str | Experiment,
    federation: Federation | Dataset | Callable[..., Federation | Dataset] | str | None = None,
    seeds: int | Sequence[int] = 3,
    *,
    out: str | Path | None = None,
    target: float | None = None,
    on_start: Callable[[str, int], None] | None = None,
    on_round: Progress | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison: ...


def compare(
    methods: Methods,
    model: Any,
    federation: Any = None,
    seeds: int | Sequence[int] = 3,
    *,
    out: str | Path | None = None,
    target: float | None = None,
    on_start: Callable[[str, int], None] | None = None,
    on_round: Progress | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Train every method with every seed and compare the methods with the first.

    Either ``compare(methods, model, federation, seeds=3, rounds=100, ...)`` with the settings of `holdfast.train`, or
    ``compare(methods, experiment, seeds)`` with an `Experiment`, whose own method is not used. All methods of one
    seed share federation, initial weights, sampled clients and batches.

    Args:
        methods: methods, or text as on the command line (``fedavg``, ``fedntd:beta=0.5``, ``fedntd+fedprox``,
            ``mine.py:Mine``). A method's label is its text, with the options that differ from their defaults; a
            mapping ``{label: method}`` sets other labels.
        model: as for `holdfast.train`: one of ``holdfast.models``, text, a ``torch.nn.Module``, or a function of
            those of ``shape``, ``num_classes`` and ``seed`` that it names. Or an `Experiment`.
        federation: a `Federation`, the same for all seeds, or a function of ``seed`` that returns one.
        seeds: their number, counted from the experiment's seed, or the seeds themselves.
        out: each run is stored in ``out/METHOD/seed-N``; a repeated call reads finished runs and continues interrupted
            ones. Without it, results stay in memory.
        target: the value of the primary metric for "rounds to target", by default 95 % of the best method's highest
            value, or the corresponding distance from the lowest error.
        on_start: receives method and seed before each run.
        on_round: receives the record of each round.
        progress: as for `holdfast.train`.

    If a method needs public data and the experiment has none, all methods get 2.5 % of the training data as such. An
    interrupt (Ctrl-C) raises KeyboardInterrupt after the current round; the same call continues the comparison.
    """
    labelled = _labelled(methods)
    if isinstance(model, Experiment):
        experiment = model
        if federation is not None:
            seeds = federation
        if settings:
            raise HoldfastError(
                f"{next(iter(settings))} is given together with an Experiment, which contains it already"
            )
    else:
        experiment = experiment_of(model, federation, settings)
    _check_target(target, experiment)
    chosen = _chosen(seeds, experiment.seed)
    experiment, notes = _with_public(labelled, experiment)
    variants = {label: replace(experiment, method=method) for label, method in labelled.items()}
    with (
        progress_display(progress, len(variants) * len(chosen)) as display,
        deferred_interrupt() as interrupt,
    ):

        def begin(method: str, seed: int) -> None:
            display.start(f"{method}, seed {seed}", experiment.rounds)
            if on_start is not None:
                on_start(method, seed)

        def advance(record: dict[str, Any]) -> None:
            display.update(record)
            if on_round is not None:
                on_round(record)

        runs, paths = _run_all(variants, chosen, out, begin, advance, interrupt)
    if out is not None:
        write_baseline(Path(out), _folder(next(iter(variants))))
    return Comparison.of_runs(runs, target, notes, paths)


def _check_target(target: float | None, experiment: Experiment) -> None:
    """Raise an error unless the target is positive, and at most 1 for an accuracy."""
    most = 1.0 if experiment.task is None and experiment.metrics is None else float("inf")
    if target is not None and not 0 < target <= most:
        raise HoldfastError(
            f"target is {target}; it must be above 0, and at most 1 for an accuracy: 0.5 means 50 %"
        )


def _labelled(methods: Methods) -> dict[str, Method]:
    """The methods by label; labels, and the folder names made from them, are unique."""
    if isinstance(methods, str) or not isinstance(methods, (Mapping, Sequence)):
        raise HoldfastError(
            f"methods is {named(methods)}; it must be a list, such as [holdfast.FedAvg(), holdfast.FedNTD()], or a "
            "mapping from labels to methods"
        )
    pairs = list(methods.items()) if isinstance(methods, Mapping) else [(_label(m), m) for m in methods]
    if not pairs:
        raise HoldfastError("a comparison needs at least one method, such as fedavg fedntd")
    labelled: dict[str, Method] = {}
    for label, method in pairs:
        check_method_kind(method)
        if not isinstance(label, str) or not _folder(label):
            raise HoldfastError(
                f"the label {label!r} of a method must be text with a letter or a number in it"
            )
        made = parse_method(method) if isinstance(method, str) else method
        if made == labelled.get(label):
            raise HoldfastError(f"a method is named twice: {label}")
        alike = [other for other in labelled if _folder(other) == _folder(label)]
        if alike:
            raise HoldfastError(
                f"the methods '{alike[0]}' and '{label}' have the same name; give them labels: compare({{'one': "
                "..., 'other': ...}, ...)"
            )
        labelled[label] = made
    return labelled


def _label(method: Method | str) -> str:
    """A method as text, with the options that differ from their defaults: ``fedntd:beta=0.5+fedprox``."""
    check_method_kind(method)
    if isinstance(method, str):
        return method
    if isinstance(method, Stack):
        return "+".join(map(_label, method.parts))
    values = {f.name: getattr(method, f.name) for f in fields(method) if getattr(method, f.name) != f.default}
    options = ",".join(f"{key}={_option(value)}" for key, value in values.items())
    return f"{method.name}:{options}" if options else method.name


def _option(value: Any) -> str:
    return f"[{','.join(map(_option, value))}]" if isinstance(value, (list, tuple)) else str(value)


def experiment_of(model: Any, federation: Any, settings: Mapping[str, Any]) -> Experiment:
    """The experiment with a model, a federation or a function that makes one, and the settings of `holdfast.train`."""
    known = [field.name for field in fields(Experiment) if field.name not in ("method", "model", "data")]
    for key in settings:
        if key not in known:
            raise unknown("setting", key, known)
    if federation is None:
        raise HoldfastError(
            "a comparison needs a federation, from holdfast.federate, or a function that returns one"
        )
    return Experiment(model=model, data=federation, **settings)


def _chosen(seeds: int | Sequence[int], first: int) -> Sequence[int]:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        chosen: Sequence[int] = range(first, first + seeds)
    elif isinstance(seeds, (Sequence, np.ndarray)) and not isinstance(seeds, str):
        chosen = [validate("a seed", seed, int) for seed in seeds]
    else:
        raise HoldfastError(f"seeds is {seeds!r}; it must be a number of seeds, or a list of them")
    if not chosen:
        raise HoldfastError("a comparison needs at least 1 seed")
    if len(set(chosen)) < len(chosen):
        raise HoldfastError(f"a seed is given twice: {', '.join(map(str, chosen))}")
    return chosen


def _run_all(
    variants: Mapping[str, Experiment],
    seeds: Sequence[int],
    out: str | Path | None,
    on_start: Callable[[str, int], None],
    on_round: Callable[[dict[str, Any]], None],
    interrupt: Interrupt,
) -> tuple[dict[str, list[StoredRun]], list[Path]]:
    """The runs of every method, and the directories; files are written during the next run."""
    runs: dict[str, list[StoredRun]] = {name: [] for name in variants}
    paths = []
    dataset: Dataset | Federation | None = None
    written: list[Future[None]] = []
    with ThreadPoolExecutor(max_workers=1) as writer:

        def write(close: Callable[[], None]) -> None:
            written.append(writer.submit(close))
            for before in written[:-1]:
                before.result()  # raises the error of a failed write

        checked = False
        for seed in seeds:
            federation: Federation | None = None
            for name, variant in variants.items():
                one = replace(variant, seed=seed)
                path = None if out is None else Path(out) / _folder(name) / f"seed-{seed}"
                if path is not None:
                    paths.append(path)
                # Data in memory is compared by its hash.
                if federation is None and not one.names_its_data:
                    federation, dataset = _federation(one, dataset)
                if path is not None and _finished(path, one, None if one.names_its_data else federation):
                    runs[name].append(load_run(path))
                    continue
                on_start(name, seed)
                if federation is None:
                    federation, dataset = _federation(one, dataset)
                if not checked:
                    # Errors of all methods are raised before any is trained.
                    for other in variants.values():
                        replace(other, seed=seed).refuse_early(federation)
                    checked = True
                resume = path is not None and (path / "experiment.yaml").exists()
                run = one.run(
                    path,
                    resume=resume,
                    federation=federation,
                    on_round=on_round,
                    progress=False,
                    submit_final_write=write,
                )
                if interrupt.requested:
                    kept = "the same call continues it"
                    lost = "nothing of it is kept: give out='runs/mine' for one that the same call continues"
                    raise KeyboardInterrupt(f"the comparison is incomplete; {lost if out is None else kept}")
                runs[name] += run.stored_runs()
    for each in written:
        each.result()
    return runs, paths


def _federation(
    experiment: Experiment, loaded: Dataset | Federation | None
) -> tuple[Federation, Dataset | Federation]:
    """The federation and its data set; ``loaded`` is the data set if it is the same for all seeds."""
    data = loaded if loaded is not None and experiment.data_is_fixed else experiment.load_data()
    return experiment.build_federation(data), data


def _with_public(methods: Mapping[str, Method], experiment: Experiment) -> tuple[Experiment, list[str]]:
    needy = [label for label, method in methods.items() if method.needs_public]
    if not needy or experiment.public or not _is_data_set(experiment):
        return experiment, []
    note = (
        f"{', '.join(needy)} learns from public data: {PUBLIC:.1%} of the training data is public for every "
        "method (--public changes that)"
    )
    return replace(experiment, public=PUBLIC), [note]


def _is_data_set(experiment: Experiment) -> bool:
    """Whether the data is certainly a data set, which the experiment partitions, and not a federation."""
    data = experiment.data
    named_or_given = isinstance(data, str) or (isinstance(data, OwnData) and isinstance(data.made, Dataset))
    return experiment.federation is None and named_or_given


def _finished(path: Path, experiment: Experiment, federation: Federation | None) -> bool:
    """Whether ``path`` holds a finished run of this experiment; raises an error if it holds another experiment.

    ``federation`` is given for data without a name; its hash is compared.
    """
    if not (path / "experiment.yaml").exists():
        return False
    directory = RunDirectory.open(path)
    there, here = with_defaults(directory.experiment), experiment.describe()
    ignored = {*MACHINE_SETTINGS}
    if federation is not None:
        ignored |= {*settings_with(Role.SOURCE, Role.FEDERATION)}
        there, here = there | {"hash": directory.experiment["hash"]}, here | {"hash": federation.hash}
    for key, value in here.items():
        found = key in ("task", "metrics") and value is None  # then they are those of the data
        if key in ignored or found or is_same(there[key], value):
            continue
        if changed := changed_code(there[key], value):
            raise HoldfastError(
                f"{path} holds a run with an earlier version of {changed}; choose another --out"
            )
        if key == "hash":
            raise HoldfastError(f"{path} holds a run on another federation; choose another --out")
        raise HoldfastError(
            f"{path} holds a run with another {key}: {there[key]!r}, not {value!r}; choose another --out"
        )
    if directory.finished and isinstance(experiment.model, nn.Module):
        _refuse_another_module(directory, experiment.model)
    return directory.finished


def _refuse_another_module(directory: RunDirectory, module: nn.Module) -> None:
    """Raise an error if a run's final model differs in tensors from a module, which cannot be compared by name."""
    there, here = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (directory.load_model(), module.state_dict())
    )
    if there != here:
        raise HoldfastError(f"{directory.path} holds a run with another model; choose another --out")


def _folder(label: str) -> str:
    return re.sub(r"[^\w.+=,-]", "-", label).lstrip(".-")
