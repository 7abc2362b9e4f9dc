"""The server's side: the rounds of any run, with clients that are reached through Flower's grid."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from holdfast.data.dataset import Dataset
from holdfast.data.schedules import StageSchedule, schedule_from
from holdfast.engine.flower.app import FlowerApp, Plan
from holdfast.engine.flower.messages import (
    DESCRIBE,
    SAMPLES,
    SURVEY,
    TRAIN,
    Facts,
    Orders,
    message,
    record_of,
    tree_of,
)
from holdfast.engine.flower.population import Population, SiteReport, describe_clients, plain
from holdfast.engine.flower.site import memory_travels, travels, uploaded
from holdfast.engine.local import Broadcast, DeviceData, Incident, Job, Result, on_device
from holdfast.engine.loop import Engine, Loop
from holdfast.engine.sequential import Sequential
from holdfast.engine.trees import leaves
from holdfast.engine.wire import Form, WireError, form_of
from holdfast.errors import HoldfastError
from holdfast.methods.base import Method, Tree
from holdfast.methods.context import Task
from holdfast.runs import RunDirectory
from holdfast.training import Training

LOOK_SECONDS = 60.0  # in which a node must say who it is
WAIT_SECONDS = 600.0  # in which all clients must be there at the start
ATTEMPTS, PAUSE_SECONDS = (
    3,
    5.0,
)  # how often clients are asked before a round is given up, and the time between
POPULATION = "flower.json"

_log = logging.getLogger("flwr")  # Flower shows what this says


def serve(app: FlowerApp, plan: Plan, grid: Grid) -> None:
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


def first_line(error: Exception) -> str:
    """The first line of an error of Flower's transport, which says the most."""
    return str(error).partition("\n")[0][:500] or type(error).__name__


def _report(record: dict[str, Any]) -> None:
    accuracy = f", accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
    incidents = [f"client {i['client']}: {i['kind']}" for i in record["incidents"]]
    lost = f", incidents: {'; '.join(incidents)}" if incidents else ""
    clients = len(record["participants"])
    _log.info("Holdfast: round %s with %s clients%s%s", record["round"], clients, accuracy, lost)


class Nodes:
    """Which node serves which clients; a node is asked when it first appears."""

    def __init__(self, grid: Grid, dataset: Dataset) -> None:
        self.grid, self.dataset = grid, dataset
        self.reports: dict[int, SiteReport] = {}  # by node, the newest last
        self.of_client: dict[int, int] = {}

    def look(self, seconds: float = LOOK_SECONDS) -> None:
        """See who has come and who has gone; where Flower does not say, all is as it was."""
        try:
            online = set(self.grid.get_node_ids())
            strangers = sorted(online - self.reports.keys())
            asked = [message(DESCRIBE, node, {}, ttl=seconds) for node in strangers]
            replies = list(self.grid.send_and_receive(asked, timeout=seconds)) if asked else []
        except httpx.HTTPError as error:
            _log.warning("Holdfast: the SuperLink does not answer: %s", first_line(error))
            return
        self.reports = {node: report for node, report in self.reports.items() if node in online}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _log.warning("Holdfast: node %s: %s", node, plain(reply.error.reason))
                continue
            try:
                report = SiteReport.read(reply, self.dataset.num_classes)
            except WireError as error:
                _log.warning("Holdfast: node %s says what makes no sense: %s", node, error)
                continue
            self._check(report)
            self.reports[node] = report
        self.of_client = {client: node for node, report in self.reports.items() for client in report.clients}

    def _check(self, report: SiteReport) -> None:
        """A site's samples must look like the server's."""
        who = f"the site of client {describe_clients(report.clients)}"
        if report.shape != list(self.dataset.shape):
            raise HoldfastError(
                f"{who} has samples of shape {report.shape}, the server of {list(self.dataset.shape)}"
            )
        if report.preprocess != json.dumps(asdict(self.dataset.preprocess), sort_keys=True):
            raise HoldfastError(f"{who} preprocesses samples otherwise than the server: {report.preprocess}")

    def wait_for(self, clients: int, fewest: int, seconds: float) -> dict[int, SiteReport]:
        """Wait until ``fewest`` of the clients 0 to ``clients`` - 1 are there; give their sites' reports."""
        ends = time.monotonic() + seconds
        while True:
            self.look()
            there = [k for k in range(clients) if k in self.of_client]
            if len(there) >= fewest:
                break
            if time.monotonic() >= ends:
                missing = describe_clients([k for k in range(clients) if k not in self.of_client])
                raise HoldfastError(
                    f"after {seconds:g} s client {missing} of {clients} is not there; start its SuperNode, with "
                    "a partition-id of its own, or lower clients"
                )
            time.sleep(1)
        served = [client for report in self.reports.values() for client in report.clients]
        twice = [k for k in there if served.count(k) > 1]
        if twice and fewest == clients:
            raise HoldfastError(
                f"client {describe_clients(twice)} is at two nodes; give each SuperNode a partition-id of its own"
            )
        return {client: self.reports[self.of_client[client]] for client in there}

    def ask(
        self, kind: str, content: Mapping[int, Mapping[str, Any]], seconds: float | None = None
    ) -> tuple[dict[int, Message], dict[int, Incident]]:
        """Send each node its records and wait for the replies: those that came, and what is known of the others."""
        sent = {node: message(kind, node, records, ttl=seconds) for node, records in content.items()}
        replies, faults = {}, {}  # type: dict[int, Message], dict[int, Incident]
        try:
            received = list(self.grid.send_and_receive(list(sent.values()), timeout=seconds)) if sent else []
        except httpx.HTTPError as error:  # an overloaded SuperLink refuses single calls
            return {}, {node: Incident(-1, "not reached", first_line(error)) for node in sent}
        node_of = {one.metadata.message_id: node for node, one in sent.items()}
        for reply in received:
            # A reply that Flower makes up for a dead node does not name it.
            node = node_of.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if node not in sent:
                continue
            if reply.has_error():
                code, reason = reply.error.code, plain(reply.error.reason)
                faults[node] = Incident(-1, ERRORS.get(code, "failed"), reason)
            elif node in replies:
                faults[node] = Incident(-1, "answered twice", "the first answer counts")
            else:
                replies[node] = reply
        return replies, faults


ERRORS = {2: "failed", 5: "site lost", 8: "site crashed"}
"""Flower's error codes in a word."""


class FlowerEngine:
    """Trains the clients of a round at their sites."""

    name = "flower"
    group = 1

    def __init__(
        self, plan: Plan, nodes: Nodes, population: Population, method: Method, task: Task, data: DeviceData
    ) -> None:
        self.plan, self.nodes, self.population = plan, nodes, population
        self.method, self.task, self.data = method, task, data
        self.forms: dict[int, Form] = {}  # of what a client must send

    def train(self, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[Result | Incident]:
        """Train each client; results come in the order of ``jobs``.

        Where too few answer, as when the network is cut for a while, the others are asked again.
        """
        told: dict[int, list[Result | Incident]] = {job.client: [] for job in jobs}
        left = list(jobs)
        for attempt in range(ATTEMPTS):
            if attempt:
                _log.warning("Holdfast: too few clients answered round %s; asking again", sent.round)
                time.sleep(PAUSE_SECONDS)
            replies, faults = self.ask(TRAIN, sent, left)
            for job in left:
                told[job.client] += self._answer(job, sent, replies, faults)
            left = [job for job in jobs if not any(isinstance(one, Result) for one in told[job.client])]
            if len(jobs) - len(left) >= min(self.plan.settings.min_clients, len(jobs)):
                break
        for job in jobs:
            yield from told[job.client]

    def _answer(
        self, job: Job, sent: Broadcast, replies: Mapping[int, Message], faults: Mapping[int, Incident]
    ) -> Iterator[Result | Incident]:
        node = self.nodes.of_client.get(job.client)
        if node is None:
            yield Incident(job.client, "offline", "no node serves it now")
            return
        fault = faults.get(node)
        if fault is not None:
            yield replace(fault, client=job.client)
        if node in replies:
            yield from self._result(job, sent, replies[node])
        elif fault is None:
            seconds = self.plan.settings.deadline
            yield Incident(job.client, "late", "" if seconds is None else f"after {seconds:g} s")

    def ask(self, kind: str, sent: Broadcast, jobs: Sequence[Job]) -> Any:
        """One message to each node that serves any of these clients."""
        self.nodes.look()
        model = record_of(self._outgoing(sent))
        of_node: dict[int, list[Job]] = {}
        for job in jobs:
            if job.client in self.nodes.of_client:
                of_node.setdefault(self.nodes.of_client[job.client], []).append(job)
        content: dict[int, dict[str, Any]] = {}
        for node, own in of_node.items():
            content[node] = {"sent": model, "orders": self._orders(sent, own).record()}
            content[node] |= {f"own {job.client}": record_of(job.payload) for job in own if job.payload}
        return self.nodes.ask(kind, content, self.plan.settings.deadline)

    def _outgoing(self, sent: Broadcast) -> Tree:
        names = travels(self.method, self.task, self.plan)
        params = {name: sent.params[name] for name in names}
        return {"params": params, "buffers": sent.buffers, "payload": sent.payload}

    def _orders(self, sent: Broadcast, jobs: Sequence[Job]) -> Orders:
        counts = self.population.counts
        return Orders(
            run=self.population.run,
            round=sent.round,
            stage=jobs[0].stage,
            clients=[job.client for job in jobs],
            remembers=[0 if job.memory is None else int(job.memory["round"]) for job in jobs],
            num_clients=len(counts),
            class_counts=counts.sum((0, 1)).tolist(),
            bounds=self.population.ends(self.nodes.dataset),
            stages=counts.shape[1],
        )

    def _expected(self, sent: Broadcast, job: Job) -> Form:
        """What this client must send, seen by training one with a blank sample or two here.

        All clients send the same, unless each gets something else.
        """
        samples = min(2, len(job.ids))
        if samples in self.forms and not job.payload:
            return self.forms[samples]
        blank = np.arange(len(self.data.x) - samples, len(self.data.x))
        engine = Sequential(self.method, self.task, self.data, self.plan.settings)
        result = next(engine.train(sent, [Job(job.client, blank, job.stage, job.payload)]))
        told = form_of(uploaded(result, self.method, self.task, self.plan))
        self.forms[samples] = {path: form for path, form in told.items() if not path.startswith("memory/")}
        return self.forms[samples]

    def _result(self, job: Job, sent: Broadcast, reply: Message) -> Iterator[Result | Incident]:
        """A client's part of its site's reply, or what is wrong with it."""
        client, content = job.client, reply.content
        try:
            if f"failed {client}" in content:
                detail = Facts(content, f"failed {client}").text("detail")
                yield Incident(client, "failed", plain(detail))
                return
            facts = Facts(content, f"result {client}")
            if facts.whole("round") != sent.round:
                raise WireError("wrong round", f"it answers round {facts.whole('round')}")
            if facts.whole("memory-lost", 0, 1):
                yield Incident(client, "memory lost", "it started afresh")
            yield self._checked(job, sent, facts, content)
        except WireError as error:
            yield Incident(client, error.kind, str(error))

    def _checked(self, job: Job, sent: Broadcast, facts: Facts, content: Any) -> Result:
        form = self._expected(sent, job)
        # What it remembers stays at its site (or is a copy for tests); the server keeps from which round it is.
        free = "memory" if memory_travels(self.method, self.task, self.plan) else None
        tree = on_device(tree_of(content, f"client {job.client}", form, free), self.task.device)
        memory = tree.get("memory", {})
        shared = sent.params | tree.get("params", {})
        samples = facts.whole("samples", 1, len(job.ids))
        weight = facts.number("weight")
        if not 0 < weight <= len(job.ids):
            raise WireError("wrong values", f"its weight is {weight:g}, and it has {len(job.ids)} samples")
        label_counts = np.array(facts.wholes("label-counts", self.task.num_classes))
        if label_counts.sum() != samples:
            raise WireError("wrong values", f"its label counts do not add up to {samples}")
        params = {name: tree["local"][name] for name in shared} if "local" in tree else shared
        numbers = [v.sum() for _, v in leaves({"a": shared, "b": params}) if v.is_floating_point()]
        return Result(
            client=job.client,
            samples=samples,
            label_counts=label_counts,
            weight=weight,
            params=params,
            buffers=tree.get("buffers", {}),
            shared=shared,
            sums=tree.get("sums", {}),
            memory=memory | ({"round": torch.tensor(sent.round)} if facts.whole("remembers", 0, 1) else {}),
            loss=facts.number("loss"),
            finite=bool(torch.isfinite(torch.stack(numbers).sum())),
        )


class FlowerTraining(Training):
    """A run whose samples lie at the sites."""

    def __init__(self, plan: Plan, nodes: Nodes, population: Population, dataset: Dataset) -> None:
        self.plan, self.nodes, self.population = plan, nodes, population

        def engine(method: Method, task: Task, data: DeviceData) -> Engine:
            return FlowerEngine(plan, nodes, population, method, task, data)

        super().__init__(
            plan.method,
            plan.model(),
            population.federation(dataset, _schedule(plan, population.counts.shape[1])),
            plan.settings,
            engine=engine,
            precision=plan.described["precision"],
            norm=plan.described["norm"],
            classifier=plan.described["classifier"],
        )

    def read(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Samples by id: the server's own, or one of each class from the sites that allow it."""
        first = len(self.data.x)
        if ids.max(initial=-1) < first:
            return super().read(ids)
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

    def survey(self, loop: Loop, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[Tree]:
        """What each client says of the final model; one that cannot be reached is left out."""
        assert isinstance(self.engine, FlowerEngine)
        replies, _ = self.engine.ask(SURVEY, sent, jobs)
        form: Form | None = None
        for job in jobs:
            reply = replies.get(self.nodes.of_client.get(job.client, -1))
            try:
                said = {} if reply is None else tree_of(reply.content, f"client {job.client}", form)
            except WireError as error:
                _log.warning("Holdfast: what client %s says of the model is left out: %s", job.client, error)
                continue
            if said:
                form = form or form_of(said)
                yield on_device(said, self.device)


def _schedule(plan: Plan, stages: int) -> StageSchedule | None:
    """The schedule of a stream, such as ``every-n:10``; each round the next stage by default."""
    if stages == 1:
        return None
    name, _, n = str(plan.config.get("schedule") or "global-epochs").partition(":")
    described = {"name": name, "stages": stages} | ({"n": int(n)} if n.isdecimal() else {})
    return schedule_from(described)
