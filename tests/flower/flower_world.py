"""A small federation on Flower, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from grid import LocalGrid

import holdfast as hf
from holdfast.flower import FlowerApp, for_server

SIZES = (7, 4, 1, 9, 5, 6)
CLASSES = 4
SCHEDULE = {"rounds": 3, "local_epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9, "seed": 4}


def federation(floats: bool = False) -> hf.Federation:
    rng = np.random.default_rng(1)
    total = sum(SIZES)
    y = np.arange(total + 4) % CLASSES
    x = rng.integers(0, 160, size=(total + 4, 1, 4, 4))
    x[np.arange(total + 4), :, :, y] += 90
    x = x.astype(np.float32) / 255 if floats else x.astype(np.uint8)
    parts = np.split(rng.permutation(total), np.cumsum(SIZES)[:-1])
    return hf.federate(
        hf.Dataset.from_arrays(x, y, x[:12], y[:12]), parts, public=np.arange(total, total + 4)
    )


class World:
    """The app, its grid of nodes, and its run directory."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        among: hf.Federation | None = None,
        app: FlowerApp | None = None,
        **config: Any,
    ) -> None:
        among = among or federation()
        self.app = app or FlowerApp(
            lambda node, run: among, lambda run: for_server(among.dataset, among.public)
        )
        self.out = folder / "run"
        settings = {k.replace("_", "-"): v for k, v in (SCHEDULE | config).items()}
        defaults = {"clients": among.clients, "out": str(self.out), "precision": "float64", "model": "mlp:8"}
        self.config = defaults | {"wait": 0} | settings
        places = [
            {
                "partition-id": i,
                "num-partitions": nodes,
                "state-dir": str(folder / "state"),
                "share-samples": True,
            }
            for i in range(nodes)
        ]
        self.grid = LocalGrid(self.app.client_app(), places, self.config)

    def run(self) -> World:
        self.app.server_app()(self.grid, Context(1, 1, {}, RecordDict(), self.config))
        return self

    @property
    def records(self) -> list[dict[str, Any]]:
        return hf.RunDirectory.open(self.out).records()

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return hf.RunDirectory.open(self.out).load_model()

    def incidents(self) -> list[tuple[int, int, str]]:
        return [(r["round"], i["client"], i["kind"]) for r in self.records for i in r["incidents"]]


def reference(method: Any, among: hf.Federation | None = None, **changes: Any) -> hf.Run:
    """The same experiment on the sequential engine."""
    settings = SCHEDULE | {"evaluate_locals": False} | changes
    return hf.train(
        method,
        hf.parse_model("mlp:8"),
        among or federation(),
        engine="sequential",
        device="cpu",
        precision="float64",
        **settings,
    )


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)
