"""Guarded hooks: an error inside a user-defined hook is reported as one sentence that names the hook.

`Method` wraps the hooks of classes that are not part of Holdfast. The wrapper reports an exception, a result that
violates the hook's contract, and an in-place change of an argument; inside ``torch.func.vmap`` it checks only results.
"""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.methods.contracts import CONTRACTS, Violation, in_transform

_Fields = dict[str, tuple[str, ...]]
_EVERYTHING: _Fields = {
    "Output": ("features", "logits", "extra"),
    "Batch": ("x", "y", "epoch", "mask", "teacher", "table"),
    "Local": ("params", "global_params"),
    "Client": ("global_params", "buffers", "context"),
    "RunContext": ("network", "public_x", "public_y"),
    "Network": ("params", "buffers"),
}
"""The fields of a hook's arguments that hold tensors which the hook must not change, by class."""

_SERVER_HALF = ("begin_round", "broadcast", "broadcast_to", "aggregate", "update", "refine", "finalize")
_GLOBAL_MODEL: _Fields = {"Server": ("params", "buffers")}
"""The same for hooks of the server, which may change their other arguments; the global model may be under test."""

VMAP_REASONS = {
    "data-dependent control flow": "branches on a tensor's value or reads it by item(), float() or int(); use "
    "torch.where, or keep it a tensor",
    ".item()": "reads a tensor's value by item(), float() or int(); keep it a tensor",
    "data pointer of Tensor": "converts a tensor to NumPy or to a list; use torch's operations",
    "random operation": "draws random numbers; draw them in client_init or tables, with client.generator(...)",
    "dynamic shape": "makes a tensor whose shape depends on values, as boolean indexing does; use torch.where or a "
    "mask",
    "requires_grad_()": "calls requires_grad_ or autograd.grad; use torch.func.grad, or the hook step",
    "setup_context": "uses a torch.autograd.Function without setup_context and generate_vmap_rule",
    "being vmapped over": "writes in place to a tensor of its own; use operations that return a new tensor",
}
"""Parts of ``torch.func.vmap``'s messages, and the cause in the hook."""


class HookError(HoldfastError):
    """A hook failed; ``problem`` completes the sentence "NAME: HOOK …"."""

    def __init__(self, method: str, hook: str, problem: str) -> None:
        super().__init__(f"{method}: {hook} {problem}")
        self.method, self.hook, self.problem = method, hook, problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.method, self.hook, self.problem)


_draws: ContextVar[list[str] | None] = ContextVar("draws", default=None)


@contextmanager
def watching_draws() -> Iterator[list[str]]:
    """Collect the names of the hooks that draw from a global random generator in this context."""
    hooks: list[str] = []
    token = _draws.set(hooks)
    try:
        yield hooks
    finally:
        _draws.reset(token)


def guard_hooks(kind: type) -> None:
    """Guard the hooks that a class defines."""
    for hook in CONTRACTS.keys() & vars(kind).keys():
        function = vars(kind)[hook]
        if inspect.isfunction(function) and not hasattr(function, "__guarded__"):
            setattr(kind, hook, _guarded(hook, function))


def _guarded(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check, names = CONTRACTS[hook], list(inspect.signature(function).parameters)[1:]
    constant = _GLOBAL_MODEL if hook in _SERVER_HALF else _EVERYTHING

    @wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name, watched = self.name, _draws.get()
        plain = not in_transform()
        before = list(_versions(names, args, constant)) if plain else []
        generators = _generator_states() if plain and watched is not None else None
        try:
            result = function(self, *args, **kwargs)
            if not kwargs:  # Holdfast calls hooks with positional arguments
                check(result, args)
        except HoldfastError:
            raise
        except Violation as violation:
            raise HookError(name, hook, str(violation)) from None
        except Exception as error:
            raise HookError(name, hook, _problem(error, function)) from error
        for path, tensor, version in before:
            if tensor._version != version:
                raise HookError(name, hook, f"changes {path} in place; change a copy, {path}.clone()")
        if watched is not None and generators is not None and _changed(generators) and hook not in watched:
            watched.append(hook)
        return result

    call.__guarded__ = True  # type: ignore[attr-defined]
    return call


def _problem(error: Exception, function: Callable[..., Any]) -> str:
    """The error, with the line of the hook's own file."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename == function.__code__.co_filename
    ]
    if in_transform():
        if any("one_hot(" in (frame.line or "") for frame in frames[-1:]):
            return "calls one_hot, which reads values; use batch.members(number of classes)"
        reason = vmap_reason(message)
        if reason is not None:
            return reason
    where = f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return f"raises {type(error).__name__}{where}: {message.rstrip('.')}"


def vmap_reason(message: str) -> str | None:
    """The cause of this message of torch.func.vmap; None for other messages."""
    return next((reason for part, reason in VMAP_REASONS.items() if part in message), None)


def _versions(names: list[str], args: tuple[Any, ...], fields: _Fields) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors of the arguments that the hook must not change, with torch's counters of their changes."""
    for name, value in zip(names, args, strict=False):
        for path, tensor in _tensors(value, name, fields):
            if not tensor.is_inference():
                yield path, tensor, tensor._version


def _tensors(value: Any, path: str, fields: _Fields) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}['{key}']", fields)
    else:
        for field in fields.get(type(value).__name__, ()):
            yield from _tensors(getattr(value, field), f"{path}.{field}", fields)


def _generator_states() -> list[Any]:
    numpy_state = np.random.get_state(legacy=False)["state"]
    states = [
        torch.get_rng_state(),
        torch.from_numpy(numpy_state["key"]),
        numpy_state["pos"],
        random.getstate(),
    ]
    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [*states, torch.cuda.get_rng_state()] if on_gpu else states


def _changed(before: list[Any]) -> bool:
    pairs = zip(before, _generator_states(), strict=True)
    return any(not torch.equal(a, b) if isinstance(a, Tensor) else a != b for a, b in pairs)
