"""The server's side: a run whose clients are reached through Flower's grid."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import Tree
from holdfast.data.federation import Federation
from holdfast.data.schedules import StageSchedule, schedule_from
from holdfast.engine.base import Engine
from holdfast.engine.clients import Broadcast, DeviceData, Incident, Job
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.validation import Validation, measurable
from holdfast.flower.app import AppConfig, FlowerApp
from holdfast.flower.engine import FlowerEngine
from holdfast.flower.messages import SAMPLES, tree_from_record, tree_to_record
from holdfast.flower.nodes import Nodes
from holdfast.flower.population import Population
from holdfast.flower.validation import SiteValidation
from holdfast.methods.base import Method
from holdfast.methods.context import RunContext
from holdfast.metrics.by_task import Metric, metrics_of
from holdfast.runs import RunDirectory
from holdfast.training.execution import execute
from holdfast.training.session import Training

WAIT_SECONDS = 600.0  # timeout for all clients to connect at the start
POPULATION_FILE = "flower.json"

_log = logging.getLogger("flwr")  # the logger whose records Flower displays


def serve(app: FlowerApp, app_config: AppConfig, grid: Grid) -> None:
    """Run the experiment, or resume it if ``out`` holds an unfinished run."""
    out = Path(str(app_config.option("out"))).expanduser()
    resume = (out / "experiment.yaml").exists()
    if resume and RunDirectory.open(out).finished:
        _log.info("Holdfast: %s is finished; choose another out for another run", out)
        return
    dataset = None if app.server_data is None else app.server_data(app_config.config)
    nodes = Nodes(grid, dataset, app_config.code)
    seconds = float(app_config.option("wait", WAIT_SECONDS))
    population_file = out / POPULATION_FILE
    if population_file.exists():
        population = Population.load(population_file)
        nodes.wait_for(len(population.counts), app_config.settings.min_clients, seconds)
    else:
        clients = int(app_config.option("clients"))
        reports = nodes.wait_for(clients, clients, seconds)
        population = Population.from_reports(secrets.token_hex(16), reports)
        population.save(population_file)
    training = FlowerTraining(app_config, nodes, population)
    run = execute(training, training.describe(), out, resume, on_round=_log_round)
    _log.info("Holdfast: %s; see %s", "interrupted" if run.interrupted else "finished", out)


def _log_round(record: dict[str, Any]) -> None:
    accuracy = f", accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
    if "validation" in record:
        found = record["validation"]
        names = [name for name in found if name != "loss" and isinstance(found[name], float)]
        accuracy += "".join(f", validation {name} {found[name]:.4g}" for name in names[:1])
    incidents = [f"client {i['client']}: {i['kind']}" for i in record["incidents"]]
    listed = f", incidents: {'; '.join(incidents)}" if incidents else ""
    clients = len(record["participants"])
    _log.info("Holdfast: round %s with %s clients%s%s", record["round"], clients, accuracy, listed)


class FlowerTraining(Training):
    """A run whose clients' samples are at the sites."""

    def __init__(self, app_config: AppConfig, nodes: Nodes, population: Population) -> None:
        self.app_config, self.nodes, self.population = app_config, nodes, population
        described = app_config.described
        dataset = nodes.dataset.for_task(described["task"], described["loss"])

        def engine(method: Method, context: RunContext, data: DeviceData) -> Engine:
            return FlowerEngine(app_config, nodes, population, method, context, data, self.validated)

        super().__init__(
            app_config.method,
            app_config.model(),
            population.federation(dataset, _schedule(app_config, population.counts.shape[1])),
            app_config.settings,
            engine=engine,
            precision=described["precision"],
            batchnorm=described["batchnorm"],
            classifier=described["classifier"],
            metrics=described["metrics"],
        )

    def held_out(self, federation: Federation, settings: Settings) -> Federation:
        """The federation unchanged: sites hold out samples themselves, and report the remaining ones."""
        return federation

    def validation_set(self, required: bool) -> Validation | None:
        """The clients' tests at their sites, if they have validation samples."""
        sizes, metrics = self.population.validation, self.metrics
        self.validated: list[Metric] = []  # the metrics that are recorded
        if not sizes.any():
            return None
        wanted = metrics_of(self.context.task, self.app_config.described["metrics"])
        if self.population.defined.shape[1] != len(wanted):
            raise HoldfastError(
                f"the sites report on {self.population.defined.shape[1]} metrics, but the server expects "
                f"{len(wanted)}; all need the same run configuration and version of Holdfast"
            )
        defined = {m.name: self.population.defined[sizes > 0, number] for number, m in enumerate(wanted)}
        columns = np.stack([defined[metric.name] > 0 for metric in metrics], 1)
        self.validated = measurable(metrics, np.flatnonzero(sizes), columns, required)

        def engine() -> FlowerEngine:
            assert isinstance(self.engine, FlowerEngine)
            return self.engine

        return SiteValidation(engine, sizes, self.validated)

    def reader(self) -> Callable[[np.ndarray], tuple[Tensor, Tensor]]:
        """The function that reads samples by id."""
        return self.read

    def read(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Samples by id, with labels: the server's own, or one of each class from the sites that allow it."""
        first = len(self.data.x)
        if ids.max(initial=-1) < first:
            return self.data.read_labelled(ids)
        positions = [self.population.locate(int(i) - first) for i in ids]
        self.nodes.refresh()
        owners = [self.nodes.of_client.get(position["client"]) for position in positions]
        content: dict[int, dict[str, Any]] = {}
        for node in {node for node in owners if node is not None}:
            requested = [p for p, owner in zip(positions, owners, strict=True) if owner == node]
            columns = {key: torch.tensor([p[key] for p in requested]) for key in requested[0]}
            content[node] = {"positions": tree_to_record(columns)}
        replies, faults = self.nodes.request(SAMPLES, content, self.app_config.settings.deadline)
        if None in owners or replies.keys() != content.keys():
            reason = "; ".join(sorted({fault.detail for fault in faults.values()}))
            raise HoldfastError(
                f"{self.app_config.method.name} needs a sample of each class from the sites: "
                f"{reason or 'a site did not answer'}"
            )
        dataset = self.federation.dataset
        rows = {}
        for node, reply in replies.items():
            spec = {"x": (dataset.x_test.dtype, (owners.count(node), *dataset.shape))}
            rows[node] = iter(tree_from_record(reply.content, "samples", spec)["x"])
        x = torch.stack([next(rows[owner]) for owner in owners if owner is not None]).to(self.device)
        return dataset.preprocess(x, dtype=self.data.dtype), self.data.y[torch.from_numpy(ids)]

    def sum_statistics(
        self, loop: RoundLoop, sent: Broadcast, jobs: Sequence[Job]
    ) -> tuple[Tree, int, list[Incident]]:
        """The sum of the clients' statistics under the final model, the number of clients, and the incidents."""
        assert isinstance(self.engine, FlowerEngine)
        if loop.secure is not None:
            return self.engine.sum_statistics(sent, jobs)
        return super().sum_statistics(loop, sent, jobs)

    def final_statistics(
        self, loop: RoundLoop, sent: Broadcast, jobs: Sequence[Job]
    ) -> Iterator[Tree | Incident]:
        """Each client's statistics under the final model, or the incident that prevents them."""
        assert isinstance(self.engine, FlowerEngine)
        return self.engine.statistics(sent, jobs)


def _schedule(app_config: AppConfig, stages: int) -> StageSchedule | None:
    """The schedule of a stream, such as ``every-n:10``; by default the stage changes every round."""
    if stages == 1:
        return None
    name, _, n = str(app_config.config.get("schedule") or "global-epochs").partition(":")
    described = {"name": name, "stages": stages} | ({"n": int(n)} if n.isdecimal() else {})
    return schedule_from(described)
