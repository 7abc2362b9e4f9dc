"""Real processes: a SuperLink and SuperNodes on loopback, TLS and node authentication on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import BIN, Deployment, end, free_port, wait_until

import holdfast as hf
from holdfast.methods.registry import parse_method

NODES = int(os.environ.get("HOLDFAST_NODES", "2"))
CHAOS = bool(os.environ.get("HOLDFAST_CHAOS"))

APP = """
import numpy as np
import holdfast as hf
from holdfast.flower import FlowerApp, for_server

def federation(run):
    clients = run["clients"]
    rng = np.random.default_rng(1)
    y = np.arange(40 * clients if clients < 100 else 4 * clients) % 4
    x = rng.integers(0, 160, size=(len(y), 1, 4, 4))
    x[np.arange(len(y)), :, :, y] += 60
    data = hf.Dataset.from_arrays(x.astype(np.uint8), y, x[:100].astype(np.uint8), y[:100])
    if run["data-partition"] == "stream":
        return hf.stream(data, hf.IID(), clients=clients, tasks_per_client=2, seed=3)
    partition = hf.Dirichlet(1.0) if clients < 100 else hf.IID()
    return hf.federate(data, partition, clients=clients, seed=3, public=run["data-public"])

def server_data(run):
    whole = federation(run)
    return for_server(whole.dataset, whole.public)

app = FlowerApp(lambda node, run: federation(run), server_data)
server = app.server_app()
client = app.client_app()
"""

CONFIG = {"local_epochs": 2, "batch_size": 8, "lr": 0.2, "momentum": 0.0, "seed": 5, "model": "mlp:16"}


def reference(
    method: str, clients: int, data_partition: str = "", data_public: float = 0.0, **settings: Any
) -> dict[str, torch.Tensor]:
    """The weights after the same experiment on the sequential engine."""
    names: dict[str, Any] = {"__name__": "app"}
    exec(APP, names)
    among = names["federation"](
        {"clients": clients, "data-partition": data_partition, "data-public": data_public}
    )
    schedule = {"evaluate_locals": False} | {k: v for k, v in (CONFIG | settings).items() if k != "model"}
    run = hf.train(
        parse_method(method), hf.parse_model("mlp:16"), among, engine="sequential", device="cpu", **schedule
    )
    return dict(run.model.state_dict())


def records(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def complete_rounds(out: Path) -> int:
    """The number of rounds that a server killed now would not repeat."""
    if not (out / "experiment.yaml").exists():
        return 0
    checkpoint = hf.RunDirectory.open(out).load_checkpoint()
    return 0 if checkpoint is None else checkpoint.round


def assert_weights(out: Path, expected: dict[str, torch.Tensor]) -> None:
    found = hf.RunDirectory.open(out).load_model()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def test_parity_and_a_killed_server(tmp_path: Path) -> None:
    """Twice as many clients as nodes, all but one sampled; the server is killed in round 2 and run again."""
    clients, out = 2 * NODES, tmp_path / "run"
    settings = {"rounds": 3, "clients_per_round": clients - 1}
    with Deployment(tmp_path, NODES, clients, APP, isolated=True) as deployment:
        assert deployment.asks_for_a_task() == 401
        stranger = deployment.start(
            "stranger", f"{BIN}/flower-supernode", "--root-certificates", f"{deployment.keys}/ca.crt",
            "--superlink", f"127.0.0.1:{deployment.link_port}", "--host", "127.0.0.1", "--port", str(free_port()),
        )  # fmt: skip
        run = deployment.submit(out=str(out), method="scaffold", **CONFIG, **settings)
        wait_until(lambda: complete_rounds(out) >= 1, 200)
        assert stranger.wait(60) != 0  # no key, no entry
        end(stranger)
        for pid in deployment.processes("flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        before = records(out)[: complete_rounds(out)]
        wait_until(lambda: not deployment.processes("flwr-serverapp"), 20)
        assert not (out / "model.safetensors").exists()
        run = deployment.submit(out=str(out), method="scaffold", **CONFIG, **settings)
        assert deployment.finish(run, out) == "finished:completed"
    assert records(out)[: len(before)] == before
    assert [i for r in records(out) for i in r["incidents"]] == []
    assert_weights(out, reference("scaffold", clients, **settings))


METHOD = """
from dataclasses import dataclass
from typing import ClassVar

import holdfast as hf


@dataclass(frozen=True)
class Pull(hf.Method):
    name: ClassVar[str] = "pull"
    mu: float = 0.1

    def proximal_mu(self):
        return self.mu
"""


def test_a_method_in_a_file_that_every_site_has(tmp_path: Path) -> None:
    """A site with another file takes no part; with the server's own it trains as on one machine."""
    out = tmp_path / "run"
    for folder in ("server", "code0", "code1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(METHOD)
    (tmp_path / "code1" / "mine.py").write_text(METHOD + "# changed\n")
    settings = {"method": "mine.py:Pull:mu=0.5", "code_dir": str(tmp_path / "server"), "rounds": 2}
    with Deployment(tmp_path, 2, 2, APP, database=False) as deployment:
        run = deployment.submit(out=str(out), wait=30, **CONFIG | settings)
        wait_until(lambda: deployment.status(run).startswith("finished"), 120)
        assert deployment.status(run) == "finished:failed"
        log = deployment.flwr("log", run, "tls", "--show")
        assert "client 1 of 2 is not connected" in log
        assert "mine.py:Pull at this site differs from the server's file" in log
        (tmp_path / "code1" / "mine.py").write_text(METHOD)
        run = deployment.submit(out=str(out), **CONFIG | settings)
        assert deployment.finish(run, out) == "finished:completed"
    assert_weights(out, reference(f"{tmp_path}/server/mine.py:Pull:mu=0.5", 2, rounds=2))


@pytest.mark.skipif(not CHAOS, reason="minutes long: make test-chaos")
def test_killed_nodes_and_a_cut_network(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Deployment(tmp_path, 3, 3, APP) as deployment:
        run = deployment.submit(
            out=str(out), method="scaffold", rounds=10, deadline=45, min_clients=1, **CONFIG
        )
        wait_until(lambda: len(records(out)) >= 1, 200)
        # Client processes killed at work.
        seen = len(records(out))
        wait_until(lambda: deployment.processes("flwr-clientapp"), 60)
        ends = time.monotonic() + 6
        while time.monotonic() < ends:
            for pid in deployment.processes("flwr-clientapp")[:1]:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        wait_until(lambda: len(records(out)) >= seen + 1, 200)
        # The network cut for a while.
        deployment.proxy.cut()
        time.sleep(20)
        deployment.proxy.mend()
        seen = len(records(out))
        wait_until(lambda: len(records(out)) >= seen + 1, 200)
        # A site that hangs for longer than the deadline.
        os.killpg(deployment.nodes[1].pid, signal.SIGSTOP)
        seen = len(records(out))
        wait_until(lambda: len(records(out)) >= seen + 1, 200)
        os.killpg(deployment.nodes[1].pid, signal.SIGCONT)
        # A whole site killed; it comes back when the server has noticed.
        end(deployment.nodes[0])
        seen = len(records(out))
        wait_until(lambda: len(records(out)) >= seen + 1, 200)
        supervise(deployment, out)
        assert deployment.finish(run, out, 400) == "finished:completed"
    told = [i for r in records(out) for i in r["incidents"]]
    assert len(records(out)) == 10
    assert {i["kind"] for i in told} <= {"late", "site lost", "site crashed", "offline", "failed"}
    assert told
    assert records(out)[-1]["accuracy"] > 0.5


def supervise(deployment: Deployment, out: Path, seconds: float = 300) -> None:
    """Restart sites that have ended, as a service manager does, until the run is finished."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not (out / "model.safetensors").exists():
        for i, node in list(deployment.nodes.items()):
            if node.poll() is not None:
                end(node)
                deployment.start_node(i)
        time.sleep(5)


@pytest.mark.skipif(not CHAOS, reason="minutes long: make test-chaos")
@pytest.mark.parametrize("isolated", [False, True])
def test_a_lost_superlink(isolated: bool, tmp_path: Path) -> None:
    """The SuperLink itself is killed and started again: the run resumes from the last complete round.

    Where the server's tasks run in a process of their own, it does so by itself.
    """
    out = tmp_path / "run"
    with Deployment(tmp_path, 2, 2, APP, isolated) as deployment:
        run = deployment.submit(out=str(out), method="scaffold", rounds=4, **CONFIG)
        wait_until(lambda: len(records(out)) >= 1, 200)
        assert deployment.link is not None
        os.killpg(deployment.link.pid, signal.SIGKILL)
        deployment.link.wait()
        time.sleep(3)
        deployment.start_link()
        time.sleep(10)
        if not isolated:
            run = deployment.submit(out=str(out), method="scaffold", rounds=4, **CONFIG)
        supervise(deployment, out)
        assert deployment.finish(run, out) == "finished:completed"
    assert_weights(out, reference("scaffold", 2, rounds=4))


KINDS: dict[str, dict[str, Any]] = {
    "moon": {},  # remembers its last model
    "fedka": {},  # samples of each class from the sites
    "fedfa": {},  # anchors
    # What these keep at their clients is in the server's model only where it tests theirs.
    "fedproto": {"evaluate_locals": True},  # prototypes and no weights
    "fedmlp": {"evaluate_locals": True, "data_partition": "stream"},
    "flashback": {"data_public": 0.1},  # label counts up, distillation on the server
    "feddf": {"data_public": 0.1},
    "creff": {},  # learns features on the server
    "ccvr": {},  # asks all clients once more after the last round
}


@pytest.mark.skipif(not CHAOS, reason="minutes long: make test-chaos")
def test_every_kind_of_method(tmp_path: Path) -> None:
    """States, payloads, learning on the server and a stream, with real messages."""
    with Deployment(tmp_path, 2, 4, APP) as deployment:
        for name, settings in KINDS.items():
            out = tmp_path / name
            run = deployment.submit(out=str(out), method=name, rounds=2, **CONFIG, **settings)
            assert deployment.finish(run, out) == "finished:completed", name
            assert_weights(out, reference(name, 4, rounds=2, **settings))


@pytest.mark.skipif(not CHAOS, reason="minutes long: make test-chaos")
def test_a_thousand_clients_on_four_sites(tmp_path: Path) -> None:
    """A site trains its clients of a round in one process."""
    out, most = tmp_path / "run", 0
    settings = {"rounds": 3, "clients_per_round": 40}
    with Deployment(tmp_path, 4, 1000, APP) as deployment:
        run = deployment.submit(out=str(out), method="fedavg", **CONFIG, **settings)
        ends = time.monotonic() + 600
        while not (out / "model.safetensors").exists() and time.monotonic() < ends:
            most = max(most, len(deployment.processes("flwr-clientapp")))
            time.sleep(0.5)
        assert deployment.finish(run, out) == "finished:completed"
    assert 1 <= most <= 4
    assert [len(r["participants"]) for r in records(out)] == [40] * 3
    print(f"a round of 40 clients on 4 sites: {[r['seconds']['total'] for r in records(out)]} s")
    assert_weights(out, reference("fedavg", 1000, **settings))


@pytest.mark.skipif(not CHAOS, reason="minutes long: make test-chaos")
def test_twelve_sites(tmp_path: Path) -> None:
    """The app of the template, on digits, on one machine; clients lost to overload are reported."""
    out = tmp_path / "run"
    with Deployment(tmp_path, 12, 12, database=False) as deployment:
        run = deployment.submit(out=str(out), method="fedavg", rounds=3, deadline=200, min_clients=6)
        wait_until(lambda: len(records(out)) >= 2, 800)
        print(f"memory of all processes: {deployment.memory() / 1e6:.0f} MB")
        assert deployment.finish(run, out, 600) == "finished:completed"
    print([(len(r["participants"]), r["incidents"], r["seconds"]["total"]) for r in records(out)])
    assert len(records(out)) == 3
    for record in records(out):
        lost = {incident["client"] for incident in record["incidents"]}
        assert len(record["participants"]) >= 6
        assert set(record["participants"]) | lost == set(range(12))
