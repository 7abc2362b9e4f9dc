"""``train``: a method, a model and a federation in; a run out."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from holdfast import __version__, kernels
from holdfast.core import files
from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.memory import peak_bytes
from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.core.trees import add_
from holdfast.data.federation import Federation
from holdfast.data.schedules import check_schedule
from holdfast.data.sources import DATASETS
from holdfast.engine.clients import Broadcast, DeviceData, Incident, Job, LocalSide
from holdfast.engine.evaluation import TestSet
from holdfast.engine.factory import choose_device, choose_engine, choose_precision
from holdfast.engine.probe import PER_CLASS
from holdfast.engine.rounds import Engine, Launched, Loop, too_few
from holdfast.engine.run_context import device_data, make_task
from holdfast.engine.state_cache import Memories
from holdfast.methods.base import Method, Tree, check_public
from holdfast.methods.context import Task
from holdfast.methods.registry import is_known, parse_method
from holdfast.models.network import NormPolicy
from holdfast.models.own import network_of
from holdfast.models.registry import ModelSpec, parse_model
from holdfast.runs import RunDirectory
from holdfast.runs.metrics_file import plain
from holdfast.training.checkpointing import close, restore, snapshot
from holdfast.training.checks import (
    check_cohort,
    check_kinds,
    check_model,
    ignores_padding,
    warn_of_own_draws,
    warn_of_tiny_batches,
    warn_of_unused,
)
from holdfast.training.description import describe_federation, machine, write_federation
from holdfast.training.resuming import WRITTEN, made_of, refuse_change, where_to_go_on
from holdfast.training.run import Run

LOCAL_TEST_ON_CPU = 100  # test samples for each local model, so that testing stays a small part of a round

HandOver = Callable[[Callable[[], None]], object]


class Tracker(Protocol):
    """Something that is told of a run as it goes: TensorBoard, a CSV file."""

    def start(self, experiment: Mapping[str, Any]) -> None:
        """Before the first round."""

    def log(self, record: Mapping[str, Any]) -> None:
        """After each round."""

    def finish(self) -> None:
        """After the last round."""


def train(
    method: Method | str,
    model: ModelSpec | nn.Module | str,
    federation: Federation,
    *,
    rounds: int,
    sample: int | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    drop_last: bool = False,
    lr: float = 0.01,
    momentum: float = 0.0,
    keep_momentum: bool = False,
    weight_decay: float = 0.0,
    lr_decay: float = 1.0,
    max_grad_norm: float | None = None,
    dropout: float = 0.0,
    deadline: float | None = None,
    min_clients: int = 1,
    seed: int = 0,
    engine: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    lanes: int | None = None,
    address: str | None = None,
    norm: NormPolicy = "average",
    classifier: str | None = None,
    evaluate_every: int = 1,
    evaluate_locals: bool = True,
    local_test: int | None = None,
    probe: int = 0,
    checkpoint_seconds: float = 30.0,
    out: str | Path | None = None,
    resume: bool = False,
    experiment: Mapping[str, Any] | None = None,
    trackers: Iterable[Tracker] = (),
    on_round: Callable[[dict[str, Any]], None] | None = None,
    hand_over: HandOver | None = None,
) -> Run:
    """Train ``model`` with ``method`` across the clients of ``federation``.

    Each of ``rounds`` rounds trains ``sample`` clients (all by default) for ``epochs`` epochs over their own data
    in batches of ``batch_size``, by SGD with ``momentum`` and ``weight_decay``; the learning rate of round t is
    ``lr * lr_decay ** (t - 1)``. With ``drop_last`` an epoch's last batch is left out where it is not full, unless
    it is the only one: BatchNorm over two or three samples may throw a model off. Momentum begins at 0 in every
    round, or with ``keep_momentum`` only in a client's first, as where its optimiser lives on. The same
    ``seed`` on the same engine gives the same bits.

    ``model`` is one of ``holdfast.models`` or any ``torch.nn.Module`` that ends in a Linear layer; ``classifier``
    names that layer if it is not the last Linear. Method and model may be written as on the command line:
    ``"fedntd:beta=2"``, ``"mlp:64,64"``. ``norm`` is what happens to BatchNorm: ``average``, ``local`` or ``drop``.
    ``lanes`` is how many clients train side by side on the ``lanes`` engine, ``address`` where the cluster of the
    ``ray`` engine is. With ``deadline`` a round closes after so many seconds of training without those still at work;
    one with fewer than ``min_clients`` usable updates stops the run.

    With ``out`` the run is written to that directory and survives being killed: call again with ``resume=True``
    (and the same arguments), or ``holdfast resume``. ``local_test`` is the number of test samples for each local
    model (default: all on a GPU, 100 on a CPU). ``on_round`` is called with each round's record. ``experiment``
    says what experiment.yaml should say of the data beyond what the federation knows of itself. ``hand_over`` is
    given what writes the end of the run to the disk, for another thread to call while this one goes on.
    """
    check_kinds(method, model, federation)
    if resume and out is None:
        raise HoldfastError("resume is given without out, the directory of the run that is to go on")
    settings = Settings(
        rounds=rounds,
        sample=sample,
        epochs=epochs,
        batch_size=batch_size,
        drop_last=drop_last,
        lr=lr,
        momentum=momentum,
        keep_momentum=keep_momentum,
        weight_decay=weight_decay,
        lr_decay=lr_decay,
        max_grad_norm=max_grad_norm,
        dropout=dropout,
        deadline=deadline,
        min_clients=min_clients,
        seed=seed,
        evaluate_every=evaluate_every,
        evaluate_locals=evaluate_locals,
        local_test=local_test,
        probe=probe,
        checkpoint_seconds=checkpoint_seconds,
    )
    method = parse_method(method) if isinstance(method, str) else method
    model = parse_model(model) if isinstance(model, str) else model
    begun = RunDirectory.open(out).experiment if resume and out is not None else {}
    if lanes is None and engine != "sequential":
        lanes = begun.get("lanes")
    training = Training(
        method, model, federation, settings, engine=engine, device=device, precision=precision,
        lanes=lanes, address=address, norm=norm, classifier=classifier,
        own_kernels=begun.get("own_kernels"),  # what the machine is like today must not change how it rounds
    )  # fmt: skip
    described = training.describe() | dict(experiment or {})
    return training.run(described, out, resume, list(trackers), on_round, hand_over)


class Training:
    """A run made ready: everything checked and on the device, nothing trained yet."""

    def __init__(
        self,
        method: Method,
        model: ModelSpec | nn.Module,
        federation: Federation,
        settings: Settings,
        *,
        engine: str | Callable[[Method, Task, DeviceData], Engine] = "auto",
        device: str = "auto",
        precision: str = "auto",
        lanes: int | None = None,
        address: str | None = None,
        norm: NormPolicy = "average",
        classifier: str | None = None,
        own_kernels: bool | None = None,
    ) -> None:
        dataset = federation.dataset
        self.federation, self.settings, self.model, self.address = federation, settings, model, address
        check_cohort(settings, federation.clients)
        self.device = choose_device(device)
        self.precision, dtype = precision, choose_precision(precision, self.device)
        if federation.schedule is not None:
            check_schedule(federation.schedule, federation.stages, settings.rounds)
        shape, classes = dataset.shape, dataset.num_classes
        network = network_of(model, shape, classes, settings.seed, self.device, dtype, classifier, norm)
        warn_of_unused(network.unused)
        if own_kernels is None:
            share = min(settings.sample or federation.clients, federation.clients) / federation.clients
            trained = settings.rounds * settings.epochs * share * len(federation.indices) / federation.stages
            own_kernels = kernels.worthwhile(network.net, shape, settings.batch_size, trained)
        network.own_kernels = own_kernels
        self.norm, self.classifier = norm, classifier
        self.data = device_data(dataset, self.device, dtype)
        check_model(network, dataset, self.data)
        if isinstance(model, nn.Module):
            warn_of_own_draws(network, self.data)
            network.ignores_padding = ignores_padding(network, self.data)
        sizes = np.stack([federation.sizes(stage) for stage in range(federation.stages)])  # [S, K]
        if network.has_batch_norm and not settings.drop_last:
            warn_of_tiny_batches(network, self.data, sizes, settings.batch_size)
        self.task = make_task(
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
        )
        check_public(method, self.task)
        self.method = method.prepare(self.task)
        if callable(engine):
            self.engine = engine(self.method, self.task, self.data)
        else:
            self.engine = choose_engine(
                engine, self.method, self.task, self.data, settings, sizes, lanes, address
            )

    def reader(self) -> Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]:
        """What gives training samples, ready for the model, and their labels, by id."""
        return self.data.labelled

    def describe(self) -> dict[str, Any]:
        """Everything needed to run it again, in the words of an experiment file, and what was found."""
        dataset, model = self.federation.dataset, self.model
        own = {"name": type(model).__name__, "own": True}
        return {
            "data": dataset.name if dataset.name in DATASETS else {"name": dataset.name, "own": True},
            "preprocess": plain(asdict(dataset.preprocess)),
            **describe_federation(self.federation),
            "method": plain(self.method.describe()) | ({} if is_known(self.method) else {"own": True}),
            "model": plain(model.describe()) if isinstance(model, ModelSpec) else own,
            "classifier": self.classifier,
            "norm": self.norm,
            **asdict(self.settings),
            "engine": self.engine.name,
            "device": self.device.type,
            "precision": self.precision,
            "lanes": self.engine.group if self.engine.name == "lanes" else None,
            "own_kernels": self.task.network.own_kernels,
            "address": self.address,
            "hash": self.federation.hash,
            "shape": list(dataset.shape),
            "classes": list(dataset.classes),
            "versions": {
                "holdfast": __version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            "machine": machine(self.device),
        }

    def loop(self, memories: Memories) -> Loop:
        """The rounds, with the server at its start."""
        dataset, settings = self.federation.dataset, self.settings
        test = TestSet(dataset, self.task)
        limit = settings.local_test or (LOCAL_TEST_ON_CPU if self.device.type == "cpu" else None)
        few = settings.evaluate_locals and limit is not None and limit < len(test)
        local_test = TestSet(dataset, self.task, limit, settings.seed) if few else test
        side = LocalSide(self.method, self.task, self.data, settings)
        samples = PER_CLASS * dataset.num_classes
        probe = TestSet(dataset, self.task, samples, settings.seed) if settings.probe else None
        return Loop(
            self.method,
            self.task,
            self.federation,
            self.engine,
            settings,
            memories,
            test,
            local_test,
            side,
            probe,
        )

    def run(
        self,
        experiment: dict[str, Any],
        out: str | Path | None = None,
        resume: bool = False,
        trackers: Sequence[Tracker] = (),
        on_round: Callable[[dict[str, Any]], None] | None = None,
        hand_over: HandOver | None = None,
    ) -> Run:
        """Train, from the start or from the last checkpoint in ``out``.

        ``hand_over`` is given what writes the end of the run to the disk, for another thread to call.
        """
        with ExitStack() as stack:
            directory, checkpoint, records = None, None, []
            identity = made_of(self.describe())
            if out is not None:
                directory = self._directory(out, experiment, resume)
                stack.enter_context(directory.lock())
                checkpoint = where_to_go_on(directory, identity)
                directory.rewind(0 if checkpoint is None else checkpoint.round)
                records = directory.records()
                write_federation(directory.path, self.federation)
            memories = Memories(directory, checkpoint)
            loop = self.loop(memories)
            if checkpoint is not None:
                restore(loop, checkpoint, self.device)
                if checkpoint.warning is not None:
                    warnings.warn(checkpoint.warning, HoldfastWarning, stacklevel=2)
            for tracker in trackers:
                tracker.start(experiment)
                stack.callback(tracker.finish)  # also when the run is interrupted

            def keep(launched: Launched, save: bool) -> None:
                record = loop.settle(launched)
                if record["round"] == self.settings.rounds:
                    self._conclude(loop, record)
                records.append(record)
                if directory is not None:
                    directory.append(record)
                    if save:
                        memories.committed(directory.save_checkpoint(*snapshot(loop, memories, identity)))
                for tracker in trackers:
                    tracker.log(record)
                if on_round is not None:
                    on_round(record)

            done = len(records)
            self._rounds(loop, done + 1, keep)
            model = self._final_model(loop)
            if directory is not None and loop.picture is not None:
                files.replace(directory.path / "probe.json", json.dumps(loop.picture).encode() + b"\n")
            run = Run(experiment, records, model, None, peak_bytes(self.device))
            if directory is not None:
                run.path = directory.path
                last = snapshot(loop, memories, identity) if len(records) > done else None
                ending = partial(close, directory, last, model.state_dict(), stack.pop_all())
                ending() if hand_over is None else hand_over(ending)
            return run

    def _rounds(self, loop: Loop, first: int, keep: Callable[[Launched, bool], None]) -> None:
        """Do the rounds; ``keep`` takes each in turn, and whether a checkpoint is due: after the last it is not.

        A GPU begins the next round first, since it may still be testing, unless a checkpoint is due; the last round
        is kept while it is at work.
        """
        saved, waiting = time.monotonic(), list[Launched]()

        def keep_last() -> None:
            while waiting:
                keep(waiting.pop(), False)

        loop.while_waiting(keep_last)
        try:
            for number in range(first, self.settings.rounds + 1):
                launched = loop.launch(number)
                keep_last()
                late = time.monotonic() - saved >= self.settings.checkpoint_seconds
                if late and number < self.settings.rounds:
                    keep(launched, True)
                    saved = time.monotonic()
                elif self._runs_ahead:
                    waiting.append(launched)
                else:
                    keep(launched, False)
        finally:
            loop.while_waiting(None)  # it knows the loop, which must not keep itself alive
            keep_last()  # a round that went well is kept when the next one does not

    @property
    def _runs_ahead(self) -> bool:
        """Whether a round begins while the last one's model is still tested; not where it needs what tests find."""
        return self.device.type == "cuda" and not self.settings.evaluate_locals

    def _directory(self, out: str | Path, experiment: dict[str, Any], resume: bool) -> RunDirectory:
        if not resume:
            return RunDirectory.create(out, experiment)
        directory = RunDirectory.open(out)
        refuse_change(out, directory.experiment, {key: experiment[key] for key in WRITTEN})
        return directory

    def _conclude(self, loop: Loop, record: dict[str, Any]) -> None:
        """What a method does once after the last round, over all clients (CCVR); it belongs to that round's record."""
        if not self.method.overrides("survey"):
            return
        before = loop.server
        sums: Tree = {}
        stage = loop.stage(self.settings.rounds)
        sent = Broadcast(self.settings.rounds, before.params, before.buffers, {})
        holders = np.flatnonzero(self.federation.sizes(stage)).tolist()
        jobs = [Job(k, self.federation.client(k, stage), stage) for k in holders]
        usable, incidents = 0, []
        for said in self.survey(loop, sent, jobs):
            if isinstance(said, Incident):
                incidents.append(said)
            else:
                add_(sums, said)
                usable += 1
        if usable < min(self.settings.min_clients, len(jobs)):
            raise too_few(self.settings.rounds, usable, self.settings.min_clients, incidents)
        loop.server = self.method.conclude(before, sums, self.task)
        record["incidents"] += [incident.record() for incident in incidents]
        record |= loop.test_final()

    def survey(self, loop: Loop, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[Tree | Incident]:
        """What each client says of the final model, or why it says nothing."""
        for job in jobs:
            yield loop.side.survey(job, sent)

    def _final_model(self, loop: Loop) -> nn.Module:
        net = self.task.network.module()
        # What is frozen is there already, and weights that are one tensor have one name.
        net.load_state_dict({**self.method.generic(loop.server), **loop.server.buffers}, strict=False)
        return net.cpu().eval()


def _bounds(x: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest value that stored samples may have."""
    ends = x.aminmax() if x.is_floating_point() else torch.iinfo(x.dtype)
    return float(ends.min), float(ends.max)


def _one_of_each(federation: Federation, seed: int) -> np.ndarray:
    """One training sample of each class that clients hold; -1 where there is none.

    Which one depends on nothing but how many each client holds, so that a server which has not seen the
    samples draws the same.
    """
    held = federation.dataset.y_train.numpy()[federation.indices]
    chosen = np.full(federation.dataset.num_classes, -1, np.int64)
    for label in np.unique(held):
        places = np.flatnonzero(held == label)
        drawn = generator(seed, "one of each class", int(label)).integers(len(places))
        chosen[label] = federation.indices[places[drawn]]
    return chosen
