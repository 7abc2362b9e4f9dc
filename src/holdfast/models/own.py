"""Modules of the user's own: what is wrapped around them, and what of them has no part in their outputs."""

from __future__ import annotations

import copy

import torch
from torch import nn

from holdfast.models.network import find_head


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
    gpus = [some.device] if some.is_cuda else []
    try:
        with torch.random.fork_rng(gpus):
            out = trial(torch.zeros((2, *shape), dtype=some.dtype, device=some.device))
            grads = torch.autograd.grad(out.square().sum(), list(asking.values()), allow_unused=True)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return frozenset()  # what the model does not take is told of when it is called
    unused = {name for name, grad in zip(asking, grads, strict=True) if grad is None}
    head = {id(p) for p in find_head(trial, classifier)[1].parameters()}
    return frozenset() if any(id(asking[name]) in head for name in unused) else frozenset(unused)
