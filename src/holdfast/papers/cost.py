"""What a cell needs before it is run: data, and time on a GPU."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.data.mixed import DIGIT_DOMAINS
from holdfast.data.sources import DATASETS, describe
from holdfast.papers.cells import Cell
from holdfast.papers.measures import Entry
from holdfast.training.experiment import MIXED_DIGITS

MICROSECONDS = {
    "fa-fmnist": 2,
    "fa-validation-fmnist": 2,
    "mlp-cnn5": 3,
    "t-cnn": 3,
    "ntd-mnist": 3,
    "ntd-cifar": 4,
    "fa-cifar10": 4,
    "fa-validation-digits": 4,
    "fa-digits": 15,
    "mlp-resnet18": 12,
    "resnet50": 200,
    "fa-cifar100": 300,
}
"""For one image in one local epoch on a large GPU, a guess for as long as no run with this model is stored."""

ON_A_CPU = 100  # times as long, likewise a guess

ROUND_SECONDS = 0.1  # of a round beside its training: sampling, merging, testing
DIGITS_PER_DOMAIN = 7430


def data_sets(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The data sets a cell reads: one, or the domains of a mixture."""
    name, _, domains = settings["data"].partition(":")
    if name != MIXED_DIGITS:
        return (settings["data"],)
    return tuple(domains.split(",")) if domains else DIGIT_DOMAINS


def available_data() -> set[str]:
    """The data sets whose files are here."""
    return {str(row["name"]) for row in describe() if row["found"]}


def lacking(cell: Cell, available: Collection[str]) -> str | None:
    """What keeps a cell from being run, in a few words, or None."""
    if cell.needs is not None:
        return f"needs {cell.needs}"
    missing = [name for name in data_sets(cell.settings) if name not in available and not Path(name).exists()]
    return f"needs data: {', '.join(missing)}" if missing else None


def images(settings: Mapping[str, Any]) -> float:
    """How many times an image is trained on in a whole run, about."""
    names = data_sets(settings)
    known = [
        DIGITS_PER_DOMAIN if len(names) > 1 else DATASETS[name].train for name in names if name in DATASETS
    ]
    total = sum(known) * (1 - settings.get("public", 0.0))
    if "long_tail" in settings:
        total *= (1 + settings["long_tail"]) / 2
    stream = str(settings.get("stream", "1"))
    stages = int(re.split(r"\D", stream)[0])
    if "cumulative=true" in stream:  # stage s has the data of s stages
        total *= (stages + 1) / 2
    clients = settings["clients"]
    share = (settings.get("clients_per_round") or clients) / clients / stages
    return float(total * share * settings["local_epochs"] * settings["rounds"])


class Estimates:
    """Seconds on a GPU, or on a CPU: by what the fastest run with the same model took there, as later versions are
    faster; else by `MICROSECONDS`."""

    def __init__(self, entries: Iterable[Entry], device: str = "cuda") -> None:
        self.slower = 1 if device == "cuda" else ON_A_CPU
        self.measured: dict[tuple[str, ...], list[float]] = {}
        for entry in entries:
            # Runs that do not say how many they ran beside say little of what one takes.
            if entry["device_type"] == device and "beside" in entry and (count := images(entry["settings"])):
                alone = entry["seconds"] / entry["beside"]
                for key in _keys(entry["settings"]):
                    self.measured.setdefault(key, []).append(alone / count)

    def seconds(self, cell: Cell) -> float:
        """Of the device that one cell takes."""
        settings = cell.settings
        for key in _keys(settings):
            if key in self.measured:
                return min(self.measured[key]) * images(settings)
        per_image = MICROSECONDS[str(settings["model"])] * 1e-6
        return ROUND_SECONDS * float(settings["rounds"]) + self.slower * per_image * images(settings)


def _keys(settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What makes runs alike in speed, the most alike first."""
    model, method = str(settings["model"]), re.split(r"[:+]", str(settings["method"]))[0]
    return [(model, method), (model,)]
