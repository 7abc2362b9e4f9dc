"""A training session: the run prepared and validated, its rounds, checkpoints and result."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.core import optimizers
from holdfast.core.device import choose_device, choose_precision, peak_bytes
from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.measures import primary_measure
from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.core.trees import Tensors, add_
from holdfast.core.version import __version__
from holdfast.data.federation import Federation
from holdfast.data.schedules import check_schedule
from holdfast.data.sources import DATASETS
from holdfast.data.validation import hold_out
from holdfast.engine.aggregation import too_few_updates
from holdfast.engine.base import Engine
from holdfast.engine.clients import Broadcast, ClientRunner, DeviceData, Incident, Job
from holdfast.engine.evaluation import TestSet, evaluated_model
from holdfast.engine.factory import choose_engine
from holdfast.engine.probe import PER_CLASS
from holdfast.engine.rounds import PendingRound, RoundLoop
from holdfast.engine.run_context import device_data, make_run_context
from holdfast.engine.secure_sums import masked_sum
from holdfast.engine.state_cache import StateCache
from holdfast.engine.validation import Validation, ValidationSet, measurable
from holdfast.kernels.building import KernelBuilder, can_build, marker_of, trial
from holdfast.methods.base import Method, Tree, check_public, check_task
from holdfast.methods.context import RunContext
from holdfast.methods.registry import describe_method
from holdfast.metrics.by_task import OwnMetric, metrics_of
from holdfast.models.network import BatchNormPolicy, Network
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec, describe_model
from holdfast.models.wrapping import build_network, fit_samples
from holdfast.report.trackers import Tracker
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.directory import FEDERATION, PROBE
from holdfast.runs.metrics_file import plain
from holdfast.tasks.base import Loss, Task
from holdfast.training.best_round import BestRound
from holdfast.training.checkpointing import (
    IDENTITY,
    close,
    find_checkpoint,
    refuse_change,
    restore,
    run_identity,
    snapshot,
)
from holdfast.training.checks import (
    check_cohort,
    check_micro_batches,
    check_model,
    check_optimizer,
    check_tests,
    ignores_padding,
    warn_of_frozen_classifier,
    warn_of_own_draws,
    warn_of_tiny_batches,
    warn_of_unused,
)
from holdfast.training.description import (
    audit_start,
    describe_federation,
    federation_content,
    machine,
    write_json,
)
from holdfast.training.extension import with_rounds
from holdfast.training.interrupt import deferred_interrupt, interruption
from holdfast.training.outcome import failure
from holdfast.training.privacy import client_privacy, sample_privacy
from holdfast.training.robustness import check_robustness, poisoned
from holdfast.training.run import Run
from holdfast.training.secrecy import check_secrecy
from holdfast.updates.withheld import WithheldCounts, no_samples

LOCAL_TEST_ON_CPU = (
    100  # default number of test samples of a local model, which keeps tests a small part of a round
)

SubmitWrite = Callable[[Callable[[], None]], object]


class Training:
    """A prepared run: validated, with its data on the device, before training."""

    def __init__(
        self,
        method: Method,
        model: ModelSpec | OwnModel | nn.Module,
        federation: Federation,
        settings: Settings,
        *,
        engine: str | Callable[[Method, RunContext, DeviceData], Engine] = "auto",
        device: str = "auto",
        precision: str = "auto",
        parallel_clients: int | None = None,
        ray_address: str | None = None,
        batchnorm: BatchNormPolicy = "average",
        classifier: str | None = None,
        own_kernels: bool = True,
        task: Task | str | Mapping[str, Any] | None = None,
        loss: str | Loss | None = None,
        metrics: Sequence[str | OwnMetric] | str | None = None,
    ) -> None:
        dataset = federation.dataset.for_task(task, loss)
        if dataset is not federation.dataset:
            federation = replace(federation, dataset=dataset)
        self.hash = federation.hash  # of all samples of the clients
        federation = self.held_out(federation, settings)
        self.federation, self.settings, self.model, self.ray_address = (
            federation,
            settings,
            model,
            ray_address,
        )
        check_cohort(settings, federation.clients)
        self.device = choose_device(device)
        self.precision, dtype = precision, choose_precision(precision, self.device)
        if federation.schedule is not None:
            check_schedule(federation.schedule, federation.stages, settings.rounds)
        shape, outputs = dataset.shape, dataset.num_outputs
        network = build_network(
            model, shape, outputs, settings.seed, self.device, dtype, classifier, batchnorm
        )
        self.frozen = network.frozen_hash()
        warn_of_unused(network.unused)
        warn_of_frozen_classifier(network.frozen_classifier)
        network.own_kernels = own_kernels
        self._builder = self._start_builder(network, method, engine, parallel_clients)
        if (fitting := fit_samples(network, dataset)) is not dataset:
            dataset = fitting
            self.federation = federation = replace(federation, dataset=dataset)
        self.batchnorm, self.classifier = batchnorm, classifier
        self.data = device_data(poisoned(dataset, settings, federation), self.device, dtype)
        check_model(network, dataset, self.data)
        if isinstance(model, (OwnModel, nn.Module)):
            warn_of_own_draws(network, self.data)
            network.ignores_padding = ignores_padding(network, self.data)
        sizes = np.stack([federation.sizes(stage) for stage in range(federation.stages)])  # [S, K]
        if network.has_batch_norm and not settings.drop_last:
            warn_of_tiny_batches(network, self.data, sizes, settings.batch_size)
        self.context = make_run_context(
            network,
            self.data,
            settings,
            num_clients=federation.clients,
            class_counts=federation.class_counts,
            bounds=_bounds(dataset.x_train),
            public=federation.public,
            draw_one_of_each=partial(_one_of_each, federation, settings.seed),
            stages=federation.stages,
            read=self.reader(),
            task=dataset.task,
        )
        if settings.withholds_counts:
            if getattr(dataset.task, "class_weights", None) == "balanced":
                raise HoldfastError(
                    "class_weights is balanced, which needs the federation's label counts, but dp, dp_samples "
                    "and secure do not reveal them; give one number for each class"
                )
            self.context = replace(
                self.context,
                class_counts=WithheldCounts.like(self.context.class_counts),
                draw_one_of_each=no_samples,
            )
        check_task(method, self.context)
        self.metrics = metrics_of(dataset.task, metrics)
        self.test = TestSet(dataset, self.context, metrics=self.metrics)
        if len(self.test):
            undefined = self.test.undefined_metrics(required=metrics is not None)
            self.metrics = [metric for metric in self.metrics if metric.name not in undefined]
        self.validation = self.validation_set(required=metrics is not None)
        check_tests(settings, self.federation, len(self.test), self.validation is not None)
        check_public(method, self.context)
        self.method = method.prepare(self.context)
        check_optimizer(self.method, settings)
        check_micro_batches(self.method, network, dataset.task, settings)
        check_robustness(self.method, self.context, settings, federation)
        check_secrecy(self.method, settings, federation)
        self.privacy = client_privacy(self.method, self.context, self.data, settings, federation)
        self.sample_privacy = sample_privacy(
            self.method, self.context, self.data, settings, federation, self.privacy
        )
        if callable(engine):
            self.engine = engine(self.method, self.context, self.data)
        else:
            self.engine = choose_engine(
                engine, self.method, self.context, self.data, settings, sizes, parallel_clients, ray_address
            )

    def held_out(self, federation: Federation, settings: Settings) -> Federation:
        """The federation with validation samples."""
        if settings.validation is None:
            return federation
        return hold_out(federation, settings.validation, settings.seed)

    def validation_set(self, required: bool) -> Validation | None:
        """The clients' tests on their validation samples, if they have any.

        ``required``: whether the user has set the metrics, so that each must be measurable.
        """
        if not len(self.federation.validation):
            return None
        held = ValidationSet(self.federation, self.context, self.metrics)
        held.metrics = measurable(held.metrics, held.clients, held.defined_metrics(), required)
        return held

    def reader(self) -> Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]:
        """The function that reads training samples, preprocessed, and their labels by id."""
        return self.data.read_labelled

    def describe(self) -> dict[str, Any]:
        """The settings of the run as in an experiment file, and the entries of `RECORDED`."""
        dataset = self.federation.dataset
        return {
            "data": dataset.name if dataset.name in DATASETS else {"name": dataset.name, "own": True},
            "preprocess": plain(asdict(dataset.preprocess)),
            **({} if dataset.encoder is None else {"encoder": dataset.encoder.describe()}),
            **describe_federation(self.federation),
            "method": plain(describe_method(self.method)),
            "model": plain(describe_model(self.model)),
            "task": plain(dataset.task.describe()),
            "loss": None,  # part of the task
            "metrics": [metric.describe() for metric in self.metrics],
            "classifier": self.classifier,
            "batchnorm": self.batchnorm,
            **asdict(self.settings),
            "optimizer": optimizers.description(self.settings.optimizer),
            "engine": self.engine.name,
            "device": self.device.type,
            "precision": self.precision,
            "parallel_clients": self.engine.group if self.engine.name == "vectorized" else None,
            "own_kernels": self.context.network.own_kernels,
            "ray_address": self.ray_address,
            "hash": self.hash,
            "shape": list(dataset.shape),
            "sample_dtype": str(dataset.x_train.dtype).removeprefix("torch."),
            "sample_preprocess": plain(
                asdict(dataset.preprocess)
            ),  # `preprocess` may be the name of a preset
            "classes": list(dataset.classes),
            "outputs": dataset.num_outputs,
            **({} if self.frozen is None else {"frozen": self.frozen}),
            "versions": {
                "holdfast": __version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            "machine": machine(self.device),
        }

    def _start_builder(
        self, network: Network, method: Method, engine: object, parallel_clients: int | None
    ) -> KernelBuilder | None:
        """A process that compiles the run's kernels, unless they are compiled already or it uses none."""
        if engine not in ("auto", "vectorized") or not network.uses_kernels or not can_build():
            return None
        settings, dataset = self.settings, self.federation.dataset
        lanes = parallel_clients or settings.clients_per_round or self.federation.clients
        layers = [str(module) for module in network.net.modules() if not list(module.children())]
        options = (
            settings.batch_size,
            settings.optimizer,
            settings.momentum,
            self.precision,
            dataset.preprocess,
        )
        marker = marker_of(method, layers, dataset.shape, lanes, options)
        return None if marker.exists() else KernelBuilder(marker)

    def _build_kernels(self, builder: KernelBuilder) -> None:
        """Compile the kernels of a round; a trial of the first round determines which.

        A failed trial is not an error: kernels are then compiled at their first launch.
        """
        try:
            if self.engine.name == "vectorized" and self.context.network.uses_kernels:
                with warnings.catch_warnings(), trial() as tried, suppress(Exception):
                    warnings.simplefilter("ignore")
                    loop = self._new_loop(StateCache(None, None))
                    loop.round(1)
                    loop.evaluate_global()
                builder.build(list(tried.kernels.values()))
        finally:
            builder.close()

    def loop(self, client_states: StateCache, audited: bool = False) -> RoundLoop:
        """The round loop, with the server in its initial state; for ``audited`` see `RoundLoop`."""
        builder, self._builder = self._builder, None
        if builder is not None:
            self._build_kernels(builder)
        return self._new_loop(client_states, audited)

    def _new_loop(self, client_states: StateCache, audited: bool = False) -> RoundLoop:
        dataset, settings = self.federation.dataset, self.settings
        test = self.test
        limit = settings.local_test_samples or (LOCAL_TEST_ON_CPU if self.device.type == "cpu" else None)
        few = settings.evaluate_locals and limit is not None and limit < len(test)
        local_test = TestSet(dataset, self.context, limit, settings.seed) if few else test
        runner = ClientRunner(self.method, self.context, self.data, settings)
        samples = PER_CLASS * dataset.num_classes
        probe = TestSet(dataset, self.context, samples, settings.seed) if settings.probe_every else None
        return RoundLoop(
            self.method,
            self.context,
            self.federation,
            self.engine,
            settings,
            client_states,
            test,
            local_test,
            runner,
            probe,
            self.privacy,
            self.validation,
            self.sample_privacy,
            audited,
        )

    def run(
        self,
        experiment: dict[str, Any],
        out: str | Path | None = None,
        resume: bool = False,
        trackers: Sequence[Tracker] = (),
        on_round: Callable[[dict[str, Any]], None] | None = None,
        submit_final_write: SubmitWrite | None = None,
        stop_after: int | None = None,
    ) -> Run:
        """Train, from the start or from the last checkpoint in ``out``.

        ``submit_final_write`` receives the function that writes the end of the run to the disk. After round
        ``stop_after`` the run stops with a checkpoint, as after an interrupt.
        """
        last = min(self.settings.rounds, stop_after or self.settings.rounds)
        with ExitStack() as stack:
            directory, checkpoint, records = None, None, []
            identity = run_identity(self.describe())
            sizes = None if self.validation is None else self.validation.sizes
            content = federation_content(self.federation, self.hash, sizes)
            if out is not None:
                directory = self._directory(out, experiment, resume)
                stack.enter_context(directory.lock())
                checkpoint = find_checkpoint(directory, identity)
                before = directory.experiment["rounds"]
                checkpoint = with_rounds(directory, checkpoint, self.settings, self.method, self.federation)
                write_json(directory, FEDERATION, content)
                begun = 0 if checkpoint is None else checkpoint.round
                event = "begun" if not resume else "resumed" if before == self.settings.rounds else "extended"
                audit_start(directory, event, begun, self.describe())
                directory.rewind(begun)
                records = directory.records()
            client_states = StateCache(directory, checkpoint)
            loop = self.loop(client_states, audited=directory is not None)
            best = BestRound(primary_measure(experiment), records)
            if checkpoint is not None:
                restore(loop, checkpoint, self.device, best)
                if checkpoint.warning is not None:
                    warnings.warn(checkpoint.warning, HoldfastWarning, stacklevel=2)
            for tracker in trackers:
                tracker.start(experiment)
                stack.callback(tracker.finish)  # also when the run is interrupted

            def keep(pending: PendingRound, save: bool) -> bool:
                record = loop.finish_round(pending)
                if best.stops(record, self.settings.patience) and record["round"] < self.settings.rounds:
                    record["stopped_early"] = True
                ended = "stopped_early" in record or record["round"] == self.settings.rounds
                if ended:
                    self._finalize(loop, record)
                if best.add(record):
                    best.keep(evaluated_model(self.method, loop.server if ended else pending.server))
                records.append(record)
                if directory is not None:
                    directory.append(record, None if pending.audit is None else pending.audit.entry())
                    if save and not ended:
                        client_states.committed(
                            directory.save_checkpoint(*snapshot(loop, client_states, identity, best, False))
                        )
                for tracker in trackers:
                    tracker.log(record)
                if on_round is not None:
                    on_round(record)
                return ended

            done = len(records)
            if not _stopped_early(records):
                self._rounds(loop, done + 1, last, keep)
            model = self._module(*evaluated_model(self.method, loop.server))
            best_model = None if best.round is None else self._module(*best.model)
            stopped = _stopped_early(records)
            run = Run(
                experiment,
                records,
                model,
                None if directory is None else directory.path,
                peak_bytes(self.device),
                len(records) < self.settings.rounds and not stopped,
                best.round,
                best_model,
                self.method,
                content,
            )
            if directory is None:
                run.checkpoint = Checkpoint(*snapshot(loop, client_states, identity, best, stopped))
            if run.interrupted:
                if directory is not None:
                    directory.audit("stopped", round=len(records))
                if len(records) < last:
                    warnings.warn(
                        interruption(run), HoldfastWarning, stacklevel=3
                    )  # where `train` was called
                return run
            run.probe = loop.probe_features or {}
            if len(records) > done:
                self._warn_of_failure(loop, records)
            if directory is not None:
                if run.probe:
                    write_json(directory, PROBE, run.probe)
                final = None
                if len(records) > done:
                    final = snapshot(loop, client_states, identity, best, stopped)
                best_state = None if best_model is None else best_model.state_dict()
                ending = partial(close, directory, final, model.state_dict(), best_state, stack.pop_all())
                ending() if submit_final_write is None else submit_final_write(ending)
            return run

    def _rounds(
        self, loop: RoundLoop, first: int, last: int, keep: Callable[[PendingRound, bool], bool]
    ) -> None:
        """Run the rounds; ``keep(round, checkpoint)`` stores each round, with a checkpoint if one is due, and returns
        whether the run ends with it.

        Unless a checkpoint is due, a GPU starts the next round before the last one is stored, since its test may still
        be running. After an interrupt, the current round is the last and is stored with a checkpoint; the same holds
        for round ``last`` if the run has more rounds.
        """
        saved, waiting = time.monotonic(), list[PendingRound]()

        def keep_last() -> None:
            while waiting:
                keep(waiting.pop(), False)

        try:
            with deferred_interrupt() as interrupt:
                for number in range(first, last + 1):
                    pending = loop.start_round(number, keep_last)
                    keep_last()
                    late = time.monotonic() - saved >= self.settings.checkpoint_seconds
                    stop = interrupt.requested or number == last
                    if (late or stop) and number < self.settings.rounds:
                        if keep(pending, True) or stop:
                            return
                        saved = time.monotonic()
                    elif self._overlaps_rounds:
                        waiting.append(pending)
                    elif keep(pending, False):
                        return
        finally:
            keep_last()  # a complete round is stored even if the next one fails

    @property
    def _overlaps_rounds(self) -> bool:
        """Whether a round starts during the test of the last model, which requires that it does not use the result."""
        needs_test = self.settings.evaluate_locals or self.settings.patience is not None
        return self.device.type == "cuda" and not needs_test

    def _directory(self, out: str | Path, experiment: dict[str, Any], resume: bool) -> RunDirectory:
        if not resume:
            return RunDirectory.create(out, experiment)
        directory = RunDirectory.open(out)
        refuse_change(
            out, directory.experiment, {key: experiment[key] for key in IDENTITY if key != "rounds"}
        )
        return directory

    def _finalize(self, loop: RoundLoop, record: dict[str, Any]) -> None:
        """Finalize the model from statistics of all clients, for methods such as CCVR; recorded with the last round."""
        if not self.method.overrides("final_statistics"):
            return
        params, buffers = evaluated_model(self.method, loop.server)
        before = replace(loop.server, params=params, buffers=buffers)
        number = loop.server.round
        stage = loop.stage(number)
        sent = Broadcast(number, before.params, before.buffers, {})
        holders = np.flatnonzero(self.federation.sizes(stage)).tolist()
        jobs = [Job(k, self.federation.client(k, stage), stage) for k in holders]
        sums, usable, incidents = self.sum_statistics(loop, sent, jobs)
        if usable < min(self.settings.min_clients, len(jobs)):
            raise too_few_updates(number, usable, self.settings.min_clients, incidents)
        loop.server = replace(self.method.finalize(before, sums, self.context), final=True)
        record["incidents"] += [incident.record() for incident in incidents]
        record |= loop.evaluate_final()

    def sum_statistics(
        self, loop: RoundLoop, sent: Broadcast, jobs: Sequence[Job]
    ) -> tuple[Tree, int, list[Incident]]:
        """The sum of the clients' statistics under the final model, the number of clients, and the incidents."""
        if loop.secure is not None:
            statistics = zip(jobs, self.final_statistics(loop, sent, jobs), strict=True)
            trees = {job.client: tree for job, tree in statistics if not isinstance(tree, Incident)}
            return masked_sum(loop.secure, trees, self.settings.seed, sent.round), len(trees), []
        sums: Tree = {}
        usable, incidents = 0, []
        for answer in self.final_statistics(loop, sent, jobs):
            if isinstance(answer, Incident):
                incidents.append(answer)
            else:
                add_(sums, answer)
                usable += 1
        return sums, usable, incidents

    def final_statistics(
        self, loop: RoundLoop, sent: Broadcast, jobs: Sequence[Job]
    ) -> Iterator[Tree | Incident]:
        """Each client's statistics under the final model, or the incident that prevents them."""
        for job in jobs:
            yield loop.runner.final_statistics(job, sent)

    def _warn_of_failure(self, loop: RoundLoop, records: Sequence[dict[str, Any]]) -> None:
        """Warn of a run that diverged or ended near chance; only for tasks with one class per sample."""
        if self.context.task.name != "multiclass" or not len(self.test):
            return
        personal = self.method.overrides("initial_params") or self.method.overrides("personal_logits")
        sentence = failure(records, loop.test.class_counts, self.settings.lr, judge_accuracy=not personal)
        if sentence is not None:
            text = f"{self.method.name}: {sentence}"
            warnings.warn(text, HoldfastWarning, stacklevel=4)  # where `train` was called

    def _module(self, params: Tensors, buffers: Tensors) -> nn.Module:
        """The user's module with these weights, on the CPU."""
        net = self.context.network.module()
        # Not strict: frozen parameters are in the module already, and tied weights have one name.
        net.load_state_dict({**params, **buffers}, strict=False)
        return net.cpu().eval()


def _stopped_early(records: Sequence[Mapping[str, Any]]) -> bool:
    return bool(records) and "stopped_early" in records[-1]


def _bounds(x: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest value that a stored sample can have."""
    ends = torch.iinfo(x.dtype) if x.dtype == torch.uint8 else x.aminmax()
    return float(ends.min), float(ends.max)


def _one_of_each(federation: Federation, seed: int) -> np.ndarray:
    """One training sample of each class that clients hold; -1 where there is none.

    The choice depends only on the clients' label counts, so that a server without the samples makes the same choice.
    """
    held = federation.dataset.strata_train[federation.indices]
    chosen = np.full(federation.dataset.num_classes, -1, np.int64)
    for label in np.unique(held):
        places = np.flatnonzero(held == label)
        drawn = generator(seed, "one of each class", int(label)).integers(len(places))
        chosen[label] = federation.indices[places[drawn]]
    return chosen
