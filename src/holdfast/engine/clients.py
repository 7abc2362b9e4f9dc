"""Preparation and completion of a client's local training, common to all engines."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.core.trees import clone, tensors_only, to_device
from holdfast.data.preprocess import Preprocess
from holdfast.engine.batching import BatchPlan, plan_batches, plan_private_batches
from holdfast.engine.local_optimizer import former_state
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.context import Client, RunContext
from holdfast.models.network import Output
from holdfast.updates.noise import gaussian
from holdfast.updates.sample_privacy import parse_dp_samples
from holdfast.updates.withheld import WithheldClient

PREPROCESSED_BYTES = 256 * 2**20  # up to this size, samples are preprocessed once and stored


@dataclass(frozen=True, eq=False)
class DeviceData:
    """The training samples on the device, as stored (images in uint8)."""

    x: Tensor
    y: Tensor
    labels: np.ndarray  # strata, on the host
    targets: np.ndarray  # y on the host
    preprocess: Preprocess
    dtype: torch.dtype

    def read(self, ids: np.ndarray) -> Tensor:
        """Preprocessed samples by id, without augmentation."""
        # index_select copies rows several times faster than x[ids] on a CPU.
        return self.preprocess(
            self.x.index_select(0, torch.from_numpy(ids).to(self.x.device)), dtype=self.dtype
        )

    def preprocessed(self) -> DeviceData:
        """The same samples, stored after preprocessing, without augmentation."""
        return replace(self, x=self.preprocess(self.x, dtype=self.dtype), preprocess=Preprocess())

    def read_labelled(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Preprocessed samples by id, without augmentation, and their targets."""
        return self.read(ids), self.y[torch.from_numpy(ids).to(self.y.device)]


@dataclass(eq=False)
class Job:
    """A client to train in this round."""

    client: int
    ids: np.ndarray  # its training samples
    stage: int = 0
    payload: Tree = field(default_factory=dict)  # sent to this client only
    client_state: Tree | None = None  # None before it first takes part
    noise_multiplier: float = 0.0  # of the noise that protects its samples


@dataclass(eq=False)
class Broadcast:
    """The message that all clients of a round receive."""

    round: int
    params: Tensors
    buffers: Tensors
    payload: Tree


@dataclass(eq=False)
class PlannedClient:
    """A client and its batch plan."""

    job: Job
    ids: np.ndarray  # the samples it trains on
    heldout: np.ndarray
    plan: BatchPlan


@dataclass(eq=False)
class PreparedClient:
    """A client prepared for its first step."""

    client: Client
    params: Tensors
    carry: Tree
    plan: BatchPlan
    tables: Tensors  # per sample: those of the method, and "teacher/<name>/logits|features"
    teachers: dict[str, Tensors]  # weights of teachers that are evaluated in each step
    optimizer: Tree  # the optimiser's state from its last round; empty if it starts without a state


@dataclass(eq=False)
class ClientResult:
    """The result of a client's local training."""

    client: int
    samples: int
    label_counts: np.ndarray
    weight: float
    params: Tensors  # its trained model
    buffers: Tensors
    shared: Tensors  # the parameters that it uploads
    sums: Tree
    client_state: Tree
    loss: float  # mean objective over its steps
    finite: bool  # whether all trained parameters are finite
    protected_rounds: int = 0  # rounds counted by the client's own privacy account; 0: unknown
    validation: Mapping[str, float] | None = None  # of its own model, if the client tests it itself
    digest: str | None = None  # SHA-256 of the message that contained it, if there was one


@dataclass(frozen=True)
class Incident:
    """A failure of a client in a round: the client was excluded, or trained again."""

    client: int
    kind: str  # category: one or two words
    detail: str = ""
    digest: str | None = None  # SHA-256 of the message that caused it, if there was one

    def record(self) -> dict[str, int | str]:
        """The entry in metrics.jsonl."""
        entry: dict[str, int | str] = {"client": self.client, "kind": self.kind}
        return entry | {"detail": self.detail} if self.detail else entry


def held_out(samples: np.ndarray, share: float) -> np.ndarray:
    """The number of held-out samples of clients with ``samples``: at least one for clients with two or more."""
    if not share:
        return np.zeros_like(samples)
    return np.where(samples < 2, 0, np.maximum(1, (samples * share).astype(np.int64)))


def learning_rates(method: Method, epoch: int, lr: float, context: RunContext) -> list[float]:
    """Each parameter's learning rate in a local epoch, in the order of ``network.params``."""
    rates = [method.learning_rate(name, epoch, lr, context) for name in context.network.params]
    return [lr if rate is None else rate for rate in rates]


def proximal_mu_of(method: Method, settings: Settings) -> float:
    """The proximal coefficient of the optimiser; 0 with clipping, as clipped gradients include the proximal term."""
    return method.proximal_mu() if settings.max_grad_norm is None else 0.0


def private_names(method: Method, context: RunContext) -> frozenset[str]:
    """Parameters and buffers that are not sent. A layer's buffers are private if its parameters are."""
    network = context.network
    private = {name for name in network.params if not method.is_shared(name, context)}
    for buffer in network.buffers:
        layer = buffer.rpartition(".")[0]
        layer_params = [name for name in network.params if name.rpartition(".")[0] == layer] or network.params
        if private.issuperset(layer_params):
            private.add(buffer)
    return frozenset(private)


class ClientRunner:
    """Prepares and completes the local training of clients; the engine performs the steps in between."""

    def __init__(self, method: Method, context: RunContext, data: DeviceData, settings: Settings) -> None:
        self.method, self.context, self.data, self.settings = method, context, data, settings
        # Without augmentation, a teacher's inputs never change, so its outputs are computed once a round.
        self.cache_teachers = not data.preprocess.augments
        self.merge_single = context.network.has_batch_norm
        self.private = private_names(method, context)
        self.stateful = context.network.kept_local | (self.private & context.network.buffers.keys())
        self.sample_dp = None if settings.dp_samples is None else parse_dp_samples(settings.dp_samples)
        self.secret = settings.seed  # of the batches and the noise that protect samples
        if self.sample_dp is not None and self.sample_dp.noise_seed == "system":
            self.secret = secrets.randbits(64)

    def plan(self, job: Job, round: int) -> PlannedClient:
        """Select the client's training samples and plan their batches."""
        settings = self.settings
        ids, heldout = self._hold_out(job)
        if self.sample_dp is not None:
            private_plan = plan_private_batches(
                seed=self.secret,
                round=round,
                client=job.client,
                samples=len(ids),
                epochs=settings.local_epochs,
                steps=settings.local_steps,
                batch_size=settings.batch_size,
                sampling=self.sample_dp.sampling,
                preprocess=self.data.preprocess,
                shape=tuple(self.data.x.shape[1:]),
                dropout_keys=bool(self.context.network.dropouts),
            )
            return PlannedClient(job, ids, heldout, private_plan)
        plan = plan_batches(
            seed=settings.seed,
            round=round,
            client=job.client,
            samples=len(ids),
            epochs=settings.local_epochs,
            steps=settings.local_steps,
            batch_size=settings.batch_size,
            merge_single=self.merge_single,
            preprocess=self.data.preprocess,
            shape=tuple(self.data.x.shape[1:]),
            drop_last=settings.drop_last,
            dropout_keys=bool(self.context.network.dropouts),
        )
        return PlannedClient(job, ids, heldout, plan)

    def client(self, planned: PlannedClient, sent: Broadcast) -> Client:
        """The client as passed to the method's hooks."""
        context, settings, ids, heldout = self.context, self.settings, planned.ids, planned.heldout
        local_norm = (planned.job.client_state or {}).get("norm", {})
        return Client(
            context=context,
            id=planned.job.client,
            round=sent.round,
            stage=planned.job.stage,
            read=self.data.read,
            ids=ids,
            labels=self.data.labels[ids],
            targets=self.data.targets[ids],
            local_epochs=planned.plan.epochs,
            steps=planned.plan.steps,
            lr=settings.lr_at(sent.round),
            global_params=sent.params,
            buffers=sent.buffers
            | {k: v.to(context.device) for k, v in local_norm.items() if k in sent.buffers},
            heldout_ids=heldout,
            heldout_targets=self.data.targets[heldout],
        )

    def noise(self, like: Tensor, job: Job, samples: int, round: int, step: int) -> Tensor:
        """The noise on the sum of a step's clipped gradients, all parameters as one vector in the shape of ``like``."""
        assert self.sample_dp is not None
        sensitivity = self.sample_dp.sampling_of(samples, self.settings.batch_size).sensitivity
        drawn = gaussian(like, self.secret, "dp noise of samples", round, job.client, step)
        return job.noise_multiplier * sensitivity * self.sample_dp.clip * drawn

    def expected_batch(self, samples: int) -> Tensor:
        """q n: the expected batch size of DP-SGD at a client with this number of samples."""
        size = float(min(self.settings.batch_size, samples))
        return torch.tensor(size, dtype=self.context.dtype, device=self.context.device)

    def shown(self, client: Client) -> Client:
        """The client in the form passed to a method."""
        return client if self.sample_dp is None else WithheldClient.of(client, self.method.name)

    def final_statistics(self, job: Job, sent: Broadcast) -> Tree:
        """Statistics of the client's data under the final model, for `Method.final_statistics`."""
        return self.method.final_statistics(sent.params, self.client(self.plan(job, sent.round), sent)) or {}

    def start(self, planned: Sequence[PlannedClient], sent: Broadcast) -> list[PreparedClient]:
        """Prepare several clients; a teacher model that they share is evaluated once on all their samples."""
        prepared = [self._prepare(client, sent) for client in planned]
        if self.cache_teachers:
            self._cache_teacher_outputs(prepared)
        return prepared

    def _prepare(self, planned: PlannedClient, sent: Broadcast) -> PreparedClient:
        context, method, job = self.context, self.method, planned.job
        client = self.client(planned, sent)
        shown = self.shown(client)
        client_state = to_device(job.client_state or {}, context.device)
        payload = {**sent.payload, **job.payload}
        state = client_state["method"] if "method" in client_state else method.init_client_state(shown)
        params = method.initial_params(sent.params, payload, state, shown)
        params = params | {k: v for k, v in client_state.get("norm", {}).items() if k in params}
        tables = dict(method.tables(payload, state, shown))
        teachers = {name: method.teacher(name, payload, state, shown) for name in method.teachers}
        carry = tensors_only(method.client_init(payload, state, shown), method.name, "client_init")
        optimizer = former_state(client_state)
        return PreparedClient(client, params, carry, planned.plan, tables, teachers, optimizer)

    def _cache_teacher_outputs(self, prepared: Sequence[PreparedClient]) -> None:
        """Add the teachers' outputs for their clients' samples to the tables; each model is evaluated once."""
        by_model: dict[tuple[int, ...], list[tuple[str, PreparedClient]]] = {}
        for item in prepared:
            for name, weights in item.teachers.items():
                model = (id(weights), *(id(buffer) for buffer in item.client.buffers.values()))
                if self.context.network.mixes_samples:
                    model = (item.client.id, *model)
                by_model.setdefault(model, []).append((name, item))
        for pairs in by_model.values():
            name, item = pairs[0]
            clients = {other.client.id: other.client for _, other in pairs}
            ids = np.concatenate([c.ids for c in clients.values()])
            parts = [
                item.client.forward(item.teachers[name], self.data.read(part))
                for part in np.split(
                    ids, range(self.context.evaluation_batch, len(ids), self.context.evaluation_batch)
                )
            ]
            out = Output(torch.cat([p.features for p in parts]), torch.cat([p.logits for p in parts]))
            ends = np.cumsum([c.samples for c in clients.values()])
            slices = {
                k: slice(end - c.samples, end) for (k, c), end in zip(clients.items(), ends, strict=True)
            }
            for name, other in pairs:
                rows = slices[other.client.id]
                other.tables[f"teacher/{name}/logits"] = out.logits[rows]
                other.tables[f"teacher/{name}/features"] = out.features[rows]
        for item in prepared:
            item.teachers.clear()

    def finish(
        self,
        prepared: PreparedClient,
        params: Tensors,
        buffers: Tensors,
        optimizer: Tree,
        carry: Tree,
        loss: float,
        finite: bool,
    ) -> ClientResult:
        """Call the method's hooks after the last step and collect the client's result.

        ``optimizer`` is the optimiser's state if the client keeps it, otherwise empty.
        """
        client = prepared.client
        client.buffers = buffers
        shown = self.shown(client)
        with torch.no_grad():
            sums, state = self.method.client_final(params, carry, shown)
            for tree in (sums, state):
                tensors_only(tree, self.method.name, "client_final")
            shared = self.method.upload_params(params, carry, shown)
        client_state: Tree = {"method": state} if state else {}
        if self.stateful:
            client_state["norm"] = {
                k: v.clone() for k, v in {**params, **buffers}.items() if k in self.stateful
            }
        if optimizer:
            client_state["optimizer"] = clone(optimizer)
        network = self.context.network
        if (
            self.context.stages > 1 and network.has_head
        ):  # on a stream, clients are also tested with their private heads
            client_state["head"] = {k: params[k].clone() for k in network.head.names}
        return ClientResult(
            client.id,
            client.samples,
            np.bincount(client.labels, minlength=self.context.num_classes),
            self.method.client_weight(shown),
            params,
            buffers,
            shared,
            sums,
            client_state,
            loss,
            finite,
        )

    def _hold_out(self, job: Job) -> tuple[np.ndarray, np.ndarray]:
        """The ids of training and held-out samples."""
        if not self.method.holdout:
            return job.ids, job.ids[:0]
        count = int(held_out(np.array(len(job.ids)), self.method.holdout))
        order = generator(self.settings.seed, "holdout", job.client, job.stage).permutation(job.ids)
        return order[count:], order[:count]


def teacher_outputs(tables: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Output]:
    """The cached outputs of teachers for a batch, from its rows of the tables."""
    return {n: Output(tables[f"teacher/{n}/features"], tables[f"teacher/{n}/logits"]) for n in names}
