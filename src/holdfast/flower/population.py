"""Descriptions of the clients' data for the server, which never receives it: samples per client, stage and class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from flwr.app import Message

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.schedules import StageSchedule
from holdfast.flower.messages import ConfigReader, tree_from_record
from holdfast.flower.wire import WireError

MAX_DESCRIPTION = 1 << 20  # characters


@dataclass(frozen=True, eq=False)
class SiteReport:
    """The clients of one node and the properties of its data."""

    clients: list[int]
    counts: np.ndarray  # int64 [clients, stages, C]: samples that arrive, by class
    leaves: np.ndarray  # int64 [clients] or empty
    cumulative: bool
    bounds: tuple[float, float]
    shape: list[int]
    preprocess: str
    dataset: str  # described by `describe_dataset`
    validation: np.ndarray  # int64 [clients]: the validation samples of each
    defined: np.ndarray  # int64 [clients, metrics]: whether these define a metric

    @staticmethod
    def properties(reply: Message) -> ConfigReader:
        """The report's values that are not arrays."""
        return ConfigReader(reply.content, "properties")

    @classmethod
    def from_message(cls, reply: Message, num_classes: int) -> Self:
        """The report in a node's reply; an invalid one raises a `WireError`."""
        arrays = tree_from_record(reply.content, "clients")
        found = {name: value.numpy() for name, value in arrays.items() if isinstance(value, torch.Tensor)}
        if not found.keys() >= {"clients", "counts"} or any(v.dtype != np.int64 for v in found.values()):
            raise WireError("wrong keys", "a site's report needs clients and counts, in whole numbers")
        clients, counts = found["clients"], found["counts"]
        leaves = found.get("leaves", np.empty(0, np.int64))
        valid = clients.ndim == 1 and counts.ndim == 3 and counts.shape[::2] == (len(clients), num_classes)
        valid = valid and counts.shape[1] >= 1 and leaves.shape in ((0,), (len(clients),))
        if not valid or min(clients.min(initial=0), counts.min(initial=0), leaves.min(initial=0)) < 0:
            raise WireError(
                "wrong shape", f"a site's counts must have shape [clients, stages, {num_classes}]"
            )
        # The sum is taken in floating point, which does not wrap around.
        if counts.sum(dtype=np.float64) >= 1 << 40 or len(set(clients.tolist())) < len(clients):
            raise WireError("absurd size", "a site's report counts more samples or clients than there can be")
        nothing = np.zeros((len(clients), 0), np.int64)
        validation, defined = found.get("validation", np.zeros_like(clients)), found.get("defined", nothing)
        if validation.shape != clients.shape or defined.ndim != 2 or len(defined) != len(clients):
            raise WireError(
                "wrong shape", "a site's validation samples must be counted for each of its clients"
            )
        if validation.min(initial=0) < 0 or validation.sum(dtype=np.float64) >= 1 << 40:
            raise WireError("absurd size", "a site's report counts more samples or clients than there can be")
        properties = cls.properties(reply)
        low, high = properties.numbers("bounds", 2)
        return cls(
            clients.tolist(),
            counts,
            leaves,
            bool(properties.integer("cumulative", 0, 1)),
            (low, high),
            properties.integers("shape"),
            properties.text("preprocess"),
            properties.text("dataset", MAX_DESCRIPTION),
            validation,
            defined,
        )


@dataclass(frozen=True, eq=False)
class Population:
    """All clients, numbered from 0, as described by the reports of their sites."""

    run: str  # id of the run, 32 hexadecimal digits, under which sites store client states
    counts: np.ndarray  # int64 [clients, stages, C]
    leaves: np.ndarray
    cumulative: bool
    bounds: tuple[float, float]
    validation: np.ndarray  # int64 [clients]
    defined: np.ndarray  # int64 [clients, metrics]

    @classmethod
    def from_reports(cls, run: str, reports: Mapping[int, SiteReport]) -> Self:
        """Combine the reports of each client's site."""
        first = reports[0]
        for client, report in reports.items():
            same_stages = report.counts.shape[1:] == first.counts.shape[1:]
            if not same_stages or report.cumulative != first.cumulative:
                raise HoldfastError(
                    f"client {client} has different stages from client 0; all clients must have the same stages"
                )
        rows = [(report, report.clients.index(k)) for k, report in sorted(reports.items())]
        leaves = np.array([report.leaves[row] for report, row in rows] if len(first.leaves) else [], np.int64)
        lowest, highest = zip(*(report.bounds for report in reports.values()), strict=True)
        counts = np.stack([report.counts[row] for report, row in rows])
        if len({report.defined.shape[1] for report in reports.values()}) > 1:
            raise HoldfastError("only some sites hold out validation samples; either all sites or none must")
        validation = np.array([report.validation[row] for report, row in rows], np.int64)
        defined = np.stack([report.defined[row] for report, row in rows])
        ends = (min(lowest), max(highest))
        return cls(run, counts, leaves, first.cumulative, ends, validation, defined)

    def save(self, path: Path) -> None:
        """Write the population to a file, so that a resumed run need not wait for every site."""
        content = {
            "run": self.run,
            "counts": self.counts.tolist(),
            "leaves": self.leaves.tolist(),
            "cumulative": self.cumulative,
            "bounds": list(self.bounds),
            "validation": self.validation.tolist(),
            "defined": self.defined.tolist(),
        }
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps(content).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote."""
        with files.reading(path):
            data = path.read_bytes()
        try:
            content = json.loads(data)
            counts = np.array(content["counts"], np.int64)
            validation = np.array(content.get("validation", [0] * len(counts)), np.int64)
            return cls(
                content["run"],
                counts,
                np.array(content["leaves"], np.int64),
                content["cumulative"],
                (content["bounds"][0], content["bounds"][1]),
                validation,
                np.array(content.get("defined", []), np.int64).reshape(len(counts), -1),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise HoldfastError(f"{path} is damaged: it does not describe a population ({error})") from None

    def federation(self, dataset: Dataset, schedule: StageSchedule | None) -> Federation:
        """A federation whose clients' samples have classes, but neither content nor targets.

        ``dataset`` is the server's. The sample ids are, in this order: its training samples, which are public; two
        samples, all of whose values are the smallest and the largest possible; and the clients' samples, by client,
        stage and class.
        """
        public = len(dataset.y_train)
        extremes = torch.stack(
            [dataset.x_test.new_full(dataset.shape, value) for value in self.value_bounds(dataset)]
        )
        cells = np.tile(np.arange(self.counts.shape[2]), self.counts.shape[0] * self.counts.shape[1])
        client_labels = np.repeat(cells, self.counts.ravel())
        labels = np.concatenate([dataset.strata_train, [0, 0], client_labels]).astype(np.int64)
        unknown = dataset.y_train.new_zeros((2 + len(client_labels), *dataset.y_train.shape[1:]))
        labelled = replace(
            dataset,
            x_train=torch.cat([dataset.x_train, extremes]),
            y_train=torch.cat([dataset.y_train, unknown]),
            given_strata=labels,
            groups={},
        )
        sizes = self.counts.sum(2).ravel()
        return Federation(
            labelled,
            np.arange(public + 2, len(labels)),
            np.concatenate([[0], np.cumsum(sizes)]),
            self.counts.shape[1],
            np.arange(public),
            {"name": "given", "clients": len(self.counts)},
            schedule,
            self.cumulative,
            self.leaves,
        )

    def value_bounds(self, dataset: Dataset) -> tuple[float, float]:
        """The smallest and largest value that a sample can have."""
        return (0.0, 255.0) if dataset.x_test.dtype == torch.uint8 else self.bounds

    def locate(self, position: int) -> dict[str, int]:
        """Client, stage and class of the clients' sample at ``position``, and its rank among those of this class."""
        ends = np.cumsum(self.counts.ravel())
        cell = int(np.searchsorted(ends, position, side="right"))
        client, stage, label = np.unravel_index(cell, self.counts.shape)
        rank = position - (int(ends[cell - 1]) if cell else 0)
        return {"client": int(client), "stage": int(stage), "label": int(label), "rank": rank}


def format_clients(clients: Sequence[int]) -> str:
    """At most ten numbers, and the count of the others: ``0, 1, 2``."""
    shown = ", ".join(map(str, clients[:10]))
    return shown if len(clients) <= 10 else f"{shown} and {len(clients) - 10} more"
