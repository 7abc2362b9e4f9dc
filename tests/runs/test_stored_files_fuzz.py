"""Every other stored file, damaged or of the wrong shape: its readers work, or one sentence names the file.

Of a damaged file that is read all the same, the content is the original's: there is no silent difference.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_audit import chained
from test_run_fuzz import spoilt
from test_run_shapes import cli, deep, mutated, read_parts, write_parts

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.papers import measures, results
from holdfast.report.loading import load_run
from holdfast.report.tables import table
from holdfast.runs import RunDirectory, read_audit, verify_audit
from holdfast.sweeps.queue import Queue
from holdfast.tuning import folder as tuning_folder
from holdfast.tuning import results as tuning_results

CASES = int(os.environ.get("HOLDFAST_FUZZ", "40000")) // 200  # of each file


def federation() -> hf.Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
    return hf.federate(hf.Dataset.from_arrays(x, y, x, y), "iid", clients=3)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of one run, which has all kinds of files."""
    path = tmp_path_factory.mktemp("files") / "comparison"
    with warnings.catch_warnings(action="ignore"):
        hf.train(
            "fedavg", "mlp:4", federation(), rounds=3, probe_every=3, validation=0.3, engine="sequential",
            device="cpu", out=path / "fedavg" / "seed-0", progress=False,
        )  # fmt: skip
    (path / "comparison.json").write_text(json.dumps({"baseline": "fedavg"}))
    return path


def run_of(comparison: Path) -> Path:
    return comparison / "fedavg" / "seed-0"


# Damaged bytes ------------------------------------------------------------------------------------------


def models(run: Path) -> list[Any]:
    directory = RunDirectory.open(run)
    return [directory.records(), directory.load_model(), directory.load_best_model()]


def audited(run: Path) -> Any:
    """The entries of a log that fits; a part of a line after the last whole one is reported."""
    found = verify_audit(run)
    if found.problem is not None:
        raise HoldfastError(found.problem)
    return read_audit(run)


def described(run: Path) -> list[Any]:
    stored = load_run(run)
    return [stored.federation, stored.probe]


RUN_FILES: dict[str, Callable[[Path], Any]] = {
    "federation.json": described,
    "probe.json": described,
    "model-best.safetensors": models,
    "checksums.json": models,
    "audit.jsonl": audited,
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_damaged_file_of_a_run_is_refused_or_read_as_it_was(name: str, comparison: Path) -> None:
    rng, run = np.random.default_rng(0), run_of(comparison)
    file, read = run / name, RUN_FILES[name]
    whole, expected, refused = file.read_bytes(), read(run), list[str]()
    try:
        for _ in range(CASES):
            file.write_bytes(spoilt(whole, rng))
            try:
                assert same(read(run), expected)
            except HoldfastError as error:
                refused.append(str(error))
    finally:
        file.write_bytes(whole)
    assert len(refused) > CASES / 10
    assert not any("\n" in sentence for sentence in refused)


# Wrong shapes -------------------------------------------------------------------------------------------


def shapes(file: Path, read: Callable[[], Any], cases: int = CASES // 2) -> list[str]:
    """The sentences with which ``read`` refuses mutations of ``file``; anything but a `HoldfastError` is raised."""
    rng, whole, content, sentences = np.random.default_rng(0), file.read_bytes(), read_parts(file), []
    try:
        for turn in range(cases + 1):
            if turn < cases:
                write_parts(file, mutated(content, rng))
            else:
                file.write_text(deep())
            try:
                with warnings.catch_warnings(action="ignore"):
                    read()
            except HoldfastError as error:
                sentences.append(str(error))
                if "\n" in sentences[-1]:
                    pytest.fail(sentences[-1])
    finally:
        file.write_bytes(whole)
    return sentences


def test_an_audit_log_of_the_wrong_shape(comparison: Path) -> None:
    """Its hashes fit, so only the schema and the other files can contradict it."""
    rng, run = np.random.default_rng(0), run_of(comparison)
    file = run / "audit.jsonl"
    whole, entries = file.read_bytes(), read_audit(run)
    problems, refused = 0, list[str]()
    try:
        for turn in range(CASES // 2):
            content = mutated(entries, rng)
            if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
                continue
            file.write_bytes(b"".join(line + b"\n" for line in chained(content)))
            problems += verify_audit(run).problem is not None
            try:
                read_audit(run)
                if turn % 20 == 0:
                    cli("audit", "show", str(run))
            except HoldfastError as error:
                refused.append(str(error))
    finally:
        file.write_bytes(whole)
    assert all("audit.jsonl is damaged" in sentence for sentence in refused)
    assert problems > CASES / 8


def test_a_comparison_of_the_wrong_shape(comparison: Path) -> None:
    refused = shapes(comparison / "comparison.json", lambda: table([comparison]))
    assert refused
    assert all("comparison.json is damaged" in sentence for sentence in refused)


def test_results_of_tuning_of_the_wrong_shape(comparison: Path, tmp_path: Path) -> None:
    entry = tuning_results.completed(RunDirectory.open(run_of(comparison)), 3)
    stored = tuning_results.StoredRuns(tmp_path)
    stored.add("runs", entry | {"hash": "a"})
    stored.add(
        "runs", tuning_results.failed(RunDirectory.open(run_of(comparison)), "diverged") | {"hash": "b"}
    )

    def read() -> None:
        for found in tuning_results.StoredRuns(tmp_path).of("runs"):
            tuning_results.score(found)
            tuning_results.last_value(found)
            assert isinstance(found["seconds"] + found["bytes_up"] + found["bytes_down"], int | float)

    refused = shapes(tmp_path / "runs.json", read)
    assert len(refused) > CASES / 40
    assert all("runs.json is damaged" in sentence for sentence in refused)


def test_a_search_of_the_wrong_shape(tmp_path: Path) -> None:
    experiment = hf.Experiment(
        data="digits", clients=3, partition="iid", method="fedavg", model="linear", rounds=2
    )
    more = {"space": ["lr=0.1,1"], "budget": 2}
    tuning_folder.claim(tmp_path, "tune", experiment, more, federation())

    def read() -> None:
        tuning_folder._refuse_another(
            tmp_path / "tune.yaml", "tune", whole
        )  # as `claim` does, without writing the file anew

    whole = read_parts(tmp_path / "tune.yaml")
    read()
    assert len(shapes(tmp_path / "tune.yaml", read)) > CASES / 40


def test_results_of_papers_of_the_wrong_shape(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "results" / "fedmlp" / "table2.json"
    cells = json.loads(stored.read_text())["cells"][:2]
    (tmp_path / "fedmlp").mkdir()
    file = tmp_path / "fedmlp" / "table2.json"
    file.write_text(json.dumps({"table": "fedmlp/table2", "cells": cells}))

    def read() -> None:
        for entry in results.Results(tmp_path).all():
            if "failed" not in entry:
                for name in ("accuracy@2", "rounds@0.9", "site@va", *measures.MEASURES):
                    if name != "site@va" or "sites" in entry["final"]:
                        measures.measure(name).compute(entry, 0.5)
                        measures.measure(name).averaged(entry, 0.5)

    read()
    refused = shapes(file, read)
    assert len(refused) > CASES / 40
    assert all("table2.json" in sentence for sentence in refused)


def test_leases_of_the_wrong_shape_have_expired(tmp_path: Path) -> None:
    """A process that was killed while it wrote a lease must not keep others from the job."""
    queue, file = Queue(tmp_path), tmp_path / "leases" / "x.json"
    file.write_text(json.dumps({"label": "x", "host": "elsewhere", "pid": 1}))
    assert queue.leases()[0].alive

    def read() -> None:
        [lease] = queue.leases()
        content = read_parts(file) if not file.read_text().startswith("[[[[") else None
        whole = (
            isinstance(content, dict)
            and all(isinstance(content.get(key), str) for key in ("label", "host"))
            and type(content.get("pid")) is int
            and 0 < content["pid"] < 2**63
        )
        assert lease.alive == whole

    assert not shapes(file, read)


def test_federation_files_of_the_wrong_shape(tmp_path: Path) -> None:
    made = federation()
    made.save(tmp_path / "federation.json")
    refused = shapes(
        tmp_path / "federation.json", lambda: hf.Federation.load(tmp_path / "federation.json", made.dataset)
    )
    assert len(refused) > CASES / 8


def test_copies_of_a_run_are_whole(comparison: Path, tmp_path: Path) -> None:
    """The readers above accept what is not damaged."""
    run = Path(shutil.copytree(run_of(comparison), tmp_path / "copy"))
    assert all(same(read(run), read(run_of(comparison))) for read in RUN_FILES.values())
