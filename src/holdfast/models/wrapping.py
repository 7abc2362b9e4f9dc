"""Wrapping of a model, by name or of the user's own, as a `Network`."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from holdfast.core.device import Precision
from holdfast.data.dataset import Dataset
from holdfast.models.network import BatchNormPolicy, Network, find_classifier, logits_of
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec


def build_network(
    model: ModelSpec | OwnModel | nn.Module, shape: tuple[int, ...], num_outputs: int, seed: int, device: torch.device,
    precision: Precision, classifier: str | None, batchnorm: BatchNormPolicy,
) -> Network:  # fmt: skip
    """The network for samples of that ``shape``; a module of the user's own is copied."""
    dtype, autocast = precision
    if isinstance(model, ModelSpec):
        net = model.build(shape, num_outputs, seed).to(device, dtype)
        return Network(net, classifier, batchnorm, autocast_dtype=autocast)
    if isinstance(model, OwnModel):
        model = model.build(shape, num_outputs, seed)
    net = copy.deepcopy(unwrap_module(model)).to(device, dtype)
    unused = unused_parameters(net, shape, classifier)
    return Network(net, classifier, batchnorm, unused, constant_buffers(net, shape), autocast)


def fit_samples(network: Network, dataset: Dataset) -> Dataset:
    """The data set, with integer samples as floats if the network takes no integers."""
    if dataset.x_train.dtype != torch.int64:
        return dataset
    device = next(iter(network.params.values())).device
    try:
        with torch.no_grad():
            network.apply(network.params, network.buffers, dataset.x_train[:1].to(device))
    except (RuntimeError, TypeError):
        return dataset.with_float_samples
    except (ValueError, IndexError, AttributeError):
        pass  # for instance an index above the embedding's; the check of the model reports it
    return dataset


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # by torch.compile
            module = inner
        else:
            return module


def unused_parameters(module: nn.Module, shape: tuple[int, ...], classifier: str | None) -> frozenset[str]:
    """The names of parameters that require a gradient but get none, on samples of that ``shape``.

    Torch's optimisers do not change them. Empty if the classifier's are among them: that is an error, which the first
    forward pass reports.
    """
    trial = copy.deepcopy(module).train()
    params = {name: p for name, p in trial.named_parameters() if p.requires_grad}
    if not params:
        return frozenset()
    first = next(iter(params.values()))
    unused = set(params)
    for x in _trial_inputs(shape, first):
        try:
            with torch.random.fork_rng([first.device] if first.is_cuda else []):
                loss = logits_of(trial(x)).square().sum()
                grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue  # the first forward pass reports inputs that the model does not accept
        unused -= {name for name, grad in zip(params, grads, strict=True) if grad is not None}
    found = find_classifier(trial, classifier)
    head = set() if found is None else {id(p) for p in found[1].parameters()}
    return frozenset() if any(id(params[name]) in head for name in unused) else frozenset(unused)


def constant_buffers(module: nn.Module, shape: tuple[int, ...]) -> frozenset[str]:
    """The names of buffers that no ``state_dict`` contains and training does not change, such as position ids."""
    names = {name for name, _ in module.named_buffers()} - module.state_dict().keys()
    if not names:
        return frozenset()
    trial = copy.deepcopy(module).train()
    first, runs, changed = next(trial.parameters()), False, set[str]()
    for x in _trial_inputs(shape, first):
        try:
            with torch.no_grad(), torch.random.fork_rng([first.device] if first.is_cuda else []):
                trial(x)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue  # the first forward pass reports inputs that the model does not accept
        runs, after = True, dict(trial.named_buffers())
        changed |= {n for n, b in module.named_buffers() if n in names and not torch.equal(b, after[n])}
    return frozenset(names - changed) if runs else frozenset()


def _trial_inputs(shape: tuple[int, ...], like: Tensor) -> Iterator[Tensor]:
    """Batches of zeros, of normal, of positive and of negative values: a model may use other parameters for each.

    Zeros are also valid indices, for models that begin with an embedding.
    """
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn((4, *shape), generator=rng, dtype=like.dtype).to(like.device)
    yield from (torch.zeros_like(normal), normal, normal.abs(), -normal.abs())
    yield torch.zeros_like(normal, dtype=torch.int64)
