"""A training session: the run prepared and validated, with its data on the device, before its first round."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.core import optimizers
from holdfast.core.device import choose_device, choose_precision
from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.core.trees import add_
from holdfast.core.version import __version__
from holdfast.data.federation import Federation
from holdfast.data.schedules import check_schedule
from holdfast.data.sources import DATASETS
from holdfast.data.validation import hold_out
from holdfast.engine.base import Engine
from holdfast.engine.clients import Broadcast, ClientRunner, DeviceData, Incident, Job
from holdfast.engine.evaluation import TestSet
from holdfast.engine.factory import choose_engine
from holdfast.engine.probe import PER_CLASS
from holdfast.engine.rounds import RoundLoop
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
from holdfast.runs.metrics_file import plain
from holdfast.tasks.base import Loss, Task
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
    describe_federation,
    machine,
)
from holdfast.training.privacy import client_privacy, sample_privacy
from holdfast.training.robustness import check_robustness, poisoned
from holdfast.training.secrecy import check_secrecy
from holdfast.updates.withheld import WithheldCounts, no_samples

LOCAL_TEST_ON_CPU = (
    100  # default number of test samples of a local model, which keeps tests a small part of a round
)


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
        self.precision, arithmetic = precision, choose_precision(precision, self.device)
        if federation.schedule is not None:
            check_schedule(federation.schedule, federation.stages, settings.rounds)
        shape, outputs = dataset.shape, dataset.num_outputs
        network = build_network(
            model, shape, outputs, settings.seed, self.device, arithmetic, classifier, batchnorm
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
        self.data = device_data(poisoned(dataset, settings, federation), self.device, arithmetic.dtype)
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
