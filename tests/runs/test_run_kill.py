"""Real processes, really killed: whatever the moment, what is left is whole and can be gone on from."""

import multiprocessing
import os
import random
import signal
import time
from itertools import count
from pathlib import Path

import pytest
import run_crash_worker as worker

from holdfast.core.errors import HoldfastError
from holdfast.runs import RunDirectory, list_runs

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["holdfast.runs", "run_crash_worker"])


def start(target, *arguments) -> multiprocessing.Process:
    process = _context.Process(target=target, args=arguments)
    process.start()
    return process


def kill(process: multiprocessing.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {"method": {"name": "fedavg"}, "seed": 3})


def test_killed_at_twenty_random_moments(run: RunDirectory) -> None:
    moments = random.Random(0)
    reached = 0
    for _ in range(20):
        process = start(worker.go_on, run.path, 1_000_000)
        goal = reached + moments.randint(0, 8)  # in rounds, not seconds: a busy machine gets as far
        deadline = time.monotonic() + 30
        while not any(seen.state == "running" and seen.rounds >= goal for seen in list_runs(run.path)):
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.003)
        time.sleep(moments.uniform(0, 0.02))
        kill(process)
        round = worker.check(run.path)
        assert round >= reached  # a committed checkpoint is never lost
        reached = round
    assert reached > 20


def test_killed_before_each_operation_on_a_file(run: RunDirectory) -> None:
    """Every step of resuming, appending and checkpointing, one after another, rather than by chance."""
    survived = 0
    for operation in count(1):
        before = worker.check(run.path)
        process = start(worker.go_on, run.path, 4, operation)
        process.join()
        after = worker.check(run.path)
        assert before <= after <= before + 4
        if process.exitcode == 0:
            survived = operation
            break
        assert process.exitcode == -signal.SIGKILL
    assert survived > 20  # two checkpoints: files, manifests, renames, removals


def test_no_file_is_left_of_killed_attempts(run: RunDirectory) -> None:
    for operation in (3, 5, 8):
        start(worker.go_on, run.path, 4, operation).join()
    process = start(worker.go_on, run.path, 8)
    process.join()
    assert process.exitcode == 0
    folder = run.path / "checkpoint"
    names = {path.name for path in folder.iterdir()}
    assert sum(name.startswith("state-") for name in names) == 2
    assert {name for name in names if not name.startswith("state-")} == {
        "clients",
        "checkpoint.json",
        "checkpoint.json.previous",
    }
    last = {path.name.split("-")[0] for path in (folder / "clients").iterdir()}
    assert last == {str(client) for client in range(worker.CLIENTS)}
    assert len(list((folder / "clients").iterdir())) <= worker.CLIENTS + 4
    assert not (run.path / "scratch").exists()


def test_a_second_process_is_refused_with_the_id_of_the_holder(run: RunDirectory, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start(worker.hold, run.path, ready)
    while not ready.exists():
        time.sleep(0.01)
    try:
        with pytest.raises(HoldfastError, match=f"in use by process {process.pid}"), run.lock():
            pass
        with pytest.raises(HoldfastError, match="in use by process"):
            RunDirectory.create(run.path, {})
        assert run.records() == []  # reading goes on
        assert [summary.state for summary in list_runs(tmp_path)] == ["running"]
    finally:
        kill(process)
    with run.lock():
        run.append({"round": 1})
    assert [summary.state for summary in list_runs(tmp_path)] == ["interrupted"]
