"""Every table end to end on tiny made-up data: the same models, methods and partitions, in seconds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.sources import DATASETS
from holdfast.papers.cells import Cell, plan
from holdfast.papers.cost import MICROSECONDS, data_sets
from holdfast.papers.findings import compare
from holdfast.papers.published import Table
from holdfast.papers.results import Results
from holdfast.papers.results_page import write_page
from holdfast.papers.sweep import Sweep
from holdfast.training.experiment import MIXED_DIGITS

PER_CLASS = {10: 24, 62: 6, 100: 4, 200: 2}  # training samples, by the number of classes
TESTS = 20  # test samples
LARGE = ("fa-digits", "resnet50", "fa-cifar100", "mlp-resnet18")  # of these one client and one round will do
SHORTER = (
    (r"body_epochs=\d+", "body_epochs=1"),
    (r"\bsteps=\d+", "steps=1"),
    (r"^creff$", "creff:repeats=1,match_steps=2,epochs=2"),
)
"""Methods with schedules of their own, and what makes them short."""


def smoke(folder: Path, tables: Sequence[Table]) -> Iterator[str]:
    """Run the tables, tiny, in an empty folder; a line for each.

    Results, the comparison with the published numbers and the page are made as for the real runs.
    """
    with _data(folder / "data") as paths:
        for table, cells in tiny(tables, paths):
            said: list[str] = []
            Sweep(folder / "results", folder / "work", "cpu").run(cells, 1, said.append)
            results = Results(folder / "results")
            for cell in cells:
                entry = results.get(cell)
                if entry is None or "failed" in entry:
                    raise HoldfastError(f"{cell.label} did not come to its end: {' '.join(said)}")
            lines = compare(table, cells, results).lines
            yield f"{table.id}: {len(cells)} cells, {len(lines)} lines"
        write_page(folder / "results", folder / "docs" / "results.md")
        yield "the page"


def tiny(tables: Sequence[Table], paths: Mapping[str, Path]) -> list[tuple[Table, list[Cell]]]:
    """Cells that reach every table, every method of a paper and every kind of column, smallest models first."""
    planned = []
    for table in tables:
        cells = [cell for cell in plan(table) if cell.needs is None]
        cells.sort(key=lambda cell: MICROSECONDS[cell.settings["model"]])
        planned.append((table, cells))
    planned.sort(key=lambda pair: MICROSECONDS[pair[1][0].settings["model"]])
    seen = set()
    chosen = []
    for table, cells in planned:
        some: list[Cell] = []
        for cell in cells:
            method = (table.paper.key, cell.settings["method"])
            model, partition = cell.settings["model"], cell.settings["partition"].partition(":")[0]
            kind = (table.paper.key, cell.settings["data"], model, "any" if model in LARGE else partition)
            new = kind not in seen or (method not in seen and not table.is_search)
            if len(some) < 2 or new:
                some.append(replace(cell, settings=shrunk(cell.settings, paths)))
                seen |= {method, kind}
        chosen.append((table, some))
    return chosen


def shrunk(settings: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The same setting on a few dozen samples, with few clients and rounds."""
    names = data_sets(settings)
    places = ",".join(str(paths[name]) for name in names)
    large = settings["model"] in LARGE
    stream = "stream" in settings
    small = {
        "data": f"{MIXED_DIGITS}:{places}" if len(names) > 1 else places,
        "clients": 5 if stream else 8 if len(names) > 1 else 20 if large else 10,
        "clients_per_round": 1 if large else 2,
        "rounds": 5 if stream and not large else 1 if large else 2,
        "local_epochs": 2 if "fedrep" in settings["method"] or "fedpac" in settings["method"] else 1,
        "batch_size": 24,
        "method": _shorter(settings["method"]),
        "partition": re.sub(r"min_size=\d+", "min_size=1", settings["partition"]),
    }
    if "probe_every" in settings:
        small["probe_every"] = 1
    if "public" in settings:
        small["public"] = max(settings["public"], 0.1)
    return {**settings, **small}


def _shorter(method: str) -> str:
    for schedule, short in SHORTER:
        method = re.sub(schedule, short, method)
    return method


@contextmanager
def _data(folder: Path) -> Iterator[dict[str, Path]]:
    """Made-up samples of every data set, each in a form that `holdfast.load` reads."""
    folder.mkdir(parents=True)
    paths = {name: folder / f"{name}.npz" for name, source in DATASETS.items() if source.classes in PER_CLASS}
    for number, (name, path) in enumerate(paths.items()):
        source = DATASETS[name]
        arrays: dict[str, Any] = {}
        train = np.arange(PER_CLASS[source.classes] * source.classes)
        for part, order in (("train", train), ("test", np.arange(TESTS))):
            rng = generator(number, f"smoke {part}")
            pixels = rng.integers(0, 256, (len(order), *source.shape), np.uint8)
            arrays |= {f"x_{part}": pixels, f"y_{part}": order % source.classes}
        np.savez(path, **arrays)
    paths["femnist"] = Path("femnist")  # by its name: only LEAF's own files say who wrote what
    _write_leaf(folder / "femnist")
    before = os.environ.get("HOLDFAST_DATA")
    os.environ["HOLDFAST_DATA"] = str(folder)
    try:
        yield paths
    finally:
        if before is None:
            del os.environ["HOLDFAST_DATA"]
        else:
            os.environ["HOLDFAST_DATA"] = before


def _write_leaf(folder: Path, writers: int = 12) -> None:
    """FEMNIST as LEAF writes it: any two writers in turn hold all 62 classes between them."""
    for part, each in (("train", 31), ("test", 2)):
        rng = generator(0, f"smoke leaf {part}")
        data = {
            f"writer{number}": {
                "x": rng.random((each, 784)).round(2).tolist(),
                "y": ((np.arange(each) + number * each) % 62).tolist(),
            }
            for number in range(writers)
        }
        (folder / part).mkdir(parents=True)
        content = {"users": list(data), "num_samples": [each] * writers, "user_data": data}
        (folder / part / "made_up.json").write_text(json.dumps(content))
