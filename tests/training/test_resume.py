"""Runs killed with SIGKILL at random moments end with the same bits as runs never disturbed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.runs import verify_audit

ROUNDS, KILLS = 12, 4
SETTINGS = {
    "clients": 6,
    "clients-per-round": 3,
    "partition": "dirichlet:0.3",
    "model": "mlp:32",
    "rounds": ROUNDS,
    "local-epochs": 2,
    "lr": 0.1,
    "momentum": 0.9,
    "seed": 3,
    "device": "cpu",
    "checkpoint-seconds": 0,
}
ARGUMENTS = [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]


def holdfast(*arguments: str) -> None:
    """What the ``holdfast`` program does, in a process that has already imported torch."""
    os.environ["TERM"] = "dumb"
    from holdfast.cli import app

    app(list(arguments))


@pytest.fixture(scope="module")
def processes():
    """Processes forked from one that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["holdfast.training.train", "holdfast.cli", "sklearn.datasets", "torch._dynamo"]
    )
    return context


def start(processes, *arguments: str):
    process = processes.Process(target=holdfast, args=[str(a) for a in arguments])
    process.start()
    return process


def finish(processes, *arguments: str) -> None:
    process = start(processes, *arguments)
    process.join()
    assert process.exitcode == 0


def outcome(run: Path) -> tuple[list[bytes], list[dict]]:
    """The bytes of the final and the best model, and the records without their times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    return [path.read_bytes() for path in sorted(run.glob("model*.safetensors"))], records


def rounds_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("fedavg", "sequential"),
        ("scaffold", "sequential"),
        ("fedntd+fedprox:mu=0.1", "sequential"),
        ("scaffold", "vectorized"),
        ("fedavg --validation=0.2 --patience=4 --lr=0.5", "sequential"),
    ],
)
def test_killed_at_random_moments(processes, tmp_path, method, engine):
    begin = ("run", *ARGUMENTS, "--engine", engine, "--method", *method.split(), "--out")
    finish(processes, *begin, tmp_path / "calm")

    run, rng = tmp_path / "killed", np.random.default_rng()
    kills = 0
    while kills < KILLS:
        begun = (run / "experiment.yaml").exists()
        process = start(processes, *(("resume", run) if begun else (*begin, run)))
        # Kill it at a random moment of a random round: while it opens, trains, tests, records or saves.
        until = rounds_done(run) + rng.integers(0, 3)
        while process.is_alive() and not ((run / "experiment.yaml").exists() and rounds_done(run) >= until):
            time.sleep(0.004)
        time.sleep(rng.uniform(0, 0.02))
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    finish(processes, "resume", run)
    assert kills > 1
    assert outcome(run) == outcome(tmp_path / "calm")
    assert verify_audit(run).problem is None


def test_a_second_process_on_one_directory_is_refused(processes, tmp_path):
    run = tmp_path / "run"
    first = start(processes, "run", *ARGUMENTS, "--rounds", "100000", "--out", run)
    try:
        while rounds_done(run) == 0:
            assert first.is_alive()
            time.sleep(0.02)
        command = [sys.executable, "-m", "holdfast", "resume", str(run)]
        second = subprocess.run(command, capture_output=True, text=True)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.join()
    assert second.returncode == 2
    sentence = f"holdfast: {run} is in use by process {first.pid}; wait for it to end or choose another --out"
    assert second.stderr.strip() == sentence
