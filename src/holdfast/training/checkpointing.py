"""Between a run in memory and its directory: what a checkpoint holds, how it is taken up, how a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import leaves, to_device, unflatten
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Server, Tensors
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.tensors import State

Snapshot = tuple[int, State, dict[str, Any], Mapping[int, State]]  # what `save_checkpoint` takes


def snapshot(loop: RoundLoop, client_states: StateCache, run_identity: dict[str, Any]) -> Snapshot:
    """What a checkpoint holds: the round, tensors on the host, what the run is made of, and what clients remember."""
    server = loop.server
    tensors = dict(leaves({"params": server.params, "buffers": server.buffers, "state": server.state}))
    tensors = {k: v.cpu() for k, v in tensors.items()}
    tensors |= {f"before/{k}": torch.from_numpy(v) for k, v in loop.evaluation_state().items()}
    # Nobody trains again after the last round: what is still of use then are models of the clients' own.
    own_models = loop.method.overrides("initial_params") or loop.method.overrides("personal_logits")
    wanted = server.round < loop.settings.rounds or own_models
    return server.round, tensors, {"made_of": run_identity}, client_states.changed() if wanted else {}


def close(directory: RunDirectory, last: Snapshot | None, model: State, opened: ExitStack) -> None:
    """Write the last checkpoint and the final model, and let go of the directory."""
    with opened:
        if last is not None:
            directory.save_checkpoint(*last)
        directory.save_model(model)


def restore(loop: RoundLoop, checkpoint: Checkpoint, device: torch.device) -> None:
    """Put the server where the checkpoint left it."""
    tree = unflatten(dict(checkpoint.tensors))
    params, buffers, state = (to_device(tree.get(key, {}), device) for key in ("params", "buffers", "state"))
    _refuse_another_model({**params, **buffers}, {**loop.server.params, **loop.server.buffers})
    loop.server = Server(params, buffers, state, checkpoint.round)
    loop.restore_evaluation_state({k: v.numpy() for k, v in tree.get("before", {}).items()})


def _refuse_another_model(then: Tensors, now: Tensors) -> None:
    """Refuse to go on with a module of the user's own that is not the one the run was begun with."""
    for name in {**then, **now}:
        before, after = (tuple(model[name].shape) if name in model else None for model in (then, now))
        if before != after:
            was, now_is = ("not there" if shape is None else f"of shape {shape}" for shape in (before, after))
            raise HoldfastError(
                f"the run cannot be resumed with another model: '{name}' was {was}, now it is {now_is}"
            )
