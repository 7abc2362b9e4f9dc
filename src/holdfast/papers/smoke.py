"""A smoke test of every table and figure: the same models, methods and partitions on tiny synthetic data."""

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
from holdfast.data.sources.federations import HOSPITALS, REGIONS
from holdfast.data.sources.registry import Source
from holdfast.papers.cells import Cell, plan
from holdfast.papers.cost import MICROSECONDS, SITES, data_sets
from holdfast.papers.figure_panels import draw_figure
from holdfast.papers.findings import compare
from holdfast.papers.published import PaperTable
from holdfast.papers.results import Results
from holdfast.papers.results_page import write_page
from holdfast.papers.sweep import Sweep
from holdfast.training.experiment_entries import MIXED_DIGITS

SAMPLES_PER_CLASS = {10: 24, 62: 6, 100: 4, 200: 2}  # for training, by the number of classes
TEST_SAMPLES = 20
LARGE = ("fa-digits", "resnet50", "fa-cifar100", "mlp-resnet18")  # models trained by one client in one round
SHORT_SCHEDULES = (
    (r"body_epochs=\d+", "body_epochs=1"),
    (r"head_epochs=\d+", "head_epochs=1"),
    (r"\bsteps=\d+", "steps=1"),
    (r"^creff$", "creff:repeats=1,match_steps=2,epochs=2"),
)
"""Patterns and replacements that shorten the schedules inside methods."""
TWO_PHASES = (
    "fedrep",
    "fedpac",
    "head_epochs",
)  # methods that need an epoch for the classifier and one for the body


def smoke(folder: Path, tables: Sequence[PaperTable]) -> Iterator[str]:
    """Run a few small cells of each table in an empty folder, and yield a line for each table.

    Results, the comparison with the published numbers and the page are produced as for the real runs.
    """
    with _synthetic_data(folder / "data") as paths:
        for table, cells in select_cells(tables, paths):
            log: list[str] = []
            Sweep(folder / "results", folder / "work", "cpu").run(cells, 1, log.append)
            results = Results(folder / "results")
            for cell in cells:
                entry = results.get(cell)
                if entry is None or "failed" in entry:
                    raise HoldfastError(f"{cell.label} failed: {' '.join(log)}")
            rows = compare(table, cells, results).rows
            if table.drawing is not None:
                draw_figure(table, cells, results, folder / "figures")
            yield f"{table.id}: {len(cells)} cells, {len(rows)} rows"
        write_page(folder / "results", folder / "docs" / "results.md")
        yield "the page"


def select_cells(
    tables: Sequence[PaperTable], paths: Mapping[str, Path]
) -> list[tuple[PaperTable, list[Cell]]]:
    """Small cells that cover every table, every method of a paper and every kind of column, small models first."""
    planned = []
    for table in tables:
        cells = [cell for cell in plan(table) if cell.needs is None]
        cells.sort(key=lambda cell: MICROSECONDS[cell.settings["model"]])
        planned.append((table, cells))
    planned.sort(key=lambda pair: MICROSECONDS[pair[1][0].settings["model"]])
    covered = set()
    selected = []
    for table, cells in planned:
        small: list[Cell] = []
        for cell in cells:
            method = (table.paper.key, cell.settings["method"])
            model, partition = cell.settings["model"], cell.settings.get("partition", "").partition(":")[0]
            kind = (table.paper.key, cell.settings["data"], model, "any" if model in LARGE else partition)
            new = kind not in covered or (method not in covered and not table.is_search)
            if len(small) < 2 or new:
                small.append(replace(cell, settings=shrink(cell.settings, paths)))
                covered |= {method, kind}
        selected.append((table, small))
    return selected


def shrink(settings: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The same settings with synthetic data, few clients and few rounds."""
    names = data_sets(settings)
    if names[0] in SITES:
        steps = {"local_steps": 2} if settings.get("local_steps") else {}
        return {**settings, "rounds": 2, **steps}
    files = ",".join(str(paths[name]) for name in names)
    large = settings["model"] in LARGE
    removal = str(settings.get("stream", "")).startswith("removal:")
    stream = "stream" in settings and not removal
    small = {
        "data": f"{MIXED_DIGITS}:{files}" if len(names) > 1 else files,
        "clients": 5 if stream else 8 if len(names) > 1 else 20 if large else 10,
        "clients_per_round": 1 if large else 2,
        "rounds": 5 if stream and not large else 1 if large else 2,
        "local_epochs": 2 if any(name in settings["method"] for name in TWO_PHASES) else 1,
        "batch_size": 24,
        "method": _shorten(settings["method"]),
        "partition": re.sub(r"min_size=\d+", "min_size=1", settings["partition"]),
    }
    if "probe_every" in settings:
        small["probe_every"] = 1
    if removal:
        small["stream"] = re.sub(r"keeps=\[.*?\]", "keeps=[0,0]", settings["stream"])
    if "public" in settings:
        small["public"] = max(settings["public"], 0.1)
    return {**settings, **small}


def _shorten(method: str) -> str:
    for pattern, replacement in SHORT_SCHEDULES:
        method = re.sub(pattern, replacement, method)
    return method


@contextmanager
def _synthetic_data(folder: Path) -> Iterator[dict[str, Path]]:
    """Random samples of every data set, in files that `holdfast.load` reads; yields their paths by name."""
    folder.mkdir(parents=True)
    paths = {
        name: folder / f"{name}.npz"
        for name, source in DATASETS.items()
        if source.classes in SAMPLES_PER_CLASS
    }
    for number, (name, path) in enumerate(paths.items()):
        source = DATASETS[name]
        arrays: dict[str, Any] = {}
        train = np.arange(SAMPLES_PER_CLASS[source.classes] * source.classes)
        for part, order in (("train", train), ("test", np.arange(TEST_SAMPLES))):
            rng = generator(number, f"smoke {part}")
            pixels = rng.integers(0, 256, (len(order), *source.shape), np.uint8)
            arrays |= {f"x_{part}": pixels, f"y_{part}": order % source.classes}
        np.savez(path, **arrays)
    paths["femnist"] = Path("femnist")  # by name, because only LEAF's own files contain the writers
    _write_leaf(folder / "femnist")
    _write_hospitals(folder / "federations/heart-disease")
    _write_regions(folder / "federations/tcga-brca")
    published = {name: DATASETS[name] for name in SITES}
    DATASETS.update({name: _without_checksums(source) for name, source in published.items()})
    before = os.environ.get("HOLDFAST_DATA")
    os.environ["HOLDFAST_DATA"] = str(folder)
    try:
        yield paths
    finally:
        DATASETS.update(published)
        if before is None:
            del os.environ["HOLDFAST_DATA"]
        else:
            os.environ["HOLDFAST_DATA"] = before


def _write_leaf(folder: Path, writers: int = 12) -> None:
    """Write FEMNIST in LEAF's format; any two consecutive writers have all 62 classes between them."""
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


def _without_checksums(source: Source) -> Source:
    layouts = (
        replace(layout, files=tuple(replace(file, md5=None) for file in layout.files))
        for layout in source.layouts
    )
    return replace(source, layouts=tuple(layouts))


def _write_hospitals(folder: Path, patients: int = 24) -> None:
    """Write the four files of UCI's heart disease, with the columns that are left out missing."""
    folder.mkdir(parents=True)
    for number, name in enumerate(HOSPITALS):
        table = generator(number, "smoke hospitals").integers(1, 5, (patients, 14))
        table[:, 10:13], table[:, -1] = -1, np.arange(patients) % 2
        rows = (",".join("?" if value < 0 else str(value) for value in row) for row in table)
        (folder / f"processed.{name}.data").write_text("\n".join(rows) + "\n")


def _write_regions(folder: Path, patients: int = 20) -> None:
    """Write the two files of FLamby's Fed-TCGA-BRCA."""
    folder.mkdir(parents=True)
    header = ",".join(["pid", *(f"feature{i}" for i in range(39)), "E", "T"])
    rows, folds = [header], ["pid,fold,fold2"]
    for number in range(patients * len(REGIONS)):
        rng = generator(number, "smoke regions")
        cells = [*rng.integers(0, 2, 39), number // len(REGIONS) % 2, rng.integers(1, 3000)]
        rows.append(f"p{number}," + ",".join(map(str, cells)))
        fold = "test" if number // len(REGIONS) % 3 == 0 else "train"
        folds.append(f"p{number},{fold},{fold}_{number % len(REGIONS)}")
    (folder / "brca.csv").write_text("\n".join(rows) + "\n")
    (folder / "train_test_split.csv").write_text("\n".join(folds) + "\n")
