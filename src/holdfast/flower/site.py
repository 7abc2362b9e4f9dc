"""A site's side: which clients it has, and what they do when the server asks.

Flower starts a new process for every message, so each answer begins with reading the site's samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.engine.clients import Broadcast, ClientResult, Job, on_device, private_names
from holdfast.engine.factory import choose_device, choose_precision
from holdfast.engine.run_context import device_data, make_run_context
from holdfast.engine.sequential import SequentialEngine
from holdfast.flower.app import AppConfig, Config, FlowerApp
from holdfast.flower.client_states import SiteClientStates
from holdfast.flower.messages import (
    DESCRIBE,
    SAMPLES,
    SURVEY,
    TRAIN,
    RoundRequest,
    record_of,
    tree_of,
)
from holdfast.flower.wire import form_of
from holdfast.methods.base import Method, Tree
from holdfast.methods.context import RunContext
from holdfast.models.own import network_of


class Site:
    """This node's samples and the clients they belong to."""

    def __init__(self, app: FlowerApp, plan: AppConfig, node: Config) -> None:
        given = app.site_data(node, plan.config)
        first = _whole(node, "partition-id")
        if isinstance(given, Dataset):
            samples = len(given.y_train)
            self.federation = Federation(given, np.arange(samples), np.array([0, samples]))
            self.places = {first: 0}  # a client's number in the whole federation, and its place in this one
        else:
            self.federation = given
            self.places = {k: k for k in range(first, given.clients, _whole(node, "num-partitions"))}
        self.dataset = self.federation.dataset

    def ids(self, client: int, stage: int) -> np.ndarray:
        """The ids of a client's samples at a stage."""
        if client not in self.places:
            raise HoldfastError(f"client {client} is not at this site, which has {sorted(self.places)[:5]}")
        return self.federation.client(self.places[client], stage)

    def counts(self) -> np.ndarray:
        """How many samples of each class arrive at each client at each stage: int64 ``[clients, stages, C]``."""
        arriving = replace(self.federation, cumulative=False, leaves=np.empty(0, np.int64))
        places = list(self.places.values())
        return np.stack([arriving.label_counts(places, s) for s in range(arriving.stages)], axis=1)

    def bounds(self) -> list[float]:
        """The smallest and the largest value in any sample."""
        least, most = self.dataset.x_train.aminmax()
        return [float(least), float(most)]


def _whole(node: Config, key: str) -> int:
    value = node.get(key)
    if not isinstance(value, int) or value < 0:
        raise HoldfastError(
            f"the SuperNode's --node-config needs {key}, a whole number, such as 'partition-id=0 num-partitions=2'"
        )
    return value


def describe(app: FlowerApp, plan: AppConfig, message: Message, node: Config) -> Message:
    """Say which clients are here, and how many samples of each class they have."""
    site = Site(app, plan, node)
    leaves = site.federation.leaves
    places = list(site.places.values())
    arrays = {"clients": torch.tensor(list(site.places)), "counts": torch.from_numpy(site.counts())}
    if len(leaves):
        arrays["leaves"] = torch.from_numpy(leaves[places])
    facts = {
        "bounds": site.bounds(),
        "shape": list(site.dataset.shape),
        "cumulative": int(site.federation.cumulative),
        "preprocess": json.dumps(asdict(site.dataset.preprocess), sort_keys=True),
    }
    return _reply(message, {"site": record_of(arrays), "facts": ConfigRecord(facts)})


def train(app: FlowerApp, plan: AppConfig, message: Message, node: Config) -> Message:
    """Train the clients that are asked for, each by itself: one that fails does not stop the others."""
    work = Work(app, plan, message, node)
    return _reply(message, dict(_each(work, lambda k, remembers: work.train(k, remembers))))


def survey(app: FlowerApp, plan: AppConfig, message: Message, node: Config) -> Message:
    """What the clients say of the final model."""
    work = Work(app, plan, message, node)
    return _reply(message, dict(_each(work, lambda k, remembers: work.survey(k))))


def samples(app: FlowerApp, plan: AppConfig, message: Message, node: Config) -> Message:
    """Hand out single samples, as a method that shares some asks for, if this site allows it."""
    site = Site(app, plan, node)
    wanted = {k: v.tolist() for k, v in tree_of(message.content, "wanted").items()}
    asked = list(zip(*(wanted[key] for key in ("client", "stage", "label", "rank")), strict=True))
    if node.get("share-samples") is not True:
        raise HoldfastError(
            f"the server asks for {len(asked)} samples, and this site gives none; where that is wanted, its "
            "--node-config must say share-samples=true"
        )
    if len({label for _, _, label, _ in asked}) < len(asked):
        raise HoldfastError(
            "the server asks for several samples of one class; one of each is all that is given"
        )
    labels, chosen = site.dataset.y_train.numpy(), []
    for client, stage, label, rank in asked:
        ids = replace(site.federation, cumulative=False).client(site.places[client], stage)
        chosen.append(ids[labels[ids] == label][rank])
    return _reply(message, {"samples": record_of({"x": site.dataset.x_train[torch.tensor(chosen)]})})


ANSWERS: dict[str, Callable[[FlowerApp, AppConfig, Message, Config], Message]] = {
    DESCRIBE: describe,
    TRAIN: train,
    SURVEY: survey,
    SAMPLES: samples,
}


def _reply(message: Message, content: dict[str, Any]) -> Message:
    return Message(RecordDict(content), reply_to=message)


def _each(work: Work, answer: Callable[[int, int], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    orders = work.orders
    for client, remembers in zip(orders.clients, orders.remembers, strict=True):
        try:
            yield from answer(client, remembers).items()
        except Exception as error:  # whatever it was, the server is told which client it was
            what = str(error).splitlines()[0] if str(error) else ""
            detail = what if isinstance(error, HoldfastError) else f"{type(error).__name__}: {what}"
            yield f"failed {client}", ConfigRecord({"round": orders.round, "detail": detail[:1000]})


class Work:
    """One message's work: the model, the method and what came with the message."""

    def __init__(self, app: FlowerApp, plan: AppConfig, message: Message, node: Config) -> None:
        self.plan, self.site = plan, Site(app, plan, node)
        dataset = self.site.dataset
        self.orders = orders = RoundRequest.read(message.content, dataset.num_classes)
        device = choose_device(str(node.get("device", "auto")))
        dtype = choose_precision(plan.described["precision"], device)
        network = network_of(
            plan.model(), dataset.shape, dataset.num_classes, plan.settings.seed, device, dtype,
            plan.described["classifier"], plan.described["batchnorm"],
        )  # fmt: skip
        data = device_data(dataset, device, dtype)
        self.context = make_run_context(
            network,
            data,
            plan.settings,
            num_clients=orders.num_clients,
            class_counts=np.array(orders.class_counts),
            bounds=orders.bounds,
            public=np.empty(0, np.int64),  # these, and one of each class, are the server's
            draw_one_of_each=lambda: np.full(dataset.num_classes, -1, np.int64),
            stages=orders.stages,
            read=_no_samples,
        )
        self.method = plan.method
        self.engine = SequentialEngine(self.method, self.context, data, plan.settings)
        self.memory = SiteClientStates(node, orders.run)
        self.content = message.content
        self.sent = self._broadcast()

    def train(self, client: int, remembers: int) -> dict[str, Any]:
        """Train one client."""
        orders = self.orders
        memory = self.memory.get(client, remembers) if remembers else None
        job = Job(client, self.site.ids(client, orders.stage), orders.stage, self._own(client), memory)
        result = next(self.engine.train(self.sent, [job]))
        self.memory.put(client, orders.round, on_device(result.memory, torch.device("cpu")), remembers)
        facts = {
            "round": orders.round,
            "samples": result.samples,
            "weight": float(result.weight),
            "loss": float(result.loss),
            "label-counts": result.label_counts.tolist(),
            "remembers": int(bool(result.memory)),
            "memory-lost": int(bool(remembers) and memory is None),
        }
        told = record_of(uploaded(result, self.method, self.context, self.plan))
        return {f"client {client}": told, f"result {client}": ConfigRecord(facts)}

    def survey(self, client: int) -> dict[str, Any]:
        """One client's word on the final model."""
        job = Job(client, self.site.ids(client, self.orders.stage), self.orders.stage)
        return {f"client {client}": record_of(self.engine.side.survey(job, self.sent))}

    def _broadcast(self) -> Broadcast:
        network = self.context.network
        model = {"params": network.params, "buffers": network.buffers}
        form = form_of(exchanged(model, self.method, self.context, self.plan))
        sent = on_device(tree_of(self.content, "sent", form, free="payload"), self.context.device)
        return Broadcast(
            self.orders.round,
            network.params | sent.get("params", {}),
            network.buffers | sent.get("buffers", {}),
            sent.get("payload", {}),
        )

    def _own(self, client: int) -> Tree:
        name = f"own {client}"
        return on_device(tree_of(self.content, name), self.context.device) if name in self.content else {}


def exchanged(model: Tree, method: Method, context: RunContext, plan: AppConfig) -> Tree:
    """What of a model's params and buffers is sent; what stays with a client only where the server tests its model."""
    home = () if plan.settings.evaluate_locals else private_names(method, context)
    return {part: {k: v for k, v in model[part].items() if k not in home} for part in model}


def uploaded(result: ClientResult, method: Method, context: RunContext, plan: AppConfig) -> Tree:
    """What of a result leaves the site."""
    told = exchanged({"params": result.shared, "buffers": result.buffers}, method, context, plan)
    told["sums"] = result.sums
    if plan.settings.evaluate_locals:
        if method.overrides("upload_params"):
            told["local"] = result.params
        if method.overrides("personal_logits") or context.stages > 1:
            told["memory"] = result.memory
    return told


def _no_samples(ids: np.ndarray) -> tuple[Tensor, Tensor]:
    raise HoldfastError("only the server half of a method reads samples by id")
