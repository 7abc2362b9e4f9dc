"""Extension of a run to more rounds, with the same result as a run that has this number from the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure, primary_measure, score_measure
from holdfast.core.settings import Settings, with_current_names
from holdfast.data.federation import Federation
from holdfast.methods.base import Method
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.tensors import State
from holdfast.training.best_round import BestRound
from holdfast.updates.privacy import parse_dp
from holdfast.updates.sample_privacy import parse_dp_samples

OF_A_TEST = ("loss", "forgetting", "attack_success", "validation", "local_validation")
BY = ("", "class_", "label_", "site_", "domain_")
"""Prefixes of metric names in a record."""


def with_rounds(
    directory: RunDirectory,
    checkpoint: Checkpoint | None,
    settings: Settings,
    method: Method,
    federation: Federation,
) -> Checkpoint | None:
    """The checkpoint from which the run in ``directory`` is trained to ``settings.rounds`` rounds.

    If the number changes, the directory becomes that of an unfinished run with the new number. Raises a `HoldfastError`
    if the result would differ from that of a run with this number from the start.
    """
    before = int(directory.experiment["rounds"])
    meta: Mapping[str, Any] = {} if checkpoint is None else checkpoint.meta
    trained_for: int = with_current_names(meta.get("made_of", {})).get("rounds", before)
    if settings.rounds == before == trained_for:
        return checkpoint
    if checkpoint is not None:
        if settings.rounds < checkpoint.round:
            raise HoldfastError(
                f"{directory.path} has {checkpoint.round} rounds already; rounds must be at least that, not "
                f"{settings.rounds}"
            )
        if checkpoint.meta.get("stopped_early"):
            raise HoldfastError(
                f"{directory.path} stopped early, after round {checkpoint.round} (patience={settings.patience}); "
                "another number of rounds would not change it: begin a new run with another patience"
            )
        reason = _obstacle(checkpoint, settings, trained_for, method, federation)
        if reason is None and checkpoint.round == trained_for < settings.rounds:
            reason = _best_of_the_last_test(directory, checkpoint, settings)
        if reason is not None:
            raise HoldfastError(
                f"{directory.path} cannot be changed from {trained_for} to {settings.rounds} rounds: {reason}; begin "
                "a new run with that number"
            )
        if checkpoint.round == trained_for < settings.rounds:
            checkpoint = _without_last_tests(directory, checkpoint, settings)
    if settings.rounds != before:
        directory.reopen({**directory.experiment, "rounds": settings.rounds})
    return checkpoint


def _obstacle(
    checkpoint: Checkpoint, settings: Settings, trained_for: int, method: Method, federation: Federation
) -> str | None:
    """The reason why the number of rounds cannot change, or None."""
    finished = checkpoint.round == trained_for
    if "uses_rounds" not in checkpoint.meta:
        return "an earlier version wrote its checkpoint"
    if checkpoint.meta["uses_rounds"]:
        return f"what {method.name} computes depends on the number of rounds"
    then = replace(settings, rounds=trained_for)
    if any(then.lr_at(round) != settings.lr_at(round) for round in range(1, checkpoint.round + 1)):
        return f"the learning rates of {settings.schedule.name} depend on the number of rounds"
    if settings.dp is not None and parse_dp(settings.dp).noise_multiplier is None:
        return "the noise of dp follows from the number of rounds"
    if settings.dp_samples is not None and parse_dp_samples(settings.dp_samples).noise_multiplier is None:
        return "the noise of dp_samples follows from the number of rounds"
    if federation.schedule is not None:
        return "the stages of a stream are distributed over its rounds"
    if finished and method.overrides("final_statistics"):
        return f"{method.name} has changed the model after the last round"
    if not checkpoint.meta["complete"]:
        return f"the states of {method.name}'s clients were not kept after the last round"
    return None


def _best_of_the_last_test(directory: RunDirectory, checkpoint: Checkpoint, settings: Settings) -> str | None:
    """The reason why the best round's model would differ in a run with more rounds, or None."""
    best = BestRound(primary_measure(directory.experiment), directory.records()[: checkpoint.round]).round
    if best == checkpoint.round and best % settings.evaluate_every:
        return f"its best model is that of round {best}, which was tested only because it was the last"
    return None


def _without_last_tests(directory: RunDirectory, checkpoint: Checkpoint, settings: Settings) -> Checkpoint:
    """Remove tests that took place only because the round was the last, from the checkpoint and the last record."""
    records = directory.records()[: checkpoint.round]
    last, tensors = dict(records[-1]), dict(checkpoint.tensors)
    if settings.probe_every and last["round"] % settings.probe_every:
        last.pop("probe", None)
    if last["round"] % settings.evaluate_every:
        for key in (*OF_A_TEST, *_metric_keys(directory.experiment)):
            last.pop(key, None)
        if "locals" in last:
            last["locals"] = {k: v for k, v in last["locals"].items() if k != "global_after"}
        tensors = {name: value for name, value in tensors.items() if not name.startswith("before/")}
        tensors |= _accuracies_before(records[:-1], score_measure(directory.experiment))
    if last != records[-1]:
        directory.rewind(checkpoint.round - 1)
        directory.append(last)
    return replace(checkpoint, tensors=tensors)


def _metric_keys(experiment: Mapping[str, Any]) -> list[str]:
    """The keys of a record that hold a metric of the global model."""
    metrics = experiment.get("metrics") or ["accuracy"]
    names = [metric["name"] if isinstance(metric, Mapping) else metric for metric in metrics]
    return [f"{prefix}{name}" for name in (score_measure(experiment).name, *names) for prefix in BY]


def _accuracies_before(records: list[dict[str, Any]], score: Measure) -> State:
    """The evaluation state after an untested round: the class accuracies of the model last tested."""
    tested = [found for record in records if (found := record.get(f"class_{score.name}")) is not None]
    return {"before/all": torch.from_numpy(score.sign * np.array(tested[-1], float))} if tested else {}
