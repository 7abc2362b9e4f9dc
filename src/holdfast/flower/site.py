"""The site's side: its clients, and the handlers of the server's messages.

Flower starts a new process for every message, so each handler loads the site's samples first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from holdfast.core.device import choose_device, choose_precision
from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tensors, Tree, to_device
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.validation import hold_out
from holdfast.engine.clients import Broadcast, ClientResult, Job, private_names
from holdfast.engine.run_context import device_data, make_run_context
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.uploads import compressed
from holdfast.engine.validation import ClientMetrics, ValidationSet, defined_metrics
from holdfast.flower.accounts import SiteAccount
from holdfast.flower.app import AppConfig, Config, FlowerApp
from holdfast.flower.client_states import SiteClientStates
from holdfast.flower.description import describe_dataset
from holdfast.flower.messages import (
    DESCRIBE,
    EVALUATE,
    SAMPLES,
    STATISTICS,
    TRAIN,
    RoundRequest,
    tree_from_record,
    tree_to_record,
)
from holdfast.flower.wire import spec_of
from holdfast.methods.base import Method, Server
from holdfast.methods.context import RunContext
from holdfast.metrics.by_task import metrics_of
from holdfast.models.wrapping import build_network, fit_samples
from holdfast.training.privacy import refuse_unprotected_samples
from holdfast.updates.compression import parse_compression
from holdfast.updates.withheld import WithheldCounts


class Site:
    """This node's samples and the clients they belong to."""

    def __init__(self, app: FlowerApp, app_config: AppConfig, node: Config) -> None:
        data = app.site_data(node, app_config.config)
        first = _node_number(node, "partition-id")
        if isinstance(data, Dataset):
            samples = len(data.y_train)
            data = Federation(data, np.arange(samples), np.array([0, samples]))
        if data.clients == 1:
            self.local_index = {
                first: 0
            }  # from a client's number in the whole federation to that in this one
        else:
            step = _node_number(node, "num-partitions")
            self.local_index = {k: k for k in range(first, data.clients, step)}
        self.dataset = data.dataset.for_task(app_config.described["task"], app_config.described["loss"])
        if self.dataset is not data.dataset:
            data = replace(data, dataset=self.dataset)
        settings = app_config.settings
        if settings.validation is not None:
            numbers = np.array(list(self.local_index)) if data.clients == 1 else None
            data = hold_out(data, settings.validation, settings.seed, numbers)
        if len(data.validation) and settings.dp_samples is not None:
            raise HoldfastError(
                "dp_samples: metrics on validation samples would leave this site without noise; leave validation out"
            )
        self.federation = data
        self.metrics = metrics_of(self.dataset.task, app_config.described["metrics"])

    def ids(self, client: int, stage: int) -> np.ndarray:
        """The ids of a client's samples at a stage."""
        if client not in self.local_index:
            raise HoldfastError(
                f"client {client} is not at this site, which has {sorted(self.local_index)[:5]}"
            )
        return self.federation.client(self.local_index[client], stage)

    def counts(self) -> np.ndarray:
        """The samples of each class that arrive at each client at each stage: int64 ``[clients, stages, C]``."""
        arriving = replace(self.federation, cumulative=False, leaves=np.empty(0, np.int64))
        rows = list(self.local_index.values())
        return np.stack([arriving.label_counts(rows, s) for s in range(arriving.stages)], axis=1)

    def defined_metrics(self) -> np.ndarray:
        """Which metrics each client's validation samples define: int64 ``[clients, metrics]``."""
        federation = self.federation
        defined = np.zeros((federation.clients, len(self.metrics)), np.int64)
        for k in np.flatnonzero(federation.validation_sizes()):
            ids = federation.validation[
                federation.validation_offsets[k] : federation.validation_offsets[k + 1]
            ]
            defined[k] = defined_metrics(self.dataset, self.dataset.y_train[ids], self.metrics)
        return defined

    def bounds(self) -> list[float]:
        """The smallest and the largest value of any sample."""
        low, high = self.dataset.x_train.aminmax()
        return [float(low), float(high)]


def _in_first_class(counts: np.ndarray, protected: bool) -> np.ndarray:
    """Label counts ``[..., C]`` to send; under privacy all samples are counted in the first class."""
    if not protected:
        return counts
    withheld = np.zeros_like(counts)
    withheld[..., 0] = counts.sum(-1)
    return withheld


def _node_number(node: Config, key: str) -> int:
    value = node.get(key)
    if not isinstance(value, int) or value < 0:
        raise HoldfastError(
            f"the SuperNode's --node-config needs {key}, a whole number, such as 'partition-id=0 num-partitions=2'"
        )
    return value


# Handlers of messages -----------------------------------------------------------------------------------------


def describe(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Report the clients at this site and their samples of each class."""
    site = Site(app, app_config, context.node_config)
    leaves, protected = site.federation.leaves, app_config.settings.dp_samples is not None
    secret = app_config.settings.secure is not None
    counts = _in_first_class(site.counts(), protected or secret)
    arrays = {"clients": torch.tensor(list(site.local_index)), "counts": torch.from_numpy(counts)}
    if len(leaves):
        arrays["leaves"] = torch.from_numpy(leaves[list(site.local_index.values())])
    properties = {
        "bounds": [0.0, 1.0] if protected else site.bounds(),
        "shape": list(site.dataset.shape),
        "cumulative": int(site.federation.cumulative),
        "preprocess": json.dumps(asdict(site.dataset.preprocess), sort_keys=True),
        "dataset": describe_dataset(site.dataset),
    }
    if len(site.federation.validation):
        rows = list(site.local_index.values())
        arrays["validation"] = torch.from_numpy(site.federation.validation_sizes()[rows])
        arrays["defined"] = torch.from_numpy(site.defined_metrics()[rows])
    return make_reply(message, {"clients": tree_to_record(arrays), "properties": ConfigRecord(properties)})


def train(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Train the requested clients one by one; an error of one client does not affect the others."""
    _refuse_open_uploads(app_config)
    work = RoundWork(app, app_config, message, context.node_config)
    return make_reply(message, dict(for_each_client(work, work.train)))


def evaluate(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Test the global model on the requested clients' validation samples."""
    work = RoundWork(app, app_config, message, context.node_config)
    return make_reply(message, dict(for_each_client(work, lambda client, _: work.evaluate(client))))


def statistics(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Compute the requested clients' statistics under the final model."""
    _refuse_open_uploads(app_config)
    work = RoundWork(app, app_config, message, context.node_config)
    return make_reply(message, dict(for_each_client(work, lambda client, _: work.statistics(client))))


def samples(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Send single samples, at most one of each class, if this site's configuration allows it."""
    site = Site(app, app_config, context.node_config)
    columns = {k: v.tolist() for k, v in tree_from_record(message.content, "positions").items()}
    positions = list(zip(*(columns[key] for key in ("client", "stage", "label", "rank")), strict=True))
    if context.node_config.get("share-samples") is not True:
        raise HoldfastError(
            f"the server requests {len(positions)} samples, but this site does not share any; to share them, set "
            "share-samples=true in its --node-config"
        )
    if len({label for _, _, label, _ in positions}) < len(positions):
        raise HoldfastError(
            "the server requests several samples of one class; a site sends at most one of each"
        )
    labels, chosen = site.dataset.strata_train, []
    for client, stage, label, rank in positions:
        ids = replace(site.federation, cumulative=False).client(site.local_index[client], stage)
        chosen.append(ids[labels[ids] == label][rank])
    x = site.dataset.x_train[torch.tensor(chosen)]
    return make_reply(message, {"samples": tree_to_record({"x": x})})


Handler = Callable[[FlowerApp, AppConfig, Message, Context], Message]

HANDLERS: dict[str, Handler] = {
    DESCRIBE: describe,
    TRAIN: train,
    EVALUATE: evaluate,
    STATISTICS: statistics,
    SAMPLES: samples,
}


def _refuse_open_uploads(app_config: AppConfig) -> None:
    if app_config.settings.secure is not None:
        raise HoldfastError(
            "the server requests an upload without masks, but secure is set; the upload is not sent"
        )


def make_reply(message: Message, content: dict[str, Any]) -> Message:
    return Message(RecordDict(content), reply_to=message)


def for_each_client(
    work: RoundWork, function: Callable[[int, int], dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """The records of each client, from ``function(client, memory_round)``; an error becomes a record too."""
    request = work.request
    for client, memory_round in zip(request.clients, request.memory_rounds, strict=True):
        yield from guarded(client, partial(function, client, memory_round))


def guarded(client: int, records: Callable[[], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A client's records, or one that describes the error of making them."""
    try:
        yield from records().items()
    except Exception as error:  # errors are reported by client
        line = str(error).splitlines()[0] if str(error) else ""
        detail = line if isinstance(error, HoldfastError) else f"{type(error).__name__}: {line}"
        yield f"failed {client}", ConfigRecord({"detail": detail[:1000]})


class RoundWork:
    """One message's work: the model, the method and the content of the message."""

    def __init__(self, app: FlowerApp, app_config: AppConfig, message: Message, node: Config) -> None:
        self.app_config, self.site = app_config, Site(app, app_config, node)
        dataset, settings = self.site.dataset, app_config.settings
        self.request = request = RoundRequest.from_record(message.content, dataset.num_classes)
        device = choose_device(str(node.get("device", "auto")))
        precision = choose_precision(app_config.described["precision"], device)
        network = build_network(
            app_config.model(), dataset.shape, dataset.num_outputs, settings.seed, device, precision,
            app_config.described["classifier"], app_config.described["batchnorm"],
        )  # fmt: skip
        dataset = fit_samples(network, dataset)
        data = device_data(dataset, device, precision.dtype)
        self.context = make_run_context(
            network,
            data,
            settings,
            num_clients=request.num_clients,
            class_counts=np.array(request.class_counts),
            bounds=request.bounds,
            # Only the server has public samples and one sample of each class.
            public=np.empty(0, np.int64),
            draw_one_of_each=lambda: np.full(dataset.num_classes, -1, np.int64),
            stages=request.stages,
            read=_no_samples,
            task=dataset.task,
        )
        if settings.withholds_counts:
            self.context = replace(self.context, class_counts=WithheldCounts.like(self.context.class_counts))
        self.method = app_config.method
        if settings.dp_samples is not None:  # a site repeats the server's checks
            refuse_unprotected_samples(self.method, self.context)
        self.engine = SequentialEngine(self.method, self.context, data, settings)
        self.validation: ValidationSet | None = None
        if len(self.site.federation.validation):
            held = replace(self.site.federation, dataset=dataset)
            self.validation = ValidationSet(held, self.context, self.site.metrics)
        self._measured: ClientMetrics | None = None  # of the global model, by all clients of this site
        self.client_states = SiteClientStates(node, request.run)
        self.content = message.content
        self.sent = self._broadcast()

    def train(self, client: int, memory_round: int) -> dict[str, Any]:
        """Train one client; returns the records of its reply."""
        result, memory = self.trained(client, memory_round)
        result, sent = compressed_upload(
            result, self.method, self.context, self.app_config, self.sent, memory
        )
        protected = self.app_config.settings.dp_samples is not None
        fields = self.remembered(result, memory, memory_round) | {
            "weight": float(result.weight),
            # The noise on the gradients protects neither of them.
            "loss": 0.0 if protected else float(result.loss),
            "label-counts": _in_first_class(result.label_counts, protected).tolist(),
        }
        upload = tree_to_record(build_upload(result, self.method, self.context, self.app_config, sent))
        return {f"client {client}": upload, f"result {client}": ConfigRecord(fields)}

    def trained(self, client: int, memory_round: int) -> tuple[ClientResult, Tree | None]:
        """The result of one client's training, and its state before."""
        request = self.request
        memory = self.client_states.get(client, memory_round) if memory_round else None
        ids = self.site.ids(client, request.stage)
        multiplier, protected_rounds = 0.0, 0
        if self.app_config.settings.dp_samples is not None:
            multiplier = request.noise_multipliers[request.clients.index(client)]
            account = SiteAccount(self.client_states.root, client, self.app_config.settings)
            protected_rounds = account.spend(len(ids), multiplier)
        job = Job(client, ids, request.stage, self._payload(client), memory, multiplier)
        result = next(self.engine.train(self.sent, [job]))
        return replace(result, protected_rounds=protected_rounds), memory

    def remembered(self, result: ClientResult, memory: Tree | None, memory_round: int) -> dict[str, Any]:
        """Store the client's state after the round; returns the values that it sends in addition to its upload."""
        client, number = result.client, self.request.round
        measured = self._test_own_model(client, result)
        self.client_states.put(client, number, to_device(result.client_state, "cpu"), memory_round)
        return {
            "round": number,
            "samples": result.samples,
            "protected-rounds": result.protected_rounds,
            "has-memory": int(bool(result.client_state)),
            "memory-lost": int(bool(memory_round) and memory is None),
            **measured,
        }

    def _test_own_model(self, client: int, result: ClientResult) -> dict[str, Any]:
        """The metrics of a client's model on its own validation samples, in rounds in which models are tested."""
        settings, number = self.app_config.settings, self.request.round
        if self.validation is None or not (
            number % settings.evaluate_every == 0 or number == settings.rounds
        ):
            return {}
        state = result.client_state.get("method", {})
        pending = self.validation.start_each(
            [self.site.local_index[client]],
            [(result.params, result.buffers)],
            [lambda out: self.method.personal_logits(out, state)],
        )
        return {} if pending is None else {"validation": _only_client(pending.wait())}

    def evaluate(self, client: int) -> dict[str, Any]:
        """The metrics of the global model on one client's validation samples."""
        if self.validation is None:
            raise HoldfastError(f"client {client} has no validation samples")
        place = self.validation.places[self.site.local_index[client]]
        if self._measured is None:
            state = self.sent.payload.get("state", {})
            server = Server(self.sent.params, self.sent.buffers, state, self.request.round, final=True)
            self._measured = self.validation.start(self.method, server).wait()
        values = [float(each[place]) for each in self._measured.values.values()]
        return {f"metrics {client}": ConfigRecord({"round": self.request.round, "values": values})}

    def statistics(self, client: int) -> dict[str, Any]:
        """The record of one client's statistics under the final model."""
        return {f"client {client}": tree_to_record(self.final_statistics(client))}

    def final_statistics(self, client: int) -> Tree:
        """One client's statistics under the final model."""
        job = Job(client, self.site.ids(client, self.request.stage), self.request.stage)
        return self.engine.runner.final_statistics(job, self.sent)

    def _broadcast(self) -> Broadcast:
        network = self.context.network
        model = {"params": network.params, "buffers": network.buffers}
        spec = spec_of(exchanged_tensors(model, self.method, self.context, self.app_config))
        sent = tree_from_record(self.content, "broadcast", spec, unchecked="payload")
        sent = to_device(sent, self.context.device)
        return Broadcast(
            self.request.round,
            network.params | sent.get("params", {}),
            network.buffers | sent.get("buffers", {}),
            sent.get("payload", {}),
        )

    def _payload(self, client: int) -> Tree:
        """The individual payload of this client."""
        name = f"payload {client}"
        if name not in self.content:
            return {}
        return to_device(tree_from_record(self.content, name), self.context.device)


# Exchanged tensors --------------------------------------------------------------------------------------------


def exchanged_tensors(model: Tree, method: Method, context: RunContext, app_config: AppConfig) -> Tree:
    """The part of a model's params and buffers that is sent.

    Parameters private to a client are included only if the server tests the clients' models.
    """
    private = () if app_config.settings.evaluate_locals else private_names(method, context)
    return {part: {k: v for k, v in model[part].items() if k not in private} for part in model}


def compressed_upload(
    result: ClientResult,
    method: Method,
    context: RunContext,
    app_config: AppConfig,
    sent: Broadcast,
    memory: Tree | None,
) -> tuple[ClientResult, Tree | None]:
    """The result after compression, and the compressed parameters; None without compression."""
    settings = app_config.settings
    if settings.compress is None:
        return result, None
    before = exchanged_params(sent.params, method, context)
    compression = parse_compression(settings.compress)
    return compressed(result, compression, before, memory, settings.seed, sent.round)


def exchanged_params(params: Tensors, method: Method, context: RunContext) -> Tensors:
    """The parameters whose updates are compressed: the shared ones."""
    private = private_names(method, context)
    return {name: value for name, value in params.items() if name not in private}


def build_upload(
    result: ClientResult,
    method: Method,
    context: RunContext,
    app_config: AppConfig,
    compressed: Tree | None = None,
) -> Tree:
    """The tensors of a result that leave the site; ``compressed`` replaces the parameters."""
    model = {"params": result.shared, "buffers": result.buffers}
    upload = exchanged_tensors(model, method, context, app_config)
    if compressed is not None:
        replaced = exchanged_params(result.shared, method, context)
        upload["params"] = {k: v for k, v in upload["params"].items() if k not in replaced}
        upload["compressed"] = compressed
    upload["sums"] = result.sums
    if app_config.settings.evaluate_locals:
        if method.overrides("upload_params"):
            upload["local"] = result.params
        if method.overrides("personal_logits") or context.stages > 1:
            upload["memory"] = {k: v for k, v in result.client_state.items() if k != "residual"}
    return upload


def _only_client(measured: ClientMetrics) -> list[float]:
    """The metrics that one client measured, in the order of `metric_names`."""
    return [float(value) for (value,) in measured.values.values()]


def _no_samples(ids: np.ndarray) -> tuple[Tensor, Tensor]:
    raise HoldfastError("only the server half of a method reads samples by id")
