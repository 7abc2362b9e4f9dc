"""Training on a real cluster gives the model of the sequential engine, also when workers fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import leaves
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Batch, Method, Tree
from holdfast.methods.context import Client
from holdfast.methods.registry import METHODS, parse_method
from holdfast.models.network import Output
from holdfast.runs import read_audit, verify_audit
from holdfast.training.comparison import compare
from holdfast.training.experiment import Experiment
from holdfast.training.session import Training
from holdfast.training.train import train

ray = pytest.importorskip("ray")

SIZES = (7, 4, 2, 9, 5, 6, 3, 8)
CLASSES = 4


def federation() -> Federation:
    rng = np.random.default_rng(1)
    total = sum(SIZES)
    y = np.arange(total + 4) % CLASSES
    x = rng.integers(0, 160, size=(total + 4, 1, 4, 4))
    x[np.arange(total + 4), :, :, y] += 90
    parts = np.split(rng.permutation(total), np.cumsum(SIZES)[:-1])
    data = Dataset.from_arrays(x.astype(np.uint8), y, x[:12].astype(np.uint8), y[:12])
    return federate(data, parts, public=np.arange(total, total + 4))


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(16, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES))


def training_on(cluster: Any, method: str, settings: Settings) -> Training:
    return Training(
        parse_method(method),
        net(),
        federation(),
        settings,
        engine="ray",
        ray_address=cluster.address,
        device="cpu",
    )


def learnt(
    method: Method,
    engine: str,
    address: str | None = None,
    rounds: int = 2,
    norm: bool = False,
    precision: str = "float64",
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """All tensors of the server and the clients after some rounds, and the rounds' records."""
    settings = Settings(
        rounds=rounds,
        local_epochs=2,
        batch_size=3,
        lr=0.05,
        momentum=0.9,
        seed=4,
        evaluate_locals=False,
        **more,
    )
    training = Training(
        method,
        net(norm),
        federation(),
        settings,
        engine=engine,
        ray_address=address,
        device="cpu",
        precision=precision,
    )
    client_states = StateCache(None, None)
    loop = training.loop(client_states)
    records = [loop.round(number) for number in range(1, rounds + 1)]
    server = loop.server
    known = {"params": server.params, "buffers": server.buffers, "state": server.state}
    known |= {f"client {k}": client_states.get(k) or {} for k in range(len(SIZES))}
    return {path: value.clone() for path, value in leaves(known)}, records


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for path, value in one.items():
        torch.testing.assert_close(other[path], value, rtol=1e-9, atol=1e-9, msg=path)


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[path], other[path]) for path in one)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_gives_the_sequential_engines_model(name: str, cluster: Any) -> None:
    expected, _ = learnt(METHODS[name](), "sequential")
    found, records = learnt(METHODS[name](), "ray", cluster.address)
    assert_close(expected, found)
    assert all(record["incidents"] == [] for record in records)


def test_batch_norm_and_sampling(cluster: Any) -> None:
    method = parse_method("fedntd+fedprox")
    expected, before = learnt(method, "sequential", norm=True, clients_per_round=3)
    found, after = learnt(method, "ray", cluster.address, norm=True, clients_per_round=3)
    assert_close(expected, found)
    assert [r["participants"] for r in before] == [r["participants"] for r in after]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision(precision: str, cluster: Any) -> None:
    """The weights and states of float32, up to rounding, and the same bits again."""
    scaffold = parse_method("scaffold")
    found, again = (learnt(scaffold, "ray", cluster.address, precision=precision)[0] for _ in range(2))
    assert same_bits(found, again)
    full, _ = learnt(scaffold, "sequential", precision="float32")
    apart = {k: float((found[k] - value).norm() / value.norm().clamp(min=0.1)) for k, value in full.items()}
    assert 1e-5 < max(apart.values()) < 0.05


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_privacy_of_clients_and_of_samples(method: str, cluster: Any) -> None:
    pytest.importorskip("dp_accounting")
    dp = {"epsilon": 1e3, "delta": 1e-2, "noise_multiplier": 0.5}
    sums = {} if method == "fedavg" else {"clip_sums": 1.0}
    given = {"dp": dp | sums, "dp_samples": dp | {"epsilon": 1e4}, "clients_per_round": 4}
    expected, before = learnt(parse_method(method), "sequential", **given)
    found, after = learnt(parse_method(method), "ray", cluster.address, **given)
    assert_close(expected, found)
    assert [r["epsilon"] for r in before] == [r["epsilon"] for r in after]
    assert [r["sample_privacy"] for r in before] == [r["sample_privacy"] for r in after]


@pytest.mark.parametrize(
    "names",
    [
        ("dp", "dp_samples", "compress", "max_update_norm"),
        ("dp", "dp_samples", "secure"),
        ("robust", "compress", "max_update_norm", "max_update_ratio"),
        ("secure",),
    ],
    ids="+".join,
)
def test_what_may_be_done_to_updates(names: tuple[str, ...], cluster: Any) -> None:
    """All combinations that are not refused, as in tests/training/test_combined_updates.py."""
    if "dp" in names:
        pytest.importorskip("dp_accounting")
    dp = {"epsilon": 1e4, "delta": 1e-2, "noise_multiplier": 0.3}
    options = {
        "dp": dp,
        "dp_samples": dp,
        "secure": {"name": "secagg+"},
        "robust": {"name": "median"},
        "compress": "topk:0.5+int8",
        "max_update_norm": 1.5,
        "max_update_ratio": 3.0,
    }
    given = {name: options[name] for name in names} | {"clients_per_round": 5}
    expected, before = learnt(parse_method("fedavg"), "sequential", **given)
    found, after = learnt(parse_method("fedavg"), "ray", cluster.address, **given)
    assert_close(expected, found)
    for one, other in zip(before, after, strict=True):
        for key in one.keys() - {"seconds", "train_loss"}:
            assert one[key] == other[key], key


def test_both_nodes_work(cluster: Any) -> None:
    from holdfast.engine.ray import worker_pool

    workers = [ray.get(w.actor.ready.remote()) for w in worker_pool(cluster.address, "CPU").workers]
    assert len(workers) == len(set(workers)) == 2
    assert len({actor["NodeID"] for actor in _actors()}) == 2


def _actors() -> Iterator[dict[str, Any]]:
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE":
            yield {"NodeID": actor["Address"]["NodeID"]}


@dataclass(frozen=True)
class Unlucky(Method):
    """FedAvg whose clients ``whom`` fail in round 2, ``times`` times."""

    name: ClassVar[str] = "unlucky"
    folder: str = ""
    how: str = "die"
    whom: tuple[int, ...] = ()
    times: int = 1

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        if client.round == 2 and client.id in self.whom:
            for turn in range(self.times):
                mark = Path(self.folder) / f"{client.id}-{turn}"
                if not mark.exists():
                    mark.touch()
                    if self.how == "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if self.how == "diverge":
                        return {"factor": client.context.scalar(float("nan"))}
                    if self.how == "refuse":
                        raise HoldfastError("this client refuses")
                    time.sleep(60)
        return {"factor": client.context.scalar(1.0)}

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> torch.Tensor:
        return carry["factor"] * super().task_loss(out, batch, carry)

    def client_final(self, params: Any, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"last": params}


def test_a_killed_worker_leaves_no_trace_in_the_result(cluster: Any, tmp_path: Path) -> None:
    calm, _ = learnt(Unlucky(), "ray", cluster.address, rounds=3)
    found, records = learnt(Unlucky(str(tmp_path), whom=(1, 6)), "ray", cluster.address, rounds=3)
    assert same_bits(calm, found)
    assert {i["client"] for i in records[1]["incidents"]} >= {1, 6}
    assert {i["kind"] for i in records[1]["incidents"]} == {"worker died"}
    assert records[1]["participants"] == list(range(len(SIZES)))
    assert records[0]["incidents"] == records[2]["incidents"] == []


def test_clients_that_kill_every_worker_are_given_up(cluster: Any, tmp_path: Path) -> None:
    method = Unlucky(str(tmp_path), whom=(3,), times=10)
    _, records = learnt(method, "ray", cluster.address, rounds=3)
    assert 3 not in records[1]["participants"]
    assert any("given up" in i["detail"] for i in records[1]["incidents"] if i["client"] == 3)
    assert 3 in records[2]["participants"]


def test_a_round_closes_without_those_still_at_work(cluster: Any, tmp_path: Path) -> None:
    method = Unlucky(str(tmp_path), how="sleep", whom=(2,))
    began = time.monotonic()
    _, records = learnt(method, "ray", cluster.address, rounds=3, deadline=15, min_clients=4)
    assert time.monotonic() - began < 55
    assert {"client": 2, "kind": "late", "detail": "after 15 s"} in records[1]["incidents"]
    assert 2 not in records[1]["participants"]
    assert 2 in records[2]["participants"]


def test_too_few_clients_stop_the_run(cluster: Any, tmp_path: Path) -> None:
    method = Unlucky(str(tmp_path), how="sleep", whom=tuple(range(len(SIZES))))
    with pytest.raises(HoldfastError, match=r"round 2: no usable update is left .*late"):
        learnt(method, "ray", cluster.address, deadline=5)


def test_an_error_in_a_worker_is_raised_unchanged(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="this client refuses"):
        learnt(Unlucky(str(tmp_path), how="refuse", whom=(2,)), "ray", cluster.address)


def test_a_client_that_diverges_is_left_out(cluster: Any, tmp_path: Path) -> None:
    method = Unlucky(str(tmp_path), how="diverge", whom=(2,))
    found, records = learnt(method, "ray", cluster.address, rounds=3)
    assert records[1]["incidents"] == [{"client": 2, "kind": "not finite"}]
    assert 2 not in records[1]["participants"]
    assert records[2]["participants"] == list(range(len(SIZES)))
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


def test_the_runs_of_a_comparison_share_the_cluster(cluster: Any, tmp_path: Path) -> None:
    from holdfast.engine.ray import worker_pool

    def workers() -> set[int]:
        return {ray.get(w.actor.ready.remote()) for w in worker_pool(cluster.address, "CPU").workers}

    experiment = Experiment(
        data="digits",
        model="mlp:8",
        partition="iid",
        clients=6,
        rounds=2,
        engine="ray",
        ray_address=cluster.address,
    )
    before = workers()
    shared = compare(["fedavg", "scaffold"], experiment, 2, out=tmp_path)
    assert workers() == before
    alone = compare(["fedavg", "scaffold"], replace(experiment, engine="sequential", ray_address=None), 2)
    for one, other in zip(shared.rows, alone.rows, strict=True):
        assert one.accuracy == pytest.approx(other.accuracy, abs=1 / 300)  # one test sample


def test_from_the_command_line(cluster: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "run", "--data", "digits", "--model", "mlp:8", "--partition", "iid",
               "--clients", "4", "--rounds", "2", "--engine", "ray", "--ray-address", cluster.address,
               "--deadline", "100", "--min-clients", "2", "--out", str(tmp_path / "run")]  # fmt: skip
    # The tests' own workers hold both CPUs.
    busy = subprocess.run(command, capture_output=True, text=True)
    assert busy.returncode == 2
    assert "none of the Ray cluster's 2 CPUs is free" in busy.stderr
    ray.shutdown()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_object_store_does_not_fill(cluster: Any) -> None:
    """200 rounds with memories, payloads and results, whose objects must be freed."""
    settings = Settings(
        rounds=200, local_epochs=1, batch_size=8, lr=0.05, evaluate_locals=False, evaluate_every=200
    )
    loop = training_on(cluster, "scaffold", settings).loop(StateCache(None, None))
    used = []
    for number in range(1, 201):
        loop.round(number)
        if number % 20 == 0:
            free = ray.available_resources()["object_store_memory"]
            used.append(ray.cluster_resources()["object_store_memory"] - free)
    assert max(used[5:]) <= max(used[:5]) + (1 << 20), used


def test_a_run_directory(cluster: Any, tmp_path: Path) -> None:
    run = train(
        parse_method("fedavg"),
        net(),
        federation(),
        rounds=3,
        batch_size=4,
        engine="ray",
        ray_address=cluster.address,
        out=tmp_path / "run",
    )
    assert run.experiment["engine"] == "ray"
    assert run.experiment["ray_address"] == cluster.address
    assert len(run.records) == 3
    assert 0 <= run.accuracy <= 1
    assert verify_audit(tmp_path / "run").problem is None
    received = [entry["received"] for entry in read_audit(tmp_path / "run") if entry["event"] == "round"]
    assert [len(hashes) for hashes in received] == [len(record["participants"]) for record in run.records]


def test_workers_use_the_main_processs_precision(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.engine.ray import make_engine

    training = training_on(cluster, "fedavg", Settings(rounds=1))
    setup = ray.get(training.engine.setup)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)  # as in a new process
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    make_engine(setup)
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.allow_tf32


def test_a_machine_that_goes_away_takes_nothing_with_it(cluster: Any) -> None:
    """Last: the cluster is smaller afterwards."""
    settings = Settings(rounds=3, local_epochs=2, batch_size=3, lr=0.05, evaluate_locals=False)

    def rounds(loss: bool) -> dict[str, torch.Tensor]:
        loop = training_on(cluster, "fedavg", settings).loop(StateCache(None, None))
        loop.round(1)
        if loss:
            node = next(n for n in cluster.list_all_nodes() if n is not cluster.head_node)
            cluster.remove_node(node, allow_graceful=False)
        records = [loop.round(2), loop.round(3)]
        if loss:
            assert any(i["kind"] == "worker died" for r in records for i in r["incidents"])
        return {k: v.clone() for k, v in loop.server.params.items()}

    assert same_bits(rounds(loss=False), rounds(loss=True))


def test_a_missing_cluster_raises_an_error(cluster: Any) -> None:
    ray.shutdown()
    with pytest.raises(HoldfastError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        learnt(parse_method("fedavg"), "ray", "127.0.0.1:1")
