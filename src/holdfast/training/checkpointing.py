"""Checkpoints of a run: what they contain, how a run is restored from one, and when it may be resumed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.schema import validate_content
from holdfast.core.settings import DEFAULTS, FORMER_DEFAULTS, Role, settings_with, with_current_names
from holdfast.core.trees import leaves, to_device, unflatten
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Server, Tensors
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.metrics_file import plain
from holdfast.runs.schemas import CheckpointMeta
from holdfast.runs.tensors import State
from holdfast.training.best_round import BestRound

IDENTITY = (*settings_with(Role.RESULT), "engine", "hash")
"""The settings that a resumed run must share with the original one."""

CHECKPOINTED = (*IDENTITY, "preprocess", "stream", "frozen")

HASHES = {"hash": "federation, by its hash", "frozen": "frozen part of the model, by its hash"}


def run_identity(described: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run, as JSON stores it in a checkpoint."""
    kept: dict[str, Any] = json.loads(
        json.dumps({key: plain(described[key]) for key in CHECKPOINTED if key in described})
    )
    return kept


def refuse_change(out: str | Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise an error if the settings of a run differ from those of the checkpoint."""
    for key, value in now.items():
        before = then.get(key, FORMER_DEFAULTS.get(key, DEFAULTS.get(key)))
        if changed := changed_code(before, value):
            raise HoldfastError(
                f"{out} cannot be resumed: {changed} has changed since the run began; restore it, or begin a new run"
            )
        if not is_same(before, value):
            name = HASHES.get(key, key)
            raise HoldfastError(
                f"{out} cannot be resumed with another {name}: it was {before!r}, now it is {value!r}"
            )


def is_same(before: Any, now: Any) -> bool:
    """Whether two recorded values are equal; the folder of user-defined code is ignored."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return bool(before == now)
    # Before version 0.2, records of user-defined code had no source.
    ignored = {"file", "own", "name", "sha256"} if before.get("own") and not now.get("own") else {"file"}
    return before.keys() - ignored == now.keys() - ignored and all(
        is_same(before[key], now[key]) for key in before.keys() - ignored
    )


def changed_code(before: Any, now: Any) -> str:
    """The file or module of user-defined code whose hash differs; empty if none does."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return ""
    if "sha256" in before and "sha256" in now and before["name"] == now["name"]:
        return str(now.get("file", now["name"])) if before["sha256"] != now["sha256"] else ""
    return next(filter(None, (changed_code(before[key], now[key]) for key in before.keys() & now.keys())), "")


def find_checkpoint(directory: RunDirectory, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The last checkpoint to resume from, made for any number of rounds; None if the run starts at round 1."""
    checkpoint = directory.load_checkpoint()
    rounds = [record["round"] for record in directory.records()]
    if checkpoint is None:
        if directory.finished:
            raise HoldfastError(
                f"{directory.path} is finished, but its checkpoint is missing; restore the folder checkpoint/ "
                "from a copy, or move the run away and start it again"
            )
        if rounds:
            text = f"{directory.path} has no checkpoint yet: it begins again with round 1"
            warnings.warn(text, HoldfastWarning, stacklevel=5)
        return None
    validate_content(checkpoint.meta, CheckpointMeta, directory.path / "checkpoint" / "checkpoint.json")
    if "made_of" in checkpoint.meta:
        made_of = with_current_names(checkpoint.meta["made_of"])
        unrecorded = {"frozen": identity.get("frozen")}  # before version 0.2
        refuse_change(directory.path, unrecorded | made_of | {"rounds": identity["rounds"]}, identity)
    if rounds[: checkpoint.round] != list(range(1, checkpoint.round + 1)):
        raise HoldfastError(
            f"{directory.path} has a checkpoint of round {checkpoint.round}, but metrics.jsonl lacks records of "
            "rounds up to it; restore metrics.jsonl from a copy, or move the run away and start it again"
        )
    return checkpoint


Snapshot = tuple[int, State, dict[str, Any], Mapping[int, State]]
"""The arguments of `RunDirectory.save_checkpoint`: round, tensors, metadata, changed client states."""


def snapshot(
    loop: RoundLoop, client_states: StateCache, run_identity: dict[str, Any], best: BestRound, stopped: bool
) -> Snapshot:
    """The content of a checkpoint: the round, tensors on the host, the run's identity, changed client states.

    ``stopped``: whether the run has stopped early.
    """
    server = loop.server
    tensors = dict(leaves({"params": server.params, "buffers": server.buffers, "state": server.state}))
    tensors = {k: v.cpu() for k, v in tensors.items()}
    tensors |= {f"before/{k}": torch.from_numpy(v) for k, v in loop.evaluation_state().items()}
    tensors |= {f"updates/{k}": v for k, v in loop.updates_state().items()} | best.state()
    # After the last round client states are needed only where they contain personal models.
    wanted = not (stopped or server.round == loop.settings.rounds) or _has_own_models(loop)
    meta = {
        "made_of": run_identity,
        "uses_rounds": "rounds" in loop.context.was_read,
        "complete": wanted or not client_states.has_changed,
        **({"stopped_early": True} if stopped else {}),
    }
    return server.round, tensors, meta, client_states.changed() if wanted else {}


def _has_own_models(loop: RoundLoop) -> bool:
    """Whether clients have personal models, for which their states are kept after the last round."""
    hooks = ("initial_params", "personal_params", "personal_logits")
    return any(map(loop.method.overrides, hooks)) or bool(loop.context.network.kept_local)


def close(
    directory: RunDirectory, last: Snapshot | None, model: State, best: State | None, opened: ExitStack
) -> None:
    """Write the last checkpoint, the best model, if there is one, and the final model; release the directory."""
    with opened:
        if last is not None:
            directory.save_checkpoint(*last)
        if best is not None:
            directory.save_best_model(best)
        directory.save_model(model)


def restore(loop: RoundLoop, checkpoint: Checkpoint, device: torch.device, best: BestRound) -> None:
    """Restore the server, the evaluation state and the best round's model from a checkpoint."""
    tree = unflatten(dict(checkpoint.tensors))
    params, buffers, state = (to_device(tree.get(key, {}), device) for key in ("params", "buffers", "state"))
    _refuse_another_model({**params, **buffers}, {**loop.server.params, **loop.server.buffers})
    ended = checkpoint.meta.get("stopped_early", False) or checkpoint.round == loop.settings.rounds
    final = ended and loop.method.overrides("final_statistics")
    loop.server = Server(params, buffers, state, checkpoint.round, final=final)
    loop.restore_updates_state(tree.get("updates", {}))
    loop.restore_evaluation_state({k: v.numpy() for k, v in tree.get("before", {}).items()})
    best.restore(checkpoint.tensors, device)


def _refuse_another_model(then: Tensors, now: Tensors) -> None:
    """Raise an error if the names or shapes of the model's tensors differ from those in the checkpoint."""
    for name in {**then, **now}:
        before, after = (tuple(model[name].shape) if name in model else None for model in (then, now))
        if before != after:
            was, now_is = ("absent" if shape is None else f"of shape {shape}" for shape in (before, after))
            raise HoldfastError(
                f"the run cannot be resumed with another model: '{name}' was {was}, now it is {now_is}"
            )
