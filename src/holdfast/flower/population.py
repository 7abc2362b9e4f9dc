"""What the server knows of clients whose samples it never sees: how many of each class, and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from flwr.app import Message

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.schedules import StageSchedule
from holdfast.flower.messages import FieldReader, tree_of
from holdfast.flower.wire import WireError


@dataclass(frozen=True, eq=False)
class SiteReport:
    """What one node says of itself."""

    clients: list[int]
    counts: np.ndarray  # int64 [clients, stages, C]: samples that arrive, by class
    leaves: np.ndarray  # int64 [clients] or empty
    cumulative: bool
    bounds: tuple[float, float]
    shape: list[int]
    preprocess: str

    @classmethod
    def read(cls, reply: Message, classes: int) -> Self:
        """The report in a reply; `WireError` where it makes no sense."""
        facts, site = FieldReader(reply.content, "facts"), tree_of(reply.content, "site")
        whole = {name: value.numpy() for name, value in site.items() if isinstance(value, torch.Tensor)}
        if not whole.keys() >= {"clients", "counts"} or any(v.dtype != np.int64 for v in whole.values()):
            raise WireError("wrong keys", "a site's report needs clients and counts, in whole numbers")
        clients, counts, leaves = (
            whole["clients"],
            whole["counts"],
            whole.get("leaves", np.empty(0, np.int64)),
        )
        right = clients.ndim == 1 and counts.ndim == 3 and counts.shape[::2] == (len(clients), classes)
        right = right and counts.shape[1] >= 1 and leaves.shape in ((0,), (len(clients),))
        if not right or min(clients.min(initial=0), counts.min(initial=0), leaves.min(initial=0)) < 0:
            raise WireError("wrong shape", f"a site's counts must be of [clients, stages, {classes}]")
        # In floating point, where a sum does not wrap around.
        if counts.sum(dtype=np.float64) >= 1 << 40 or len(set(clients.tolist())) < len(clients):
            raise WireError("absurd size", "a site's report counts more than there can be")
        low, high = facts.numbers("bounds", 2)
        return cls(
            clients.tolist(),
            counts,
            leaves,
            bool(facts.whole("cumulative", 0, 1)),
            (low, high),
            facts.wholes("shape"),
            facts.text("preprocess"),
        )


@dataclass(frozen=True, eq=False)
class Population:
    """All clients, numbered from 0, as their sites described them."""

    run: str  # 32 hexadecimal digits under which sites keep what belongs to this run
    counts: np.ndarray  # int64 [clients, stages, C]
    leaves: np.ndarray
    cumulative: bool
    bounds: tuple[float, float]

    @classmethod
    def gather(cls, run: str, reports: Mapping[int, SiteReport]) -> Self:
        """From each client's site's report."""
        one = reports[0]
        for client, report in reports.items():
            if report.counts.shape[1:] != one.counts.shape[1:] or report.cumulative != one.cumulative:
                raise HoldfastError(f"client {client} has other stages than client 0; they must be alike")
        rows = [(r, r.clients.index(k)) for k, r in sorted(reports.items())]
        leaves = np.array([r.leaves[at] for r, at in rows] if len(one.leaves) else [], np.int64)
        lowest, highest = zip(*(r.bounds for r in reports.values()), strict=True)
        counts = np.stack([r.counts[at] for r, at in rows])
        return cls(run, counts, leaves, one.cumulative, (min(lowest), max(highest)))

    def save(self, path: Path) -> None:
        """Keep it beside the run: a resumed run need not wait for every site."""
        content = {
            "run": self.run,
            "counts": self.counts.tolist(),
            "leaves": self.leaves.tolist(),
            "cumulative": self.cumulative,
            "bounds": list(self.bounds),
        }
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps(content).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """What ``save`` kept."""
        with files.reading(path):
            data = path.read_bytes()
        try:
            content = json.loads(data)
            return cls(
                content["run"],
                np.array(content["counts"], np.int64),
                np.array(content["leaves"], np.int64),
                content["cumulative"],
                (content["bounds"][0], content["bounds"][1]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise HoldfastError(f"{path} is damaged: it does not describe a population ({error})") from None

    def federation(self, dataset: Dataset, schedule: StageSchedule | None) -> Federation:
        """A federation whose clients' samples have labels but no content.

        ``dataset`` is the server's: its training samples are public and come first; then two that are all of
        the smallest and all of the largest value; then one id for each sample of each client, by client, stage
        and class.
        """
        public = len(dataset.y_train)
        ends = torch.stack([dataset.x_test.new_full(dataset.shape, value) for value in self.ends(dataset)])
        cells = np.tile(np.arange(self.counts.shape[2]), self.counts.shape[0] * self.counts.shape[1])
        held = np.repeat(cells, self.counts.ravel())
        labels = np.concatenate([dataset.y_train.numpy(), [0, 0], held]).astype(np.int64)
        known = replace(
            dataset,
            x_train=torch.cat([dataset.x_train, ends]),
            y_train=torch.from_numpy(labels),
            groups={},
        )
        sizes = self.counts.sum(2).ravel()
        return Federation(
            known,
            np.arange(public + 2, len(labels)),
            np.concatenate([[0], np.cumsum(sizes)]),
            self.counts.shape[1],
            np.arange(public),
            {"name": "given", "clients": len(self.counts)},
            schedule,
            self.cumulative,
            self.leaves,
        )

    def ends(self, dataset: Dataset) -> tuple[float, float]:
        """The smallest and largest value that a sample may have."""
        return self.bounds if dataset.x_test.is_floating_point() else (0.0, 255.0)

    def whereabouts(self, place: int) -> dict[str, int]:
        """Which client, stage, class and rank among these the sample at a place of the federation has."""
        after = np.cumsum(self.counts.ravel())
        cell = int(np.searchsorted(after, place, side="right"))
        client, stage, label = np.unravel_index(cell, self.counts.shape)
        rank = place - (int(after[cell - 1]) if cell else 0)
        return {"client": int(client), "stage": int(stage), "label": int(label), "rank": rank}


def describe_clients(clients: list[int]) -> str:
    """A few numbers and how many more there are."""
    shown = ", ".join(map(str, clients[:10]))
    return shown if len(clients) <= 10 else f"{shown} and {len(clients) - 10} more"


def in_a_line(value: Any) -> str:
    """The first line of what went wrong at a site, which sends whole tracebacks."""
    lines = [line for line in str(value).splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
