"""The server's side: the rounds of any run, with clients that are reached through Flower's grid."""

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
from holdfast.data.dataset import Dataset
from holdfast.data.schedules import StageSchedule, schedule_from
from holdfast.engine.base import Engine
from holdfast.engine.clients import Broadcast, DeviceData, Incident, Job
from holdfast.engine.rounds import RoundLoop
from holdfast.flower.app import AppConfig, FlowerApp
from holdfast.flower.engine import FlowerEngine
from holdfast.flower.messages import SAMPLES, record_of, tree_of
from holdfast.flower.nodes import Nodes
from holdfast.flower.population import Population
from holdfast.methods.base import Method, Tree
from holdfast.methods.context import RunContext
from holdfast.runs import RunDirectory
from holdfast.training.train import Training

WAIT_SECONDS = 600.0  # in which all clients must be there at the start
POPULATION = "flower.json"

_log = logging.getLogger("flwr")  # Flower shows what this says


def serve(app: FlowerApp, plan: AppConfig, grid: Grid) -> None:
    """Run the experiment, or go on with it where ``out`` already holds a part of it."""
    out = Path(str(plan.option("out"))).expanduser()
    resume = (out / "experiment.yaml").exists()
    if resume and RunDirectory.open(out).finished:
        _log.info("Holdfast: %s is finished; choose another out for another run", out)
        return
    dataset = app.server_data(plan.config)
    nodes = Nodes(grid, dataset)
    seconds = float(plan.option("wait", WAIT_SECONDS))
    if (out / POPULATION).exists():
        population = Population.load(out / POPULATION)
        nodes.wait_for(len(population.counts), plan.settings.min_clients, seconds)
    else:
        clients = int(plan.option("clients"))
        reports = nodes.wait_for(clients, clients, seconds)
        population = Population.gather(secrets.token_hex(16), reports)
        population.save(out / POPULATION)
    training = FlowerTraining(plan, nodes, population, dataset)
    training.run(training.describe(), out, resume, on_round=_report)
    _log.info("Holdfast: finished; see %s", out)


def _report(record: dict[str, Any]) -> None:
    accuracy = f", accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
    incidents = [f"client {i['client']}: {i['kind']}" for i in record["incidents"]]
    lost = f", incidents: {'; '.join(incidents)}" if incidents else ""
    clients = len(record["participants"])
    _log.info("Holdfast: round %s with %s clients%s%s", record["round"], clients, accuracy, lost)


class FlowerTraining(Training):
    """A run whose samples lie at the sites."""

    def __init__(self, plan: AppConfig, nodes: Nodes, population: Population, dataset: Dataset) -> None:
        self.plan, self.nodes, self.population = plan, nodes, population

        def engine(method: Method, context: RunContext, data: DeviceData) -> Engine:
            return FlowerEngine(plan, nodes, population, method, context, data)

        super().__init__(
            plan.method,
            plan.model(),
            population.federation(dataset, _schedule(plan, population.counts.shape[1])),
            plan.settings,
            engine=engine,
            precision=plan.described["precision"],
            batchnorm=plan.described["batchnorm"],
            classifier=plan.described["classifier"],
        )

    def reader(self) -> Callable[[np.ndarray], tuple[Tensor, Tensor]]:
        """What gives samples by id."""
        return self.read

    def read(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Samples by id: the server's own, or one of each class from the sites that allow it."""
        first = len(self.data.x)
        if ids.max(initial=-1) < first:
            return self.data.labelled(ids)
        wanted = [self.population.whereabouts(int(i) - first) for i in ids]
        self.nodes.look()
        owners = [self.nodes.of_client.get(one["client"]) for one in wanted]
        content: dict[int, dict[str, Any]] = {}
        for node in {node for node in owners if node is not None}:
            mine = [one for one, owner in zip(wanted, owners, strict=True) if owner == node]
            columns = {key: torch.tensor([one[key] for one in mine]) for key in mine[0]}
            content[node] = {"wanted": record_of(columns)}
        replies, faults = self.nodes.ask(SAMPLES, content, self.plan.settings.deadline)
        if None in owners or replies.keys() != content.keys():
            said = "; ".join(sorted({fault.detail for fault in faults.values()})) or "a site did not answer"
            raise HoldfastError(
                f"{self.plan.method.name} needs a sample of each class from the sites: {said}"
            )
        dataset = self.federation.dataset
        rows = {
            node: iter(
                tree_of(
                    reply.content,
                    "samples",
                    {"x": (dataset.x_test.dtype, (owners.count(node), *dataset.shape))},
                )["x"]
            )
            for node, reply in replies.items()
        }
        x = torch.stack([next(rows[owner]) for owner in owners if owner is not None]).to(self.device)
        return dataset.preprocess(x, dtype=self.data.dtype), self.data.y[torch.from_numpy(ids)]

    def survey(self, loop: RoundLoop, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[Tree | Incident]:
        """What each client says of the final model, or why it says nothing."""
        assert isinstance(self.engine, FlowerEngine)
        return self.engine.survey(sent, jobs)


def _schedule(plan: AppConfig, stages: int) -> StageSchedule | None:
    """The schedule of a stream, such as ``every-n:10``; each round the next stage by default."""
    if stages == 1:
        return None
    name, _, n = str(plan.config.get("schedule") or "global-epochs").partition(":")
    described = {"name": name, "stages": stages} | ({"n": int(n)} if n.isdecimal() else {})
    return schedule_from(described)
