"""Randomly damaged messages are either used or refused with the defined error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import damaged
from flower_world import CLASSES, SIZES, World
from flwr.app import Message

from holdfast.engine.aggregation import validate_update
from holdfast.engine.clients import Broadcast, ClientResult, Incident, Job
from holdfast.engine.state_cache import StateCache
from holdfast.flower.app import AppConfig
from holdfast.flower.engine import FlowerEngine
from holdfast.flower.messages import RoundRequest, tree_from_record, tree_to_record
from holdfast.flower.nodes import Nodes
from holdfast.flower.population import Population, SiteReport
from holdfast.flower.server import FlowerTraining
from holdfast.flower.wire import WireError

INPUTS = int(os.environ.get("HOLDFAST_FUZZ", "20000")) // 10  # docs/reliability.md was written with a million
KINDS = {
    "wrong keys",
    "wrong dtype",
    "wrong shape",
    "wrong size",
    "absurd size",
    "wrong values",
    "wrong round",
    "not finite",
    "memory lost",
}


def message(world: World, part: str, sent: bool = False) -> Message:
    """The first message sent or received that has this record."""
    return next(m for m in (world.grid.sent if sent else world.grid.received) if part in m.content)


def test_replies(tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold", rounds=1).run()
    plan = AppConfig(world.app, world.config)
    dataset = world.app.server_data(plan.config)
    nodes = Nodes(world.grid, dataset)
    population = Population.from_reports("0" * 32, nodes.wait_for(len(SIZES), len(SIZES), 0))
    training = FlowerTraining(plan, nodes, population)
    loop = training.loop(StateCache(None, None))
    server, engine = loop.server, training.engine
    assert isinstance(engine, FlowerEngine)
    sent = Broadcast(1, server.params, server.buffers, training.method.broadcast(server))
    job, reply = Job(0, training.federation.client(0)), message(world, "client 0")
    whole, rng, used = reply.content, np.random.default_rng(0), 0
    for _ in range(INPUTS):
        reply.__dict__["_content"] = damaged(whole, rng)
        for item in engine._read_reply(job, sent, {nodes.of_client[0]: reply}, {}, engine._read_result):
            if isinstance(item, Incident):
                assert item.kind in KINDS
            else:
                assert isinstance(item, ClientResult)
                assert validate_update(item, server) in (None, "not finite")
                used += 1
    assert 0 < used < INPUTS


def test_reports_of_sites(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg", rounds=1).run()
    reply = message(world, "properties")
    whole, rng, used = reply.content, np.random.default_rng(0), 0
    for _ in range(INPUTS):
        reply.__dict__["_content"] = damaged(whole, rng)
        try:
            report = SiteReport.from_message(reply, CLASSES)
        except WireError:
            continue
        used += 1
        assert report.counts.shape == (len(report.clients), report.counts.shape[1], CLASSES)
        assert report.counts.min(initial=0) >= 0
    assert 0 < used < INPUTS


def test_a_report_whose_sum_wraps_around(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg", rounds=1).run()
    reply = message(world, "properties")
    site = tree_from_record(reply.content, "clients")
    counts = torch.full_like(site["counts"], 1 << 61)
    assert counts[:2].sum() == 0
    reply.content["clients"] = tree_to_record(site | {"counts": counts})
    with pytest.raises(WireError) as raised:
        SiteReport.from_message(reply, CLASSES)
    assert raised.value.kind == "absurd size"


def test_requests_of_servers(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg", rounds=1).run()
    whole, rng, used = message(world, "request", sent=True).content, np.random.default_rng(0), 0
    for _ in range(INPUTS):
        try:
            request = RoundRequest.from_record(damaged(whole, rng), CLASSES)
        except WireError:
            continue
        used += 1
        assert set(request.run) <= set("0123456789abcdef")
        assert all(type(client) is int and client >= 0 for client in request.clients)
    assert 0 < used < INPUTS
