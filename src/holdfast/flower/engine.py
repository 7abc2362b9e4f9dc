"""A round's clients, trained at their sites; every answer is checked before it counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Message, RecordDict

from holdfast.core.trees import leaves
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Incident, Job, on_device
from holdfast.engine.sequential import SequentialEngine
from holdfast.flower.app import AppConfig
from holdfast.flower.messages import SURVEY, TRAIN, FieldReader, RoundRequest, record_of, tree_of
from holdfast.flower.nodes import Nodes
from holdfast.flower.population import Population, in_a_line
from holdfast.flower.site import exchanged, uploaded
from holdfast.flower.wire import Form, WireError, form_of
from holdfast.methods.base import Method, Tree
from holdfast.methods.context import RunContext

ATTEMPTS = 3  # how often clients are asked before a round is given up
PAUSE_SECONDS = 5.0  # between two attempts

Answer = TypeVar("Answer")
Reader = Callable[[Job, Broadcast, RecordDict], Iterator[Answer | Incident]]
"""Takes a client's part out of its site's reply; `WireError` where that is not as it must be."""

_log = logging.getLogger("flwr")  # Flower shows what this says


class FlowerEngine:
    """Trains the clients of a round at their sites."""

    name = "flower"
    group = 1

    def __init__(
        self,
        plan: AppConfig,
        nodes: Nodes,
        population: Population,
        method: Method,
        context: RunContext,
        data: DeviceData,
    ) -> None:
        self.plan, self.nodes, self.population = plan, nodes, population
        self.method, self.context, self.data = method, context, data
        self.forms: dict[tuple[str, int], Form] = {}  # of what a client must send, by message and samples

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult | Incident]:
        """Train each client; results come in the order of ``jobs``."""
        return self._answers(TRAIN, sent, jobs, self._result)

    def survey(self, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[Tree | Incident]:
        """What each client says of the final model, in the order of ``jobs``."""
        return self._answers(SURVEY, sent, jobs, self._said)

    def _answers(
        self, kind: str, sent: Broadcast, jobs: Sequence[Job], read: Reader[Answer]
    ) -> Iterator[Answer | Incident]:
        """Where too few answer, as when the network is cut for a while, the others are asked again."""
        told: dict[int, list[Answer | Incident]] = {job.client: [] for job in jobs}
        left = list(jobs)
        for attempt in range(ATTEMPTS):
            if attempt:
                _log.warning("Holdfast: too few clients answered round %s; asking again", sent.round)
                time.sleep(PAUSE_SECONDS)
            replies, faults = self._ask(kind, sent, left)
            for job in left:
                told[job.client] += self._answer(job, sent, replies, faults, read)
            left = [job for job in jobs if all(isinstance(one, Incident) for one in told[job.client])]
            if len(jobs) - len(left) >= min(self.plan.settings.min_clients, len(jobs)):
                break
        for job in jobs:
            yield from told[job.client]

    def _answer(
        self,
        job: Job,
        sent: Broadcast,
        replies: Mapping[int, Message],
        faults: Mapping[int, Incident],
        read: Reader[Answer],
    ) -> Iterator[Answer | Incident]:
        """A client's part of its site's reply, or what is wrong with it."""
        client, node = job.client, self.nodes.of_client.get(job.client)
        if node is None:
            yield Incident(client, "offline", "no node serves it now")
            return
        fault = faults.get(node)
        if fault is not None:
            yield replace(fault, client=client)
        if node in replies:
            try:
                yield from read(job, sent, replies[node].content)
            except WireError as error:
                yield Incident(client, error.kind, str(error))
        elif fault is None:
            seconds = self.plan.settings.deadline
            yield Incident(client, "late", "" if seconds is None else f"after {seconds:g} s")

    def _ask(
        self, kind: str, sent: Broadcast, jobs: Sequence[Job]
    ) -> tuple[dict[int, Message], dict[int, Incident]]:
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
        model = {"params": sent.params, "buffers": sent.buffers}
        return exchanged(model, self.method, self.context, self.plan) | {"payload": sent.payload}

    def _orders(self, sent: Broadcast, jobs: Sequence[Job]) -> RoundRequest:
        counts = self.population.counts
        return RoundRequest(
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

    def _expected(self, kind: str, sent: Broadcast, job: Job) -> Form:
        """What this client must send, seen by asking one with a blank sample or two here.

        All clients send the same, unless each gets something else.
        """
        samples = min(2, len(job.ids))
        if (kind, samples) in self.forms and not job.payload:
            return self.forms[kind, samples]
        ids = np.arange(len(self.data.x) - samples, len(self.data.x))
        blank = Job(job.client, ids, job.stage, job.payload)
        engine = SequentialEngine(self.method, self.context, self.data, self.plan.settings)
        if kind == SURVEY:
            told = engine.side.survey(blank, sent)
        else:
            told = uploaded(next(engine.train(sent, [blank])), self.method, self.context, self.plan)
        self.forms[kind, samples] = form_of(told)
        return self.forms[kind, samples]

    def _tree(self, kind: str, sent: Broadcast, job: Job, content: RecordDict) -> Tree:
        """The tensors that a client sent."""
        client = job.client
        if f"failed {client}" in content:
            raise WireError("failed", in_a_line(FieldReader(content, f"failed {client}").text("detail")))
        tree = tree_of(content, f"client {client}", self._expected(kind, sent, job))
        return on_device(tree, self.context.device)

    def _said(self, job: Job, sent: Broadcast, content: RecordDict) -> Iterator[Tree]:
        said = self._tree(SURVEY, sent, job, content)
        if not all(torch.isfinite(value).all() for _, value in leaves(said)):
            raise WireError("not finite", "what it says of the final model is not all numbers")
        yield said

    def _result(self, job: Job, sent: Broadcast, content: RecordDict) -> Iterator[ClientResult | Incident]:
        tree = self._tree(TRAIN, sent, job, content)
        facts = FieldReader(content, f"result {job.client}")
        if facts.whole("round") != sent.round:
            raise WireError("wrong round", f"it answers round {facts.whole('round')}")
        if facts.whole("memory-lost", 0, 1):
            yield Incident(job.client, "memory lost", "it started afresh")
        shared = sent.params | tree.get("params", {})
        samples = facts.whole("samples", 1, len(job.ids))
        weight = facts.number("weight")
        if not 0 < weight <= len(job.ids):
            raise WireError("wrong values", f"its weight is {weight:g}, and it has {len(job.ids)} samples")
        label_counts = facts.wholes("label-counts", self.context.num_classes)
        if sum(label_counts) != samples:
            raise WireError("wrong values", f"its label counts do not add up to {samples}")
        params = {name: tree["local"][name] for name in shared} if "local" in tree else shared
        numbers = [v.sum() for _, v in leaves({"a": shared, "b": params}) if v.is_floating_point()]
        yield ClientResult(
            client=job.client,
            samples=samples,
            label_counts=np.array(label_counts),
            weight=weight,
            params=params,
            buffers=sent.buffers | tree.get("buffers", {}),
            shared=shared,
            sums=tree.get("sums", {}),
            # What it remembers stays at its site (or is a copy for tests); the server keeps from which round it is.
            memory=tree.get("memory", {})
            | ({"round": torch.tensor(sent.round)} if facts.whole("remembers", 0, 1) else {}),
            loss=facts.number("loss"),
            finite=bool(torch.isfinite(torch.stack(numbers).sum())),
        )
