"""The Flower engine: trains a round's clients at their sites and validates every reply."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tensors, Tree, leaves, to_device
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Incident, Job
from holdfast.engine.secure_sums import SecureSums, decoded_tree, encoded_tree
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.uploads import received
from holdfast.engine.validation import metric_names
from holdfast.flower.app import AppConfig
from holdfast.flower.messages import (
    EVALUATE,
    STATISTICS,
    STATISTICS_MASKED,
    TRAIN,
    TRAIN_MASKED,
    ConfigReader,
    RoundRequest,
    digest_of,
    tree_from_record,
    tree_to_record,
)
from holdfast.flower.nodes import Nodes
from holdfast.flower.population import Population
from holdfast.flower.secure_round import SecureRound, TooFew
from holdfast.flower.site import (
    build_upload,
    compressed_upload,
    exchanged_params,
    exchanged_tensors,
)
from holdfast.flower.wire import TreeSpec, WireError, spec_of
from holdfast.methods.base import Method
from holdfast.methods.context import RunContext
from holdfast.metrics.by_task import Metric, metrics_of
from holdfast.updates.compression import parse_compression
from holdfast.updates.secure import FixedPoint, Layout, parse_secure

MAX_ATTEMPTS = 3  # attempts to get enough replies for a round
PAUSE_SECONDS = 5.0  # between two attempts

Result = TypeVar("Result")
Reader = Callable[[Job, Broadcast, RecordDict], Iterator[Result | Incident]]
"""Reads a client's part of its site's reply; an invalid one raises a `WireError`."""

_log = logging.getLogger("flwr")  # the logger whose records Flower displays


class FlowerEngine:
    """Trains the clients of a round at their sites."""

    name = "flower"
    group = 1

    def __init__(
        self,
        app_config: AppConfig,
        nodes: Nodes,
        population: Population,
        method: Method,
        context: RunContext,
        data: DeviceData,
        metrics: Sequence[Metric],
    ) -> None:
        """``metrics`` are those that are recorded of what clients measure on their validation samples."""
        self.app_config, self.nodes, self.population = app_config, nodes, population
        self.method, self.context, self.data = method, context, data
        secure = app_config.settings.secure
        self.secure = None if secure is None else parse_secure(secure)
        wanted = metrics_of(context.task, app_config.described["metrics"])
        self.measured = metric_names(context.task, wanted)  # what a client sends
        self.recorded = metric_names(context.task, metrics)
        self._specs: dict[tuple[str, int], TreeSpec] = {}  # of clients' tensors, by message kind and samples

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult | Incident]:
        """Train each client; results come in the order of ``jobs``."""
        return self._collect(TRAIN, sent, jobs, self._read_result)

    def statistics(self, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[Tree | Incident]:
        """Each client's statistics under the final model, in the order of ``jobs``."""
        return self._collect(STATISTICS, sent, jobs, self._read_statistics)

    def evaluate(
        self, sent: Broadcast, jobs: Sequence[Job]
    ) -> Iterator[tuple[int, dict[str, float]] | Incident]:
        """Each client with its metrics of the model on its validation samples."""

        def read(job: Job, sent: Broadcast, content: RecordDict) -> Iterator[tuple[int, dict[str, float]]]:
            fields = self._fields(job, sent, content, f"metrics {job.client}")
            yield job.client, self._metrics(fields, "values")

        return self._collect(EVALUATE, sent, jobs, read)

    def _collect(
        self, kind: str, sent: Broadcast, jobs: Sequence[Job], read: Reader[Result]
    ) -> Iterator[Result | Incident]:
        """Send the request and read the replies; repeat it if there are too few valid replies."""
        collected: dict[int, list[Result | Incident]] = {job.client: [] for job in jobs}
        missing = list(jobs)
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                _log.warning("Holdfast: too few clients answered round %s; asking again", sent.round)
                time.sleep(PAUSE_SECONDS)
            replies, faults = self._request(kind, sent, missing)
            for job in missing:
                collected[job.client] += self._read_reply(job, sent, replies, faults, read)
            missing = [job for job in jobs if all(isinstance(one, Incident) for one in collected[job.client])]
            if len(jobs) - len(missing) >= min(self.app_config.settings.min_clients, len(jobs)):
                break
        for job in jobs:
            yield from collected[job.client]

    # Under secure aggregation ---------------------------------------------------------------------------

    def train_masked(
        self, sent: Broadcast, jobs: Sequence[Job], sums: SecureSums
    ) -> Iterator[ClientResult | Incident]:
        """Train each client and give ``sums`` the sum of their uploads; the results have no tensors."""
        upload, settings = sums.upload, self.app_config.settings
        fields: dict[str, Any] = {"unit": upload.unit}
        if upload.noise is not None:
            fields["noise"] = [float(value) for value in astuple(upload.noise)]
        layout = upload.layout(self._dummy_result(sent, jobs[0]))

        def read(job: Job, content: RecordDict) -> Iterator[ClientResult | Incident]:
            values = self._fields(job, sent, content, f"result {job.client}")
            if values.integer("memory-lost", 0, 1):
                yield Incident(job.client, "memory lost", "it started without a memory")
            yield ClientResult(
                client=job.client,
                samples=values.integer("samples", 1, len(job.ids)),
                weight=math.nan,
                label_counts=np.zeros(self.context.num_classes, np.int64),
                params={},
                buffers={},
                shared={},
                sums={},
                loss=math.nan,
                finite=True,
                **self._remembered(values, {}, sent),
                digest=digest_of(content, job.client),
            )

        total, results, incidents = self._secure_sum(
            TRAIN_MASKED, sent, jobs, layout, upload.grid, len(sums.masked.seats), fields, read
        )
        sums.set_total(total, layout, len(results))
        loss = sums.mean_loss(sum(result.samples for result in results))
        if loss is None or settings.dp_samples is not None:
            loss = math.nan
        yield from incidents
        yield from (replace(result, loss=loss) for result in results)

    def sum_statistics(self, sent: Broadcast, jobs: Sequence[Job]) -> tuple[Tree, int, list[Incident]]:
        """The sum of the clients' statistics under the final model, the number of clients, and the incidents."""
        assert self.secure is not None
        grid = self.secure.grid(len(jobs))
        dummy = replace(jobs[0], ids=self._dummy_ids(jobs[0]))
        engine = SequentialEngine(self.method, self.context, self.data, self.app_config.settings)
        layout, _ = encoded_tree(engine.runner.final_statistics(dummy, sent), grid)

        def read(job: Job, content: RecordDict) -> Iterator[int]:
            yield job.client

        total, clients, incidents = self._secure_sum(
            STATISTICS_MASKED, sent, jobs, layout, grid, len(jobs), {}, read
        )
        return decoded_tree(total, layout, grid), len(clients), incidents

    def _secure_sum(
        self,
        kind: str,
        sent: Broadcast,
        jobs: Sequence[Job],
        layout: Layout,
        grid: FixedPoint,
        seats: int,
        fields: Mapping[str, Any],
        read: Callable[[Job, RecordDict], Iterator[Result | Incident]],
    ) -> tuple[Tensor, list[Result], list[Incident]]:
        """The sum of the clients' vectors, their other values in the order of ``jobs``, and the incidents.

        If too few clients remain, the sum is repeated with new keys.
        """
        assert self.secure is not None
        of_client, incidents = {job.client: job for job in jobs}, list[Incident]()

        def content(clients: Sequence[int]) -> dict[int, dict[str, Any]]:
            requests = self.round_content(sent, [of_client[client] for client in clients])
            return {
                node: {**records, "secure": ConfigRecord(dict(fields))} for node, records in requests.items()
            }

        def read_one(client: int, reply: RecordDict) -> Iterator[Result | Incident]:
            return read(of_client[client], reply)

        length = sum(math.prod(shape) for shape, _ in layout.values())
        for attempt in count(1):
            deadline = self.app_config.settings.deadline
            one = SecureRound(self.nodes, self.secure, grid, sent.round, seats, deadline)
            try:
                total, found = one.sum(list(of_client), kind, content, length, read_one)
                break
            except TooFew:
                incidents += one.incidents
                if attempt == MAX_ATTEMPTS:
                    raise
            _log.warning("Holdfast: too few clients answered round %s; asking again", sent.round)
            time.sleep(PAUSE_SECONDS)
        return total, [found[k] for k in of_client if k in found], incidents + one.incidents

    # Messages -------------------------------------------------------------------------------------------

    def _request(
        self, kind: str, sent: Broadcast, jobs: Sequence[Job]
    ) -> tuple[dict[int, Message], dict[int, Incident]]:
        """Send one message to each node with clients among ``jobs``."""
        self.nodes.refresh()
        content = self.round_content(sent, jobs)
        return self.nodes.request(kind, content, self.app_config.settings.deadline)

    def round_content(self, sent: Broadcast, jobs: Sequence[Job]) -> dict[int, dict[str, Any]]:
        """The records of a round for each node with clients among ``jobs``."""
        model = {"params": sent.params, "buffers": sent.buffers}
        exchanged = exchanged_tensors(model, self.method, self.context, self.app_config)
        broadcast = tree_to_record(exchanged | {"payload": sent.payload})
        jobs_of_node: dict[int, list[Job]] = {}
        for job in jobs:
            if job.client in self.nodes.of_client:
                jobs_of_node.setdefault(self.nodes.of_client[job.client], []).append(job)
        content: dict[int, dict[str, Any]] = {}
        for node, node_jobs in jobs_of_node.items():
            request = self._round_request(sent, node_jobs).to_record()
            payloads = {
                f"payload {job.client}": tree_to_record(job.payload) for job in node_jobs if job.payload
            }
            content[node] = {"broadcast": broadcast, "request": request, **payloads}
        return content

    def _round_request(self, sent: Broadcast, jobs: Sequence[Job]) -> RoundRequest:
        counts = self.population.counts
        # Under differential privacy and secure aggregation, sites do not receive the others' label counts.
        withheld = self.app_config.settings.withholds_counts
        class_counts = np.zeros(counts.shape[2], np.int64) if withheld else counts.sum((0, 1))
        return RoundRequest(
            run=self.population.run,
            round=sent.round,
            stage=jobs[0].stage,
            clients=[job.client for job in jobs],
            memory_rounds=[0 if job.client_state is None else int(job.client_state["round"]) for job in jobs],
            num_clients=len(counts),
            class_counts=class_counts.tolist(),
            bounds=self.population.value_bounds(self.nodes.dataset),
            stages=counts.shape[1],
            noise_multipliers=[job.noise_multiplier for job in jobs],
        )

    def _read_reply(
        self,
        job: Job,
        sent: Broadcast,
        replies: Mapping[int, Message],
        faults: Mapping[int, Incident],
        read: Reader[Result],
    ) -> Iterator[Result | Incident]:
        """A client's part of its site's reply, or the incident that prevents it."""
        seconds = self.app_config.settings.deadline
        return self.nodes.read_reply(
            job.client, replies, faults, lambda content: read(job, sent, content), seconds
        )

    def _fields(self, job: Job, sent: Broadcast, content: RecordDict, name: str) -> ConfigReader:
        """The values that a client sent in a record of this name; of another round they raise a `WireError`."""
        fields = ConfigReader(content, name)
        if fields.integer("round") != sent.round:
            raise WireError("wrong round", f"it answers round {fields.integer('round')}")
        return fields

    def _read_tree(self, kind: str, sent: Broadcast, job: Job, content: RecordDict) -> Tree:
        """The tensors that a client sent."""
        tree = tree_from_record(content, f"client {job.client}", self._expected_spec(kind, sent, job))
        return to_device(tree, self.context.device)

    def _expected_spec(self, kind: str, sent: Broadcast, job: Job) -> TreeSpec:
        """The spec of the tensors that this client must send, from a run on the server with one or two dummy samples.

        It is the same for all clients without an individual payload.
        """
        ids = self._dummy_ids(job)
        samples = len(ids)
        if (kind, samples) in self._specs and not job.payload:
            return self._specs[kind, samples]
        if kind == STATISTICS:
            engine = SequentialEngine(self.method, self.context, self.data, self.app_config.settings)
            tree = engine.runner.final_statistics(Job(job.client, ids, job.stage, job.payload), sent)
        else:
            result = self._dummy_result(sent, job)
            result, compressed = compressed_upload(
                result, self.method, self.context, self.app_config, sent, None
            )
            tree = build_upload(result, self.method, self.context, self.app_config, compressed)
        self._specs[kind, samples] = spec_of(tree)
        return self._specs[kind, samples]

    def _dummy_ids(self, job: Job) -> np.ndarray:
        """One or two of the server's samples, as dummies for a client's samples."""
        return np.arange(len(self.data.x) - min(2, len(job.ids)), len(self.data.x))

    def _dummy_result(self, sent: Broadcast, job: Job) -> ClientResult:
        """A client's result on dummy samples."""
        engine = SequentialEngine(self.method, self.context, self.data, self.app_config.settings)
        dummy = Job(job.client, self._dummy_ids(job), job.stage, job.payload)
        return next(engine.train(sent, [dummy]))

    def _read_statistics(self, job: Job, sent: Broadcast, content: RecordDict) -> Iterator[Tree]:
        tree = self._read_tree(STATISTICS, sent, job, content)
        if not all(torch.isfinite(value).all() for _, value in leaves(tree)):
            raise WireError("not finite", "its statistics of the final model are not all finite numbers")
        yield tree

    def _decompressed(self, tree: Tree, sent: Broadcast) -> Tensors:
        """The parameters that a client sent compressed."""
        compress = self.app_config.settings.compress
        if compress is None:
            return {}
        before = exchanged_params(sent.params, self.method, self.context)
        try:
            return received(tree["compressed"], parse_compression(compress), before)
        except HoldfastError as error:
            raise WireError("wrong values", str(error)) from error

    def _read_result(
        self, job: Job, sent: Broadcast, content: RecordDict
    ) -> Iterator[ClientResult | Incident]:
        tree = self._read_tree(TRAIN, sent, job, content)
        fields = self._fields(job, sent, content, f"result {job.client}")
        if fields.integer("memory-lost", 0, 1):
            yield Incident(job.client, "memory lost", "it started without a memory")
        shared = sent.params | tree.get("params", {}) | self._decompressed(tree, sent)
        samples = fields.integer("samples", 1, len(job.ids))
        weight = fields.number("weight")
        if not 0 < weight <= len(job.ids):
            raise WireError("wrong values", f"its weight is {weight:g}, but it has {len(job.ids)} samples")
        label_counts = fields.integers("label-counts", self.context.num_classes)
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
            loss=math.nan if self.app_config.settings.dp_samples is not None else fields.number("loss"),
            finite=bool(torch.isfinite(torch.stack(numbers).sum())),
            **self._remembered(fields, tree.get("memory", {}), sent),
            digest=digest_of(content, job.client),
        )

    def _remembered(self, fields: ConfigReader, memory: Tree, sent: Broadcast) -> dict[str, Any]:
        """The values that a client sends in addition to its upload."""
        # The state itself stays at the site, except for tests of local models; the server stores its round.
        if fields.integer("has-memory", 0, 1):
            memory = memory | {"round": torch.tensor(sent.round)}
        return {
            "client_state": memory,
            "protected_rounds": fields.integer("protected-rounds"),
            "validation": self._metrics(fields, "validation") if fields.has("validation") else None,
        }

    def _metrics(self, fields: ConfigReader, key: str) -> dict[str, float]:
        """The recorded metrics among those that a client sent under a key."""
        values = dict(zip(self.measured, fields.numbers(key, len(self.measured)), strict=True))
        return {name: values[name] for name in self.recorded}
