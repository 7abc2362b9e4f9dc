"""The folder of a search, with a file that describes the search and prevents mixing with another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core import files, yaml12
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Role, settings_with
from holdfast.data.federation import Federation
from holdfast.runs.metrics_file import plain
from holdfast.training.checkpointing import is_same
from holdfast.training.experiment import Experiment

MAY_DIFFER = settings_with(Role.MACHINE, Role.LIMIT)


def claim(
    folder: Path, kind: str, experiment: Experiment, more: Mapping[str, Any], federation: Federation
) -> None:
    """Write ``KIND.yaml`` into the folder, or raise if it describes another search than this one.

    ``more`` are further settings besides those of the experiment.
    """
    path = folder / f"{kind}.yaml"
    here = plain({"experiment": experiment.describe(), **more, "hash": federation.hash})
    if path.exists():
        _refuse_another(path, kind, here)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.replace(path, yaml12.dump(here).encode())


def _refuse_another(path: Path, kind: str, here: Mapping[str, Any]) -> None:
    with files.reading(path):
        data = path.read_bytes()
    try:
        there = yaml12.load(data)
        before, now = (
            {**each["experiment"], **{key: each.get(key) for key in here if key != "experiment"}}
            for each in (there, here)
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise HoldfastError(
            f"{path} is damaged: it does not describe a {kind}; choose another --out"
        ) from None
    for key, value in now.items():
        if key not in MAY_DIFFER and not is_same(before.get(key), value):
            other = (
                "on another federation"
                if key == "hash"
                else f"with another {key}: {before.get(key)!r}, not {value!r}"
            )
            raise HoldfastError(f"{path.parent} holds a {kind} {other}; choose another --out")
