"""The contract of each hook: the type and shape of its result. A violation is reported in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.core.spec import named
from holdfast.core.trees import Tensors, leaves

if TYPE_CHECKING:
    from holdfast.methods.context import Client

NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool, torch.float16, torch.bfloat16)
"""Dtypes in which sums over many samples, steps or clients overflow or lose digits."""

A_TREE = "a dictionary of tensors, or of such dictionaries, whose keys are strings without '/'"


class Violation(Exception):
    """An invalid result of a hook; the message completes the sentence "NAME: HOOK …"."""


def _returns(found: str, expected: str) -> Violation:
    return Violation(f"returns {found}; it must return {expected}")


def _kind(value: object) -> str:
    return "None" if value is None else named(value)


def _shape(value: Tensor) -> str:
    return str(tuple(value.shape))


def _scalar(value: Any, expected: str) -> None:
    if not isinstance(value, Tensor):
        raise _returns(_kind(value), expected)
    if value.dim() or not value.is_floating_point():
        raise _returns(f"a tensor of shape {_shape(value)} and dtype {value.dtype}", expected)


def _number(value: Any, expected: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, Tensor) and value.dim() == 0:
        value, number = float(value), True
    if not number or not math.isfinite(value) or value < 0:
        raise _returns(str(value) if number else _kind(value), expected)


def _tree(value: Any, path: str = "", constant: bool = True) -> None:
    """A nested dictionary of tensors, without gradients if ``constant``."""
    if not isinstance(value, dict):
        raise _returns(f"{_kind(value)}{f' as {path[:-1]!r}' if path else ''}", A_TREE)
    for key, item in value.items():
        if not isinstance(key, str) or "/" in key:
            raise _returns(f"a dictionary with the key {key!r}", A_TREE)
        if isinstance(item, dict):
            _tree(item, f"{path}{key}/", constant)
        elif not isinstance(item, Tensor):
            hint = "; context.scalar(...) makes a tensor of a number" if isinstance(item, int | float) else ""
            raise _returns(f"{_kind(item)} as '{key}'", A_TREE + hint)
        elif constant and item.requires_grad and not in_transform():
            raise Violation(
                f"returns '{path}{key}' with a gradient: training would flow through a value that must stay fixed, "
                "such as a teacher's, or that is a trained weight itself; return a copy with .detach().clone()"
            )


def _like(value: Any, expected: Mapping[str, Tensor], what: str, partial: bool = False) -> None:
    """A flat dictionary with the names, shapes and dtypes of ``expected``; with ``partial``, some of them."""
    if not isinstance(value, dict):
        raise _returns(_kind(value), f"a dictionary of tensors by name, {what}")
    missing = [] if partial else [name for name in expected if name not in value]
    unknown = [name for name in value if name not in expected]
    if missing or unknown:
        found = f"no '{missing[0]}'" if missing else f"'{unknown[0]}', which is not one of them"
        raise _returns(found, f"exactly {what}" if not partial else what)
    for name, tensor in value.items():
        like = expected[name]
        if not isinstance(tensor, Tensor):
            raise _returns(f"{_kind(tensor)} as '{name}'", f"tensors, {what}")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            found = f"'{name}' with shape {_shape(tensor)} and dtype {tensor.dtype}"
            raise _returns(found, f"{what}, here {_shape(like)} and {like.dtype}")


WEIGHTS = "the names, shapes and dtypes of the model's parameters"


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise _returns(_kind(value), f"a pair ({what})")
    return value


def _weights_and_carry(result: Any, params: Tensors, carry: Any) -> None:
    weights, new = _pair(result, "weights, carry")
    _like(weights, params, WEIGHTS, partial=True)
    _tree(new)
    before, after = dict(leaves(carry)), dict(leaves(new))
    _like(after, before, "the names, shapes and dtypes of the carry that it received")
    if in_transform():
        return
    addresses = {p.untyped_storage().data_ptr() for p in params.values()}
    for name, value in after.items():
        if value is not before[name] and value.untyped_storage().data_ptr() in addresses:
            raise Violation(
                f"returns the weights themselves as '{name}' of the carry, which change in the next step; return a "
                "copy with .clone()"
            )


def _step(result: Any, params: Tensors, carry: Any) -> None:
    if isinstance(result, tuple):
        _weights_and_carry(result, params, carry)
    elif result is not None:
        _like(result, params, WEIGHTS, partial=True)


def _sums(value: Any) -> None:
    _tree(value)
    for path, tensor in leaves(value):
        if tensor.dtype in NARROW:
            raise Violation(
                f"returns '{path}' as {tensor.dtype} to be summed over clients, which overflows or loses digits; "
                "return int64, float32 or float64"
            )


def _scores(result: Any, out: Any) -> None:
    if not isinstance(result, Tensor) or result.dim() == 0 or len(result) != len(out.logits):
        found = f"a tensor of shape {_shape(result)}" if isinstance(result, Tensor) else _kind(result)
        raise _returns(found, f"scores for each of the {len(out.logits)} samples of the batch")


def _tables(result: Any, client: Client) -> None:
    _tree(result)
    for name, values in result.items():
        if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != client.samples:
            found = _shape(values) if isinstance(values, Tensor) else _kind(values)
            raise _returns(f"{found} as '{name}'", f"arrays of the client's {client.samples} samples")


def _model(result: Any, params: Tensors, buffers: Tensors) -> None:
    """All parameters, and the buffers if they differ."""
    _tree(result)
    missing = [name for name in params if name not in result]
    if missing:
        raise _returns(f"no '{missing[0]}'", "all parameters of the model")
    _like(result, {**params, **buffers}, f"{WEIGHTS} and buffers", partial=True)


def _server(result: Any, server: Any) -> None:
    if type(result) is not type(server):
        raise _returns(_kind(result), "a Server")
    _like(result.params, server.params, WEIGHTS)
    _tree(result.state)


def _loss(result: Any) -> None:
    if result is not None:
        _scalar(result, "a scalar floating-point tensor, or None for no term")


def _client_final(result: Any) -> None:
    sums, state = _pair(result, "sums, the client's new state")
    _sums(sums)
    _tree(state)


def _aggregate(result: Any, server: Any) -> None:
    params, state = _pair(result, "parameters, server state")
    _like(params, server.params, WEIGHTS, partial=True)  # the round loop raises the error
    _tree(state)


def _statistics(result: Any) -> None:
    if result is not None:
        _sums(result)


def _extra_inputs(result: Any) -> None:
    if result is not None and (not isinstance(result, Tensor) or result.dim() == 0):
        raise _returns(_kind(result), "a tensor of inputs [E, ...], or None")


def _rate(result: Any) -> None:
    if result is not None:
        _number(result, "a learning rate of at least 0, or None for the run's")


CONTRACTS: dict[str, Callable[[Any, tuple[Any, ...]], None]] = {
    "init_server_state": lambda result, _: _tree(result),
    "begin_round": lambda result, _: _tree(result),
    "broadcast": lambda result, _: _tree(result),
    "broadcast_to": lambda result, _: _tree(result),
    "init_client_state": lambda result, _: _tree(result),
    "initial_params": lambda result, args: _like(result, args[0], WEIGHTS),
    "client_init": lambda result, _: _tree(result),
    "tables": lambda result, args: _tables(result, args[2]),
    "teacher": lambda result, args: _model(result, args[3].global_params, args[3].buffers),
    "extra_inputs": lambda result, _: _extra_inputs(result),
    "task_loss": lambda result, _: _scalar(result, "a scalar floating-point tensor"),
    "loss": lambda result, _: _loss(result),
    "ascent_loss": lambda result, _: _loss(result),
    "perturb": lambda result, args: _weights_and_carry(result, args[2].params, args[1]),
    "edit_gradient": lambda result, args: _like(result, args[0], WEIGHTS),
    "proximal_mu": lambda result, _: _number(result, "a number of at least 0"),
    "learning_rate": lambda result, _: _rate(result),
    "step": lambda result, args: _step(result, args[1], args[3]),
    "after_step": lambda result, args: _weights_and_carry(result, args[0], args[3]),
    "after_epoch": lambda result, args: _weights_and_carry(result, args[0], args[1]),
    "upload_params": lambda result, _: _tree(result),  # an upload that does not fit the model is an incident
    "client_final": lambda result, _: _client_final(result),
    "client_weight": lambda result, _: _number(result, "a number of at least 0"),
    "aggregate": lambda result, args: _aggregate(result, args[0]),
    "update": lambda result, _: _tree(result),
    "refine": lambda result, args: _server(result, args[0]),
    "eval_params": lambda result, args: _model(result, args[0].params, args[0].buffers),
    "global_logits": lambda result, args: _scores(result, args[0]),
    "personal_logits": lambda result, args: _scores(result, args[0]),
    "personal_params": lambda result, args: _like(result, args[0].params, WEIGHTS),
    "prototype_logits": lambda result, args: _scores(result, args[0]),
    "final_statistics": lambda result, _: _statistics(result),
    "finalize": lambda result, args: _server(result, args[0]),
}
"""For each hook, the check of its result; the second argument are the hook's own, without ``self``."""


def in_transform() -> bool:
    """Whether this runs inside ``vmap`` or ``grad`` of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None
