"""Whether a run in a directory can go on: as the one that was begun, from where it was, with all its records."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.settings import DEFAULTS, Role, settings_with, with_current_names
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.metrics_file import plain

IDENTITY = (*settings_with(Role.RESULT), "engine", "hash")
"""What a resumed run must share with the run that was begun."""

CHECKPOINTED = (*IDENTITY, "preprocess", "stream")


def run_identity(described: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of the run that a checkpoint belongs to, as JSON stores it."""
    kept: dict[str, Any] = json.loads(json.dumps({key: plain(described[key]) for key in CHECKPOINTED}))
    return kept


def refuse_change(out: str | Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if a run would be resumed as another one."""
    for key, value in now.items():
        before = then.get(key, DEFAULTS.get(key))
        if before != value:
            name = "federation, by its hash" if key == "hash" else key
            raise HoldfastError(
                f"{out} cannot be resumed with another {name}: it was {before!r}, now it is {value!r}"
            )


def find_checkpoint(directory: RunDirectory, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The last checkpoint; None where the run is to begin."""
    checkpoint = directory.load_checkpoint()
    rounds = [record["round"] for record in directory.records()]
    if checkpoint is None:
        if directory.finished:
            raise HoldfastError(
                f"{directory.path} is finished, but its checkpoint is gone; restore the folder checkpoint/ "
                "from a copy, or move the run away and begin it anew"
            )
        if rounds:
            text = f"{directory.path} has no checkpoint yet: it begins again with round 1"
            warnings.warn(text, HoldfastWarning, stacklevel=4)
        return None
    if "made_of" in checkpoint.meta:
        refuse_change(directory.path, with_current_names(checkpoint.meta["made_of"]), identity)
    if rounds[: checkpoint.round] != list(range(1, checkpoint.round + 1)):
        raise HoldfastError(
            f"{directory.path} has a checkpoint of round {checkpoint.round}, but not the records of all rounds up "
            "to it; restore metrics.jsonl from a copy, or move the run away and begin it anew"
        )
    return checkpoint
