"""The requirements of a cell: its data sets and its estimated running time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.data.mixed import DIGIT_DOMAINS
from holdfast.data.sources import DATASETS, describe
from holdfast.papers.cells import Cell
from holdfast.papers.measures import Entry
from holdfast.training.experiment_entries import MIXED_DIGITS

MICROSECONDS = {
    "holdfast.papers.models:flamby_linear": 1,
    "fa-fmnist": 2,
    "fa-validation-fmnist": 2,
    "mlp-cnn5": 3,
    "cnn": 3,
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
"""Time to train a model on one image on a large GPU, a guess that is used until a run of the model is stored."""

SITES = {"heart-disease": 4, "tcga-brca": 6}
"""The clients of real federations, where the tables do not state their number."""

CPU_SLOWDOWN = 100  # a guess too: how many times longer a CPU takes than a GPU

ROUND_SECONDS = 0.1  # of a round, in addition to training: sampling, aggregation, evaluation
DIGITS_PER_DOMAIN = 7430


def data_sets(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The data sets that a cell reads: one, or the domains of a mixture."""
    name, _, domains = settings["data"].partition(":")
    if name != MIXED_DIGITS:
        return (settings["data"],)
    return tuple(domains.split(",")) if domains else DIGIT_DOMAINS


def available_data() -> set[str]:
    """The data sets whose files are on this machine."""
    return {str(row["name"]) for row in describe() if row["found"]}


def missing_requirement(cell: Cell, available: Collection[str]) -> str | None:
    """The missing requirement of a cell, such as ``needs data: mnist``; None if there is none."""
    if cell.needs is not None:
        return f"needs {cell.needs}"
    missing = [name for name in data_sets(cell.settings) if name not in available and not Path(name).exists()]
    return f"needs data: {', '.join(missing)}" if missing else None


def images_trained(settings: Mapping[str, Any]) -> float:
    """The number of images on which a run trains, repetitions included; 0 for data of unknown size."""
    names = data_sets(settings)
    if settings.get("local_steps"):
        clients = settings.get("clients_per_round") or settings.get("clients") or SITES.get(names[0], 0)
        return float(settings["rounds"] * clients * settings["local_steps"] * settings["batch_size"])
    known = [
        DIGITS_PER_DOMAIN if len(names) > 1 else DATASETS[name].train for name in names if name in DATASETS
    ]
    total = sum(known) * (1 - settings.get("public", 0.0))
    if "long_tail" in settings:
        total *= (1 + settings["long_tail"]) / 2
    stream = str(settings.get("stream", "1"))
    stages = 1 if stream.startswith("removal:") else int(re.split(r"\D", stream)[0])
    if "cumulative=true" in stream:  # stage s has the data of s stages
        total *= (stages + 1) / 2
    clients = settings.get("clients", 1)  # none where every site is a client, and all of them take part
    share = (settings.get("clients_per_round") or clients) / clients / stages
    return float(total * share * settings.get("local_epochs", 1) * settings["rounds"])


class Estimates:
    """Estimated running times on a GPU or a CPU.

    An estimate follows the fastest stored run with the same model on that type of device, because later versions are
    faster; without such a run it follows `MICROSECONDS`.
    """

    def __init__(self, entries: Iterable[Entry], device: str = "cuda") -> None:
        self.slowdown = 1 if device == "cuda" else CPU_SLOWDOWN
        self.seconds_per_image: dict[tuple[str, ...], float] = {}
        for entry in entries:
            # Without the number of concurrent processes, the time of one run alone is unknown.
            if entry["device_type"] != device or "beside" not in entry:
                continue
            if images := images_trained(entry["settings"]):
                seconds = entry["seconds"] / entry["beside"] / images
                for key in _keys(entry["settings"]):
                    self.seconds_per_image[key] = min(seconds, self.seconds_per_image.get(key, seconds))

    def seconds(self, cell: Cell) -> float:
        """The seconds of the device that a cell takes."""
        settings = cell.settings
        for key in _keys(settings):
            if key in self.seconds_per_image:
                return self.seconds_per_image[key] * images_trained(settings)
        per_image = MICROSECONDS[str(settings["model"])] * 1e-6
        return ROUND_SECONDS * float(settings["rounds"]) + self.slowdown * per_image * images_trained(
            settings
        )


def _keys(settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The keys that determine a run's speed, the most specific first."""
    model, method = str(settings["model"]), re.split(r"[:+]", str(settings["method"]))[0]
    return [(model, method), (model,)]
