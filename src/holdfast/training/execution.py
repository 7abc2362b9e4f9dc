"""The execution of a prepared run: its rounds, what is stored of each, and its result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast.core.device import peak_bytes
from holdfast.core.errors import HoldfastWarning
from holdfast.core.measures import primary_measure
from holdfast.core.trees import Tensors
from holdfast.engine.aggregation import too_few_updates
from holdfast.engine.clients import Broadcast, Job
from holdfast.engine.evaluation import evaluated_model
from holdfast.engine.rounds import PendingRound
from holdfast.engine.state_cache import StateCache
from holdfast.report.trackers import Tracker
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.directory import FEDERATION, PROBE
from holdfast.training.best_round import BestRound
from holdfast.training.checkpointing import (
    IDENTITY,
    Snapshot,
    close,
    find_checkpoint,
    refuse_change,
    restore,
    run_identity,
    snapshot,
)
from holdfast.training.description import audit_start, federation_content, write_json
from holdfast.training.extension import with_rounds
from holdfast.training.interrupt import deferred_interrupt, interruption
from holdfast.training.outcome import failure
from holdfast.training.run import Run
from holdfast.training.session import Training

SubmitWrite = Callable[[Callable[[], None]], object]


def execute(
    training: Training,
    experiment: dict[str, Any],
    out: str | Path | None = None,
    resume: bool = False,
    trackers: Sequence[Tracker] = (),
    on_round: Callable[[dict[str, Any]], None] | None = None,
    submit_final_write: SubmitWrite | None = None,
    stop_after: int | None = None,
) -> Run:
    """Train, from the start or from the last checkpoint in ``out``.

    ``submit_final_write`` receives the function that writes the end of the run to the disk. After round ``stop_after``
    the run stops with a checkpoint, as after an interrupt.
    """
    rounds = training.settings.rounds
    last = min(rounds, stop_after or rounds)
    with ExitStack() as stack:
        execution = _Execution(training, experiment, trackers, on_round)
        checkpoint = None if out is None else execution.open(out, resume, stack)
        execution.prepare(checkpoint)
        if checkpoint is not None and checkpoint.warning is not None:
            warnings.warn(checkpoint.warning, HoldfastWarning, stacklevel=3)
        for tracker in trackers:
            tracker.start(experiment)
            stack.callback(tracker.finish)  # also when the run is interrupted
        done = len(execution.records)
        if not execution.stopped_early:
            execution.train(done + 1, last)
        run = execution.result()
        if run.interrupted:
            if len(run.records) < last:
                warnings.warn(interruption(run), HoldfastWarning, stacklevel=3)  # where `train` was called
            return run
        if len(run.records) > done and (sentence := execution.failure()) is not None:
            warnings.warn(sentence, HoldfastWarning, stacklevel=3)
        ending = execution.ending(run, stack, changed=len(run.records) > done)
        if ending is not None:
            ending() if submit_final_write is None else submit_final_write(ending)
        return run


class _Execution:
    """A run that is being trained."""

    def __init__(
        self,
        training: Training,
        experiment: dict[str, Any],
        trackers: Sequence[Tracker],
        on_round: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.training, self.settings, self.experiment = training, training.settings, experiment
        self.trackers, self.on_round = trackers, on_round
        self.identity = run_identity(training.describe())
        sizes = None if training.validation is None else training.validation.sizes
        self.content = federation_content(training.federation, training.hash, sizes)
        self.directory: RunDirectory | None = None
        self.records: list[dict[str, Any]] = []

    def open(self, out: str | Path, resume: bool, stack: ExitStack) -> Checkpoint | None:
        """Create or open the run's directory, lock it, and return its last checkpoint."""
        training = self.training
        if resume:
            directory = RunDirectory.open(out)
            same = {key: self.experiment[key] for key in IDENTITY if key != "rounds"}
            refuse_change(out, directory.experiment, same)
        else:
            directory = RunDirectory.create(out, self.experiment)
        stack.enter_context(directory.lock())
        checkpoint = find_checkpoint(directory, self.identity)
        before = directory.experiment["rounds"]
        checkpoint = with_rounds(directory, checkpoint, self.settings, training.method, training.federation)
        write_json(directory, FEDERATION, self.content)
        begun = 0 if checkpoint is None else checkpoint.round
        event = "begun" if not resume else "resumed" if before == self.settings.rounds else "extended"
        audit_start(directory, event, begun, training.describe())
        directory.rewind(begun)
        self.directory, self.records = directory, directory.records()
        return checkpoint

    def prepare(self, checkpoint: Checkpoint | None) -> None:
        """Create the round loop, in the state of the checkpoint."""
        self.client_states = StateCache(self.directory, checkpoint)
        self.loop = self.training.loop(self.client_states, audited=self.directory is not None)
        self.best = BestRound(primary_measure(self.experiment), self.records)
        if checkpoint is not None:
            restore(self.loop, checkpoint, self.training.device, self.best)

    # Rounds ---------------------------------------------------------------------------------------------

    def train(self, first: int, last: int) -> None:
        """Run the rounds and store each, with a checkpoint if one is due.

        Unless a checkpoint is due, a GPU starts the next round before the last one is stored, since its test may still
        be running. After an interrupt, the current round is the last and is stored with a checkpoint; the same holds
        for round ``last`` if the run has more rounds.
        """
        saved, waiting = time.monotonic(), list[PendingRound]()

        def keep_last() -> None:
            while waiting:
                self.keep(waiting.pop(), False)

        try:
            with deferred_interrupt() as interrupt:
                for number in range(first, last + 1):
                    pending = self.loop.start_round(number, keep_last)
                    keep_last()
                    late = time.monotonic() - saved >= self.settings.checkpoint_seconds
                    stop = interrupt.requested or number == last
                    if (late or stop) and number < self.settings.rounds:
                        if self.keep(pending, True) or stop:
                            return
                        saved = time.monotonic()
                    elif overlaps_rounds(self.training):
                        waiting.append(pending)
                    elif self.keep(pending, False):
                        return
        finally:
            keep_last()  # a complete round is stored even if the next one fails

    def keep(self, pending: PendingRound, save: bool) -> bool:
        """Complete the record of a round and store it, with a checkpoint if ``save``; whether the run ends with it."""
        loop, best, settings = self.loop, self.best, self.settings
        record = loop.finish_round(pending)
        if best.stops(record, settings.patience) and record["round"] < settings.rounds:
            record["stopped_early"] = True
        ended = "stopped_early" in record or record["round"] == settings.rounds
        if ended:
            self.finalize(record)
        if best.add(record):
            server = loop.server if ended else pending.server
            best.keep(evaluated_model(self.training.method, server))
        self.records.append(record)
        if self.directory is not None:
            self.directory.append(record, None if pending.audit is None else pending.audit.entry())
            if save and not ended:
                self.client_states.committed(self.directory.save_checkpoint(*self.snapshot()))
        for tracker in self.trackers:
            tracker.log(record)
        if self.on_round is not None:
            self.on_round(record)
        return ended

    def finalize(self, record: dict[str, Any]) -> None:
        """Finalize the model from statistics of all clients, for methods such as CCVR; recorded with the last round."""
        training, loop = self.training, self.loop
        method, federation = training.method, training.federation
        if not method.overrides("final_statistics"):
            return
        params, buffers = evaluated_model(method, loop.server)
        before = replace(loop.server, params=params, buffers=buffers)
        number = loop.server.round
        stage = loop.stage(number)
        sent = Broadcast(number, before.params, before.buffers, {})
        holders = np.flatnonzero(federation.sizes(stage)).tolist()
        jobs = [Job(k, federation.client(k, stage), stage) for k in holders]
        sums, usable, incidents = training.sum_statistics(loop, sent, jobs)
        if usable < min(self.settings.min_clients, len(jobs)):
            raise too_few_updates(number, usable, self.settings.min_clients, incidents)
        loop.server = replace(method.finalize(before, sums, training.context), final=True)
        record["incidents"] += [incident.record() for incident in incidents]
        record |= loop.evaluate_final()

    # The result -----------------------------------------------------------------------------------------

    @property
    def stopped_early(self) -> bool:
        """Whether the last record is that of an early stop."""
        return bool(self.records) and "stopped_early" in self.records[-1]

    def snapshot(self) -> Snapshot:
        """The state of the run, for a checkpoint."""
        return snapshot(self.loop, self.client_states, self.identity, self.best, self.stopped_early)

    def result(self) -> Run:
        """The run with its models."""
        training, records, directory = self.training, self.records, self.directory
        run = Run(
            self.experiment,
            records,
            self._module(*evaluated_model(training.method, self.loop.server)),
            None if directory is None else directory.path,
            peak_bytes(training.device),
            len(records) < self.settings.rounds and not self.stopped_early,
            self.best.round,
            None if self.best.round is None else self._module(*self.best.model),
            training.method,
            self.content,
        )
        if directory is None:
            run.checkpoint = Checkpoint(*self.snapshot())
        elif run.interrupted:
            directory.audit("stopped", round=len(records))
        if not run.interrupted:
            run.probe = self.loop.probe_features or {}
        return run

    def failure(self) -> str | None:
        """A warning if the run diverged or ended near chance; only for tasks with one class per sample."""
        training = self.training
        if training.context.task.name != "multiclass" or not len(training.test):
            return None
        method = training.method
        personal = method.overrides("initial_params") or method.overrides("personal_logits")
        counts = self.loop.test.class_counts
        sentence = failure(self.records, counts, self.settings.lr, judge_accuracy=not personal)
        return None if sentence is None else f"{method.name}: {sentence}"

    def ending(self, run: Run, stack: ExitStack, changed: bool) -> Callable[[], None] | None:
        """The function that writes the end of a run to its directory and closes what ``stack`` holds.

        ``changed``: whether rounds have been trained.
        """
        if self.directory is None:
            return None
        if run.probe:
            write_json(self.directory, PROBE, run.probe)
        final = self.snapshot() if changed else None
        best_state = None if run.best_model is None else run.best_model.state_dict()
        return partial(close, self.directory, final, run.model.state_dict(), best_state, stack.pop_all())

    def _module(self, params: Tensors, buffers: Tensors) -> nn.Module:
        """The user's module with these weights, on the CPU."""
        net = self.training.context.network.module()
        # Not strict: frozen parameters are in the module already, and tied weights have one name.
        net.load_state_dict({**params, **buffers}, strict=False)
        return net.cpu().eval()


def overlaps_rounds(training: Training) -> bool:
    """Whether a round starts during the test of the last model, which requires that it does not use the result."""
    settings = training.settings
    needs_test = settings.evaluate_locals or settings.patience is not None
    return training.device.type == "cuda" and not needs_test
