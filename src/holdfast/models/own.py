"""The network of a run, also of a module of the user's own: what is wrapped around it, and what gets no gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from holdfast.models.network import Network, NormPolicy, find_head
from holdfast.models.registry import ModelSpec


def network_of(
    model: ModelSpec | nn.Module, shape: tuple[int, ...], num_classes: int, seed: int, device: torch.device,
    dtype: torch.dtype, classifier: str | None, norm: NormPolicy,
) -> Network:  # fmt: skip
    """The network for samples of that ``shape``; a module of the user's own is left as it is."""
    if isinstance(model, ModelSpec):
        return Network(model.build(shape, num_classes, seed).to(device, dtype), classifier, norm)
    net = copy.deepcopy(unwrapped(model)).to(device, dtype)
    return Network(net, classifier, norm, unused_parameters(net, shape, classifier))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, where it was compiled or made ready for several devices."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # by torch.compile
            module = inner
        else:
            return module


def unused_parameters(module: nn.Module, shape: tuple[int, ...], classifier: str | None) -> frozenset[str]:
    """The names of parameters that ask for a gradient and never get one, on samples of that ``shape``.

    Torch's optimisers leave them as they are. A classifier among them is a mistake, which is told of when it is called.
    """
    trial = copy.deepcopy(module).train()
    asking = {name: p for name, p in trial.named_parameters() if p.requires_grad}
    if not asking:
        return frozenset()
    some = next(iter(asking.values()))
    never = set(asking)
    for x in _inputs(shape, some):
        try:
            with torch.random.fork_rng([some.device] if some.is_cuda else []):
                loss = trial(x).square().sum()
                grads = torch.autograd.grad(loss, list(asking.values()), allow_unused=True)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue  # what the model does not take is told of when it is called
        never -= {name for name, grad in zip(asking, grads, strict=True) if grad is not None}
    head = {id(p) for p in find_head(trial, classifier)[1].parameters()}
    return frozenset() if any(id(asking[name]) in head for name in never) else frozenset(never)


def _inputs(shape: tuple[int, ...], like: Tensor) -> Iterator[Tensor]:
    """Samples of several kinds, since what a model makes use of may depend on values: zeros are indices too."""
    drawn = torch.randn((4, *shape), generator=torch.Generator().manual_seed(0), dtype=like.dtype).to(
        like.device
    )
    yield from (torch.zeros_like(drawn), drawn, drawn.abs(), -drawn.abs())
