"""Validation on Flower: the metrics of a simulation, measured at the sites, also for a server without data."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from flower_world import SCHEDULE, World, apart, reference

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.flower import FlowerApp, for_server

SIZES = (11, 8, 14, 20, 9)
CLASSES = 4
SETTINGS = {"validation": 0.3, "rounds": 4, "clients_per_round": 3, "lr": 0.2}


def federation(regression: bool = False) -> hf.Federation:
    rng = np.random.default_rng(6)
    total = sum(SIZES)
    x = rng.normal(size=(total, 6)).astype(np.float32)
    number = (x[:, 0] - x[:, 1] + rng.normal(size=total)).astype(np.float32)
    y = number if regression else np.digitize(number, [-1, 0, 1])
    task = "regression:bins=[-1,0,1]" if regression else None
    parts = np.split(rng.permutation(total), np.cumsum(SIZES)[:-1])
    return hf.federate(hf.Dataset.from_arrays(x, y, x[:12], y[:12], task=task), parts)


def single_site(among: hf.Federation, k: int) -> hf.Dataset:
    """What one site has: the samples of its client alone."""
    data, ids = among.dataset, among.client(k)
    x, y = data.x_train[ids], data.y_train[ids]
    return hf.Dataset("sites", x, y, x[:1], y[:1], data.classes, task=data.task)


def close(one: Any, other: Any) -> bool:
    """Whether two entries of records are equal, up to rounding and the order of clients."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "fedetf", "fedproto", "ccvr"])
def test_the_metrics_are_those_of_a_simulation(tmp_path, method) -> None:
    among = federation()
    world = World(tmp_path, among=among, method=method, **SETTINGS).run()
    expected = reference(hf.parse_method(method), among, **SETTINGS)
    assert method == "fedproto" or apart(world.model, expected.model.state_dict()) < 1e-9
    for found, wanted in zip(world.records, json.loads(json.dumps(expected.records)), strict=True):
        if method != "fedproto":  # its clients keep their weights, so the server has no model of theirs
            assert close(found["validation"], wanted["validation"])
        assert close(found["local_validation"], wanted["local_validation"])
        assert found["validation"]["clients"] == [0, 1, 2, 3, 4]
        assert found["validation"]["samples"] == [round(0.3 * n) for n in SIZES]
        assert sorted(found["local_validation"]["clients"]) == sorted(found["participants"])


@pytest.mark.parametrize("regression", [False, True])
def test_a_server_without_data_trains_and_stops_like_a_simulation(tmp_path, regression) -> None:
    among = federation(regression)
    settings = SETTINGS | {"rounds": 40, "patience": 2, "lr": 0.05 if regression else 0.8}
    app = FlowerApp(lambda node, run: single_site(among, node["partition-id"]))
    world = World(tmp_path, nodes=5, among=among, app=app, **settings)
    for place in world.grid.nodes.values():
        del place["num-partitions"]
    world.run()
    expected = reference("fedavg", among, **settings)
    assert expected.stopped_early
    assert len(world.records) == len(expected.records)
    for found, wanted in zip(world.records, expected.records, strict=True):
        assert close(found["validation"], json.loads(json.dumps(wanted["validation"])))
        assert not {"accuracy", "mae", "loss", "class_accuracy", "forgetting"} & found.keys()
    run = hf.Run.open(world.out)
    assert (run.best_round, run.stopped_early) == (expected.best_round, True)
    assert apart(run.best_model.state_dict(), expected.best_model.state_dict()) < 1e-6
    assert run.score == pytest.approx(expected.validation()[-1])  # there is no test set
    assert "validation" in repr(run)


def test_an_interrupted_run_goes_on_with_the_same_metrics(tmp_path) -> None:
    among, settings = federation(), SETTINGS | {"rounds": 20, "patience": 3, "lr": 0.8}
    app = FlowerApp(lambda node, run: among)
    calm = World(tmp_path / "calm", among=among, app=app, **settings).run()
    killed = World(tmp_path / "killed", among=among, app=app, **settings)
    answer, count = killed.grid.fault, 0

    def fail_later(asked, reply):
        nonlocal count
        count += 1
        if count > 14:
            raise KeyboardInterrupt
        return answer(asked, reply)

    killed.grid.fault = fail_later
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    killed.grid.fault = answer
    killed.run()
    assert [r["validation"] for r in killed.records] == [r["validation"] for r in calm.records]
    for name in ("model.safetensors", "model-best.safetensors"):
        assert (killed.out / name).read_bytes() == (calm.out / name).read_bytes()


def test_a_site_that_does_not_answer_is_left_out(tmp_path) -> None:
    among = federation()
    world = World(tmp_path, nodes=5, among=among, **SETTINGS | {"clients_per_round": 0})

    def silent(asked, reply):
        lost = asked.metadata.message_type.startswith("evaluate") and asked.metadata.dst_node_id == 103
        return [] if lost else [reply]

    world.grid.fault = silent
    world.run()
    for record in world.records:
        assert record["validation"]["clients"] == [0, 1, 3, 4]
        assert record["local_validation"]["clients"] == [0, 1, 2, 3, 4]


def test_nothing_but_numbers_leaves_a_site_in_an_evaluation(tmp_path) -> None:
    world = World(tmp_path, among=federation(), **SETTINGS).run()
    replies = [m for m in world.grid.received if m.metadata.message_type.startswith("evaluate")]
    assert replies
    for reply in replies:
        assert not reply.content.array_records
        for name, record in reply.content.config_records.items():
            assert name == "seal" or (name.startswith("metrics ") and set(record) == {"round", "values"})


def test_sites_whose_data_differ_are_refused_by_a_server_without_data(tmp_path) -> None:
    among = federation(regression=True)

    def own_bins(node, run):
        site = single_site(among, node["partition-id"])
        return site.with_task("regression")  # quantiles of its own targets

    world = World(tmp_path, nodes=5, among=among, app=FlowerApp(own_bins), **SETTINGS)
    with pytest.raises(HoldfastError, match="differs from that of the first site"):
        world.run()


def test_a_server_without_data_needs_validation(tmp_path) -> None:
    among = federation()
    world = World(
        tmp_path, among=among, app=FlowerApp(lambda node, run: among), **SETTINGS | {"validation": 0}
    )
    with pytest.raises(HoldfastError, match="has no test samples, and no client has validation samples"):
        world.run()


def test_a_site_with_a_single_sample_refuses(tmp_path) -> None:
    small = hf.federate(federation().dataset, [[0, 1, 2], [3]])
    world = World(tmp_path, among=small, **SETTINGS | {"clients_per_round": 0})
    with pytest.raises(HoldfastError, match="client 1 has a single sample"):
        world.run()


def test_a_site_that_protects_its_samples_sends_no_metrics_of_them(tmp_path) -> None:
    settings = SETTINGS | {"dp-samples": "epsilon=8,delta=0.001", "clients_per_round": 0}
    world = World(tmp_path, among=federation(), **settings)
    with pytest.raises(HoldfastError, match="would leave this site without noise"):
        world.run()


def test_the_task_loss_and_metrics_of_the_config_are_used(tmp_path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=60) > 0).astype(np.int64)
    among = hf.federate(hf.Dataset.from_arrays(x, y, x, y), np.split(np.arange(60), 3))
    app = FlowerApp(lambda node, run: among, lambda run: for_server(among.dataset))
    settings = {"task": "binary", "metrics": "auroc,f1", "validation": 0.4}
    world = World(tmp_path, among=among, app=app, **settings).run()
    expected = reference("fedavg", among, **settings | {"metrics": ["auroc", "f1"]})
    record = json.loads(json.dumps(expected.records[-1]))
    for key in ("auroc", "f1", "validation", "local_validation"):
        assert close(world.records[-1][key], record[key])
    assert SCHEDULE["rounds"] == len(world.records)
    assert torch.isfinite(torch.tensor(record["auroc"]))
