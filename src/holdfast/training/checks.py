"""Validation before training: arguments, the model against the data, batches against the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable
from dataclasses import fields
from difflib import get_close_matches
from os import PathLike

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.settings import Settings
from holdfast.core.spec import either, named, validate
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.engine.clients import DeviceData
from holdfast.methods.base import Method, own_classes
from holdfast.methods.stack import Stack
from holdfast.models.network import Network, Output
from holdfast.report.trackers import Tracker
from holdfast.runs.metrics_file import plain
from holdfast.tasks.base import Task

SIMILAR = 0.85  # similarity to a hook's name above which a name is probably a misspelt hook, not a helper
FEW_VALUES = 4  # values of a channel in a batch; with fewer, gradients of BatchNorm grew a thousandfold


def check_kinds(method: object, federation: object) -> None:
    """Raise if a method or a federation has the wrong type."""
    check_method_kind(method)
    if not isinstance(federation, Federation):
        raise HoldfastError(f"federation is {named(federation)}; it must come from holdfast.federate")
    for sentence in misspelt_hooks(method) if isinstance(method, Method) else ():
        warnings.warn(sentence, HoldfastWarning, stacklevel=3)


def misspelt_hooks(method: Method) -> list[str]:
    """A sentence for each name in a user-defined method that is almost a hook's name and is not an option."""
    if isinstance(method, Stack):
        return [sentence for part in method.parts for sentence in misspelt_hooks(part)]
    known = [name for name in vars(Method) if not name.startswith("_")]
    options = {field.name for field in fields(method)}
    names = {name for own in own_classes(type(method)) for name in vars(own) if not name.startswith("_")}
    similar = {
        name: get_close_matches(name, known, 1, SIMILAR) for name in sorted(names - {*known, *options})
    }
    return [
        f"{method.name} defines {name}, which is neither a hook nor an attribute of a method; did you mean "
        f"{found[0]}?"
        for name, found in similar.items()
        if found
    ]


def check_method_kind(method: object) -> None:
    """Raise if a method has the wrong type, or fields that a run cannot store."""
    if isinstance(method, type) and issubclass(method, Method):
        raise HoldfastError(f"method is {named(method)}; it must be an instance, such as {method.__name__}()")
    if not isinstance(method, (Method, str)):
        raise HoldfastError(
            f"method is {named(method)}; it must be a method, such as holdfast.FedAvg(), or text such as "
            "'fedntd:beta=2'"
        )
    if isinstance(method, Method):
        _check_fields(method)


def check_options(
    *,
    device: object,
    parallel_clients: object,
    ray_address: object,
    classifier: object,
    out: object,
    resume: object,
    on_round: object,
    progress: object,
) -> None:
    """Raise an error if an argument of `holdfast.train` besides the schedule settings has the wrong type."""
    validate("device", device, str)
    validate("parallel_clients", parallel_clients, int | None)
    validate("ray_address", ray_address, str | None)
    validate("classifier", classifier, str | None)
    validate("resume", resume, bool)
    validate("progress", progress, bool)
    if not isinstance(out, str | PathLike | None):
        raise HoldfastError(f"out is {named(out)}; it must be the path of a directory, such as 'runs/x'")
    if on_round is not None and not callable(on_round):
        raise HoldfastError(f"on_round is {named(on_round)}; it must be a function of a round's record")


def checked_trackers(trackers: object) -> list[Tracker]:
    """The trackers as a list; raises an error if one of them is not a tracker."""
    if isinstance(trackers, str) or not isinstance(trackers, Iterable):
        trackers = [trackers]
    checked = []
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise HoldfastError(
                f"trackers holds {named(tracker)}; it must be a list of trackers, such as "
                "[holdfast.report.tracker('csv', 'runs/x')]"
            )
        checked.append(tracker)
    return checked


def _check_fields(method: Method) -> None:
    """Raise if a method's fields cannot be stored as JSON."""
    for part in method.parts if isinstance(method, Stack) else (method,):
        for name, value in part.describe().items():
            try:
                json.dumps(plain(value))
            except TypeError:
                raise HoldfastError(
                    f"{part.name}: {name} is {named(value)}; the fields of a method are stored with the run, so "
                    "they must be numbers, texts, or lists of them; create other objects in a hook"
                ) from None


def check_cohort(settings: Settings, clients: int) -> None:
    """Warn if clients_per_round exceeds the number of clients; raise an error if a round cannot reach min_clients."""
    if settings.clients_per_round is not None and settings.clients_per_round > clients:
        wanted = settings.clients_per_round
        text = f"clients_per_round is {wanted}, but there are {clients} clients: all of them take part"
        warnings.warn(text, HoldfastWarning, stacklevel=4)
    cohort = min(settings.clients_per_round or clients, clients)
    if settings.min_clients > cohort:
        raise HoldfastError(
            f"min_clients is {settings.min_clients}, but a round has {cohort} clients; it must be at most "
            f"{cohort}"
        )
    if settings.sampling == "cyclic":
        if cohort == clients > 1:
            raise HoldfastError(
                "sampling is cyclic, but all clients take part in every round; set clients_per_round, for "
                "example to 1"
            )
        if settings.dp is not None:
            raise HoldfastError(
                "sampling is cyclic, but the privacy accounting of dp assumes random sampling of clients; "
                "leave one of them out"
            )


def check_tests(settings: Settings, federation: Federation, test_samples: int, validates: bool) -> None:
    """Raise an error if samples for a requested test are missing, or a stream has early stopping.

    ``validates``: whether clients have validation samples. Warns of metrics that are not as private as the updates.
    """
    if settings.patience is not None:
        given = f"patience is {settings.patience}, but"
        if not validates:
            raise HoldfastError(
                f"{given} no client has validation samples, which determine the best round; hold some out, for "
                "example with validation=0.1"
            )
        if federation.schedule is not None:
            raise HoldfastError(
                f"{given} the data of a stream arrives over all rounds, so training cannot stop early; leave "
                "patience out"
            )
    if not test_samples:
        if not validates:
            raise HoldfastError(
                f"{federation.dataset.name} has no test samples, and no client has validation samples; give test "
                "samples, or hold some out, such as validation=0.1"
            )
        for name in ("evaluate_locals", "probe_every"):
            if getattr(settings, name):
                raise HoldfastError(f"{name} needs test samples, and {federation.dataset.name} has none")
    protections = [name for name in ("dp", "dp_samples", "secure") if getattr(settings, name) is not None]
    if validates and protections:
        warnings.warn(
            "the server receives the validation metrics of each client individually and without noise; "
            f"{protections[0]} protects only the updates",
            HoldfastWarning,
            stacklevel=4,
        )


def check_optimizer(method: Method, settings: Settings) -> None:
    """Raise an error if the method requires SGD with a constant learning rate per round, and the run differs."""
    if settings.uses_plain_sgd and not settings.lr_varies_in_round:
        return
    use = "optimizer sgd without nesterov"
    if settings.uses_plain_sgd:
        use = "an lr_schedule over rounds"
    for part in method.parts if isinstance(method, Stack) else (method,):
        if part.assumes_sgd:
            raise HoldfastError(
                f"{part.name} assumes local SGD with one learning rate in a round: {part.assumes_sgd}; use {use}, or "
                "another method"
            )
    if method.overrides("step"):
        raise HoldfastError(
            f"{method.name} replaces the local step by SGD with one learning rate in a round; use {use}"
        )


def check_micro_batches(method: Method, network: Network, task: Task, settings: Settings) -> None:
    """Raise an error if gradient accumulation would change the gradient of a batch."""
    if settings.micro_batch_size is None:
        return
    cause = ""
    if network.has_batch_norm or not network.ignores_padding:
        cause = "the model's output for a sample depends on the other samples of its batch"
        cause += ", by BatchNorm" if network.has_batch_norm else ""
    elif task.compares_samples:
        cause = f"the loss of task '{task.name}' compares the samples of a batch"
    elif method.overrides("step"):
        cause = f"{method.name} replaces the local step"
    for part in method.parts if isinstance(method, Stack) else (method,):
        if part.compares_samples:
            cause = f"the loss of {part.name} compares the samples of a batch"
    if cause:
        raise HoldfastError(f"micro_batch_size is {settings.micro_batch_size}; it must be None: {cause}")


def check_model(network: Network, dataset: Dataset, data: DeviceData) -> None:
    """Raise an error if a forward pass fails or its outputs do not fit the task, such as one logit per class.

    A last Linear layer counts as the classifier only if it is the model's last layer.
    """
    wanted = dataset.num_outputs
    if network.has_head and network.num_outputs != wanted:
        linears = [(name, m) for name, m in network.net.named_modules() if isinstance(m, nn.Linear)]
        fitting = [name for name, linear in linears if linear.out_features == wanted]
        if fitting or not _returns_what_the_task_needs(network, dataset, data):
            what = f"{wanted} classes" if dataset.task.name == "multiclass" else f"task '{dataset.task.name}'"
            raise HoldfastError(
                f"the model's last layer has {network.num_outputs} outputs, but {dataset.name} has {what}"
                + ("; make them equal" if dataset.task.name == "multiclass" else f", which needs {wanted}")
                + (
                    f", or name the layer that is the classifier: classifier='{fitting[-1]}'"
                    if fitting
                    else ""
                )
            )
        network.drop_head()
    try:
        out = network.apply(network.params, network.buffers, data.read(np.array([0])))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "; samples are floats: x.long() makes indices of them" if "indices" in first else ""
        raise HoldfastError(
            f"the model does not take samples of {dataset.name}, whose shape is {dataset.shape}: {first}{hint}"
        ) from None
    found = tuple(out.logits.shape) if isinstance(out.logits, Tensor) else named(out.logits)
    shapes = [(1, *shape) for shape in dataset.output_shapes]
    if found not in shapes:
        what = ": a batch of logits, one per class"
        if dataset.task.name != "multiclass":
            what = f", as task '{dataset.task.name}' needs it"
        raise HoldfastError(
            f"the model's output for one sample is {found}; it must be {either(map(str, shapes))}{what}"
        )
    network.vector_features = network.has_head and out.features.shape[-1] == network.head.features
    if len(shapes[0]) > 2 or not network.has_head:
        return
    if not _ends_with_its_classifier(network, out):
        text = (
            "something follows the model's classifier, such as a softmax, which the task's loss already "
            "includes; methods that apply the classifier themselves leave it out: end the model with it, or name "
            "it by classifier"
        )
        warnings.warn(text, HoldfastWarning, stacklevel=4)  # where `train` was called


def _returns_what_the_task_needs(network: Network, dataset: Dataset, data: DeviceData) -> bool:
    """Whether the model's outputs have the right shape, independent of its last Linear layer."""
    try:
        out = network.apply(network.params, network.buffers, data.read(np.array([0])))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, HoldfastError):
        return False
    return isinstance(out.logits, Tensor) and tuple(out.logits.shape[1:]) in dataset.output_shapes


def _ends_with_its_classifier(network: Network, out: Output) -> bool:
    """Whether the logits are the classifier's outputs, up to a constant, which cross-entropy ignores."""
    if out.features.shape[-1] != network.head.features:
        return False
    alone = network.head.logits(network.params, out.features)
    logits = out.logits.reshape(alone.shape)
    if alone.shape[-1] > 1:
        apart = (logits.log_softmax(-1) - alone.log_softmax(-1)).abs().max()
    else:
        apart = (logits - alone).abs().max()
    return bool(apart <= 1e-2 * alone.abs().max() + 1e-6)  # TF32 may round the two in different ways


def warn_of_own_draws(network: Network, data: DeviceData) -> None:
    """Warn of a model that draws from torch's global generator, whose state is restored."""
    x, buffers = data.read(np.array([0, 0])), {name: b.clone() for name, b in network.buffers.items()}
    gpu = x.device if x.device.type == "cuda" else None

    def state() -> Tensor:
        return torch.get_rng_state() if gpu is None else torch.cuda.get_rng_state(gpu)

    with torch.no_grad(), torch.random.fork_rng([] if gpu is None else [gpu]):
        before = state()
        network.apply(network.params, buffers, x, train=True)
        draws = not torch.equal(state(), before)
    if draws:
        text = (
            "the model draws from torch's global generator when it trains, as F.dropout and the dropout inside "
            "attention and recurrent layers do: the same seed will not give the same bits; nn.Dropout is decided by it"
        )
        warnings.warn(text, HoldfastWarning, stacklevel=4)  # where `train` was called


def warn_of_unused(names: Collection[str]) -> None:
    """Warn of parameters that no gradient reaches."""
    if names:
        text = (
            f"no gradient reaches {', '.join(sorted(names))} of the model; training leaves them as they are, as "
            "torch's optimisers do, and they are not sent"
        )
        warnings.warn(text, HoldfastWarning, stacklevel=4)  # where `train` was called


def warn_of_frozen_classifier(layer: str | None) -> None:
    """Warn of a classifier that is not trained, as in LoRA without ``modules_to_save``."""
    if layer is not None:
        text = (
            f"the model's last Linear layer, '{layer}', requires no gradient: it stays as it is, and methods that "
            "train a classifier refuse the model; call requires_grad_(True) on it (peft: modules_to_save) to train it"
        )
        warnings.warn(text, HoldfastWarning, stacklevel=4)  # where `train` was called


def ignores_padding(network: Network, data: DeviceData) -> bool:
    """Whether padding of a batch leaves the buffers and the outputs for its other samples unchanged.

    The vectorized engine requires it. It excludes padding from torch's batch norms, but not from a user's own batch
    means.
    """
    plain = network.clone()
    plain.own_kernels = False  # they would be compiled for this batch alone
    x = data.read(np.arange(4) % len(data.labels))
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=data.dtype, device=x.device)
    x, other = x[:3], x[[0, 1, 3]]
    key = torch.zeros((), dtype=torch.int64, device=x.device)

    def outcome(batch: Tensor) -> list[Tensor]:
        torch.manual_seed(0)  # for models that draw from the global generator
        buffers = {name: b.clone() for name, b in plain.buffers.items()}
        out, after = plain.pure(plain.params, buffers, batch, mask, key)
        return [out.logits[:2], *after.values()]

    try:
        with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
            pairs = zip(outcome(x), outcome(other), strict=True)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return True  # another check reports this error
    return all(torch.allclose(one, two, rtol=1e-4, atol=1e-5, equal_nan=True) for one, two in pairs)


def warn_of_tiny_batches(network: Network, data: DeviceData, sizes: np.ndarray, batch_size: int) -> None:
    """Warn of last batches so small that BatchNorm may make training diverge; a single sample joins another batch.

    ``sizes`` are the samples of each client at each stage: ``[S, K]``.
    """
    pixels = network.min_batchnorm_values(data.read(np.array([0])))
    last = sizes % batch_size
    tiny = (sizes > batch_size) & (last > 1) & (last * (pixels or FEW_VALUES) < FEW_VALUES)
    if tiny.any():
        whose, few = f"{tiny.any(0).sum()} of {sizes.shape[1]} clients", last[tiny].min()
        warnings.warn(
            f"{whose} have a last batch of as few as {few} samples, on which this model's BatchNorm may make "
            "training unstable; set drop_last to leave such batches out",
            HoldfastWarning,
            stacklevel=4,  # where `train` was called
        )
