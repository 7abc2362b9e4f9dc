import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweep_worker
from paper_entries import entry

from holdfast.core.errors import HoldfastError
from holdfast.papers.cells import Cell, plan
from holdfast.papers.published import load_tables
from holdfast.papers.results import Results
from holdfast.papers.sweep import Sweep
from holdfast.sweeps import queue as queues
from holdfast.sweeps import workers
from holdfast.sweeps.queue import STALE, Queue
from holdfast.training.experiment import Experiment

WORKER = Path(__file__).with_name("sweep_worker.py")


def quiet(line):
    """A log that discards its lines; with several workers it must be importable."""


def first_dies(line):
    """A log that makes the first worker end instead."""
    try:
        os.close(os.open(os.environ["FIRST_DIES"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os._exit(3)


def lease_file(work, cell, **changes):
    queue = Queue(work)
    path = queue.folder / f"{cell.hash}.json"
    path.write_text(
        json.dumps({"label": cell.label, "host": socket.gethostname(), "pid": os.getpid()} | changes)
    )
    return queue, path


@pytest.fixture
def cell():
    return sweep_worker.cells(2, 1)[0]


def test_a_cell_is_leased_by_one_process_at_a_time(tmp_path, cell):
    queue = Queue(tmp_path)
    with queue.lease(cell) as mine:
        assert mine
        (lease,) = queue.leases()
        assert (lease.pid, lease.hash, lease.alive) == (os.getpid(), cell.hash, True)
        with Queue(tmp_path).lease(cell) as second:
            assert not second
    assert queue.leases() == []


def test_a_lease_is_released_after_an_error(tmp_path, cell):
    with pytest.raises(RuntimeError), Queue(tmp_path).lease(cell):
        raise RuntimeError
    assert Queue(tmp_path).leases() == []


def test_a_dead_process_loses_its_lease(tmp_path, cell):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    queue, _ = lease_file(tmp_path, cell, pid=ended.pid)
    with queue.lease(cell) as mine:
        assert mine


def test_a_lease_on_another_host_is_kept_until_it_is_stale(tmp_path, cell):
    queue, path = lease_file(tmp_path, cell, host="elsewhere", pid=1)
    with queue.lease(cell) as mine:
        assert not mine
    old = time.time() - STALE - 1
    os.utime(path, (old, old))
    with queue.lease(cell) as mine:
        assert mine


def test_a_zombie_process_loses_its_lease(tmp_path, cell):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    queue, _ = lease_file(tmp_path, cell, pid=ended.pid)
    with queue.lease(cell) as mine:
        assert mine
    ended.wait()


@pytest.mark.parametrize("content", ['{"label": "', "{}", "[]", '{"label": 1, "host": 2, "pid": "x"}'])
def test_an_incomplete_lease_file_blocks_nobody(content, tmp_path, cell):
    queue, path = lease_file(tmp_path, cell)
    path.write_text(content)
    assert [lease.alive for lease in queue.leases()] == [False]
    with queue.lease(cell) as mine:
        assert mine


def test_a_lease_is_renewed_while_it_is_held(tmp_path, cell, monkeypatch):
    monkeypatch.setattr(queues, "HEARTBEAT", 0.02)
    with Queue(tmp_path).lease(cell):
        path = tmp_path / "leases" / f"{cell.hash}.json"
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime > 0


def test_a_cell_is_run_stored_and_not_run_again(tmp_path):
    (cell,) = sweep_worker.cells(3, 1)
    log = []
    sweep = Sweep(tmp_path / "results", tmp_path / "work", "cpu")
    sweep.run([cell], 1, log.append)
    sweep.run([cell], 1, log.append)
    assert len(log) == 1
    stored = json.loads((tmp_path / "results" / "fedntd" / "made-up.json").read_text())["cells"]
    assert len(stored) == 1
    found = stored[0]
    run = Experiment.from_mapping({**cell.settings, "seed": 0, "device": "cpu"}).run()
    assert found["curves"]["accuracy"] == [round(record["accuracy"], 4) for record in run.records]
    assert found["final"]["forgetting"] == round(run.forgetting, 4)
    assert found["hash"] == cell.hash
    assert found["settings"] == cell.settings
    assert {"holdfast", "torch"} <= set(found["versions"])
    assert found["device_type"] == "cpu"
    assert found["seconds"] >= 0


def add_every_fourth(folder, first):
    for cell in sweep_worker.cells(2, 20)[first::4]:
        Results(folder).add(cell, entry(cell, [0.5]))


def test_results_of_several_processes_are_merged(tmp_path):
    cells = sweep_worker.cells(2, 20)
    fork = multiprocessing.get_context("fork")  # nothing here computes, and a fork starts at once
    started = [fork.Process(target=add_every_fourth, args=(tmp_path, n)) for n in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    results = Results(tmp_path)
    assert all(results.get(cell) is not None for cell in cells)
    assert [path.name for path in (tmp_path / "fedntd").iterdir()] == ["made-up.json"]


def test_another_table_finds_the_same_run(tmp_path):
    tables = load_tables()
    (one,) = plan(tables["fedka/table1"], ["cifar10"], ["fedka"])
    (other,) = plan(tables["fedka/table7"], ["cifar10"], ["fedka"])
    results = Results(tmp_path)
    results.add(one, entry(one, [0.5]))
    assert results.get(other)["column"] == "cifar10"
    (unlike,) = plan(tables["fedka/table1"], ["cifar10"], ["fedavg"])
    assert results.get(unlike) is None


def test_a_killed_sweep_continues_and_ends_with_the_same_numbers(tmp_path):
    rounds = 15
    arguments = [sys.executable, WORKER, tmp_path / "results", tmp_path / "work", str(rounds), "1", "1"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "work" / "runs"
    while (
        process.poll() is None and sum(path.stat().st_size for path in metrics.glob("*/metrics.jsonl")) < 1500
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (cell,) = sweep_worker.cells(rounds, 1)
    assert Results(tmp_path / "results").get(cell) is None  # it was killed in the midst
    log = []
    Sweep(tmp_path / "results", tmp_path / "work", "cpu").run([cell], 1, log.append)
    Sweep(tmp_path / "other", tmp_path / "undisturbed", "cpu").run([cell], 1, quiet)
    assert len(log) == 1
    resumed, whole = (Results(tmp_path / name).get(cell) for name in ("results", "other"))
    assert resumed["curves"] == whole["curves"]
    assert resumed["final"] == whole["final"]
    assert len(list(metrics.iterdir())) == 1  # the same run directory, continued


def test_workers_share_the_cells(tmp_path):
    cells = sweep_worker.cells(2, 4)
    Sweep(tmp_path / "results", tmp_path / "work", "cpu").run(cells, 2, quiet)
    results = Results(tmp_path / "results")
    assert all(results.get(cell) is not None for cell in cells)
    assert Queue(tmp_path / "work").leases() == []


def test_a_worker_that_ends_unexpectedly_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRST_DIES", str(tmp_path / "died"))
    with pytest.raises(HoldfastError, match="a worker process ended unexpectedly"):
        Sweep(tmp_path / "results", tmp_path / "work", "cpu").run(sweep_worker.cells(2, 4), 2, first_dies)
    assert len(list((tmp_path / "results").glob("**/*.json*"))) > 0  # the other one went on


def test_a_killed_sweep_leaves_no_workers_behind(tmp_path):
    arguments = [sys.executable, WORKER, tmp_path / "results", tmp_path / "work", "100000", "2", "2"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)

    def written():
        files = (tmp_path / "work" / "runs").glob("*/metrics.jsonl")
        return [size for path in files if (size := path.stat().st_size)]

    while process.poll() is None and len(written()) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    before, now = [], written()
    while before != now:
        assert time.monotonic() < deadline
        time.sleep(1.0)  # for some twenty rounds of two workers at work
        before, now = now, written()
    assert len(now) == 2


def test_no_cell_is_started_that_would_miss_the_deadline(tmp_path):
    table = load_tables()["fedntd/table1-sharding"]
    (cell,) = plan(table, ["cifar10:s=2"], ["fedavg"])
    log = []
    Sweep(tmp_path / "results", tmp_path / "work", "cpu", time.time() + 20).run([cell], 1, log.append)
    assert log == ["time limit reached; run the same command again to continue with the remaining cells"]
    assert not (tmp_path / "work" / "runs").exists()


def test_a_broken_cell_does_not_end_the_sweep(tmp_path):
    good, other = sweep_worker.cells(2, 2)
    broken = type(other)(other.table, "broken", other.row, 0, {**other.settings, "method": "fedntd:beta=-1"})
    log = []
    sweep = Sweep(tmp_path / "results", tmp_path / "work", "cpu")
    assert not sweep.run([broken, good], 1, log.append)
    results = Results(tmp_path / "results")
    assert results.get(broken) is None
    assert results.get(good) is not None
    assert "beta is -1" in log[0]
    assert sweep.run([good], 1, quiet)
    assert not sweep.run([broken, good], 2, quiet)
    assert Queue(tmp_path / "work").leases() == []


def test_a_long_cell_logs_its_progress(tmp_path, cell, monkeypatch):
    monkeypatch.setattr(workers, "LOG_INTERVAL", 0.0)
    log = []
    Sweep(tmp_path / "results", tmp_path / "work", "cpu").run([cell], 1, log.append)
    assert log[:2] == [f"{cell.label}: round 1 of 2", f"{cell.label}: round 2 of 2"]


def test_a_run_that_diverges_is_a_result(tmp_path):
    (cell,) = sweep_worker.cells(5, 1)
    wild = type(cell)(cell.table, cell.column, cell.row, 0, {**cell.settings, "lr": 1e30, "batch_size": 8})
    Sweep(tmp_path / "results", tmp_path / "work", "cpu").run([wild], 1, quiet)
    assert "no usable update is left" in Results(tmp_path / "results").get(wild)["failed"]


SITES = """
import numpy as np
import holdfast as hf

def load():
    rng = np.random.default_rng(0)
    x, time = rng.normal(size=(80, 3)).astype(np.float32), rng.exponential(size=80)
    y = np.stack([time, np.arange(80) % 3 > 0], 1).astype(np.float32)
    site = hf.Group(("here", "there"), np.arange(40) % 2, np.arange(40) // 20)
    return hf.Dataset.from_arrays(x[:40], y[:40], x[40:], y[40:], groups={"site": site}, task="survival")
"""


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_of_a_run_on_sites_the_score_of_each_is_stored(tmp_path, method):
    (tmp_path / "two_sites.py").write_text(SITES)
    settings = {"data": f"{tmp_path / 'two_sites.py'}:load", "partition": "by-site", "model": "linear", "rounds": 2,
                "method": method, "local_test_samples": 100, "engine": "sequential"}  # fmt: skip
    cell = Cell("flamby/made-up", "sites", method, 0, settings)
    Sweep(tmp_path / "results", tmp_path / "work", "cpu").run([cell], 1, print)
    (found,) = json.loads((tmp_path / "results" / "flamby" / "made-up.json").read_text())["cells"]
    last = Experiment.from_mapping({**settings, "seed": 0, "device": "cpu"}).run().records[-1]
    whole, locals_ = last["site_concordance"], last["locals"]["site_concordance"]
    assert last["participants"] == [0, 1]
    assert found["score"] == "concordance"
    assert found["final"]["concordance"] == round(last["concordance"], 4)
    expected = {site: sum(values) / 2 for site, values in locals_.items()} if method == "local" else whole
    assert found["final"]["sites"] == {site: round(value, 4) for site, value in expected.items()}
    assert found["final"]["own_site"] == round((locals_["here"][0] + locals_["there"][1]) / 2, 4)
    assert found["curves"]["site_mean"][-1] == pytest.approx(sum(expected.values()) / 2, abs=1e-4)
