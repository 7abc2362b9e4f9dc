"""Files spoilt at random: what is read from them is right, or one defined error names the file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data.sources.pickles import read_pickled_arrays
from holdfast.runs import RunDirectory, list_runs

INPUTS = int(os.environ.get("HOLDFAST_FUZZ", "40000")) // 100  # of each file


def spoilt(data: bytes, rng: np.random.Generator) -> bytes:
    """The same bytes with one to three faults."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(changed) + 1))
        match rng.integers(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.integers(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : at + int(rng.integers(20))]
            case 3:
                changed[at:at] = rng.bytes(int(rng.integers(20)))
            case 4:
                changed[at:at] = changed[: int(rng.integers(len(changed) + 1))]
    return bytes(changed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a checkpoint and clients that remember."""
    path = tmp_path_factory.mktemp("fuzz") / "run"
    experiment = hf.Experiment(
        data="digits",
        partition="iid",
        clients=3,
        method="scaffold",
        model="mlp:4",
        rounds=3,
        engine="sequential",
    )
    experiment.run(path)
    return path


def checkpoint(path: Path) -> None:
    found = RunDirectory.open(path).load_checkpoint()
    assert found is not None
    for client in range(3):
        found.clients.get(client)


READERS: dict[str, Callable[[Path], Any]] = {
    "experiment.yaml": lambda path: RunDirectory.open(path).experiment,
    "metrics.jsonl": lambda path: RunDirectory.open(path).records(),
    "model.safetensors": lambda path: RunDirectory.open(path).load_model(),
    "checkpoint": checkpoint,
}


@pytest.mark.parametrize("name", READERS)
def test_files_of_a_run(name: str, run: Path) -> None:
    rng = np.random.default_rng(0)
    folder = run / name
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    whole = {file: file.read_bytes() for file in files if file.is_file()}
    refused = []
    for turn in range(INPUTS):
        file = list(whole)[turn % len(whole)]
        file.write_bytes(spoilt(whole[file], rng))
        try:
            READERS[name](run)
        except HoldfastError as error:
            refused.append(str(error))
        finally:
            list_runs(run.parent)  # lists what it finds, whatever that is
            file.write_bytes(whole[file])
    READERS[name](run)
    assert len(refused) > INPUTS / 10
    assert all(str(run) in sentence for sentence in refused)


EXPERIMENT = b"""data: digits
method: {name: fedntd, beta: 0.5}
model: mlp:16
partition: {name: dirichlet, alpha: 0.1}
skew: {rotation: 30, groups: 2}
stream: {tasks_per_client: 2, schedule: "every-n:2"}
long_tail: 0.5
clients: 10
rounds: 4
lr: 0.05
"""


def test_experiment_files(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "experiment.yaml"
    file.write_bytes(EXPERIMENT)
    hf.Experiment.from_file(file)
    refused = 0
    for _ in range(INPUTS):
        file.write_bytes(spoilt(EXPERIMENT, rng))
        try:
            hf.Experiment.from_file(file)
        except HoldfastError:
            refused += 1
    assert INPUTS / 10 < refused < INPUTS


def test_pickled_arrays() -> None:
    """The one kind of pickle that is ever read, by a reader that can call nothing."""
    rng = np.random.default_rng(0)
    arrays = {"data": np.arange(48, dtype=np.uint8).reshape(4, 12), "labels": [1, 2, 3, 0], b"name": "batch"}
    refused = 0
    for turn in range(INPUTS):
        whole = pickle.dumps(arrays, protocol=2 + turn % 4)
        try:
            read_pickled_arrays(spoilt(whole, rng), "batch")
        except HoldfastError:
            refused += 1
    assert refused > INPUTS / 10
