"""A hundred rounds of digits with random faults: the model is as accurate as without faults."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import copied, resealed
from flower_world import World
from flwr.app import Array, ConfigRecord, Error, Message

import holdfast as hf
from holdfast.core import files
from holdfast.core.random import generator
from holdfast.methods.registry import parse_method

pytestmark = pytest.mark.skipif(not os.environ.get("HOLDFAST_CHAOS"), reason="minutes long: make test-chaos")

ROUNDS, CLIENTS, NODES = 100, 10, 5
SCHEDULE = {
    "rounds": ROUNDS,
    "local_epochs": 1,
    "batch_size": 32,
    "lr": 0.1,
    "momentum": 0.0,
    "clients_per_round": 8,
}
FAULT_RATE = 0.12  # of a node's replies


def digits() -> hf.Federation:
    return hf.Experiment(
        data="digits", partition="dirichlet:0.5", clients=CLIENTS, partition_seed=1
    ).build_federation()


class Weather:
    """Faults drawn by (seed, round, node), so that a restarted server meets the same faults."""

    def __init__(self, seed: int, world: World) -> None:
        self.seed, self.world = seed, world
        self.all_nodes = dict(world.grid.nodes)

    def __call__(self, asked: Message, reply: Message) -> list[Message]:
        if "request" not in asked.content:
            return [reply]
        round, node = asked.content["request"]["round"], asked.metadata.dst_node_id
        self.network(round)
        rng = generator(self.seed, "chaos", round, node)
        if reply.has_error() or rng.random() >= FAULT_RATE:
            return [reply]
        match rng.integers(9):
            case 0:
                return []  # never, or after the deadline
            case 1:
                return [reply, reply]
            case 2:
                error = Message(Error(8, "killed"), reply_to=asked)
                error.metadata.__dict__["_src_node_id"] = node
                return [error]
            case 3:
                error = Message(Error(5, "lost"), reply_to=asked)
                error.metadata.__dict__["_src_node_id"] = 1
                return [error]
            case 8:
                return [self.with_a_full_disk(asked)]
            case kind:
                content = copied(reply.content)
                tensors = [name for name in content if name.startswith("client ")]
                if not tensors:
                    return [reply]
                record = content[tensors[rng.integers(len(tensors))]]
                path = list(record)[rng.integers(len(record))]
                value = record[path].numpy().copy()
                if kind == 4:
                    value.flat[0] = [np.nan, np.inf, -np.inf][rng.integers(3)]
                    record[path] = Array(value)
                elif kind == 5:
                    record[path] = [
                        Array(value[:-1]),
                        Array(value.astype(np.int32)),
                        Array(np.zeros(5_000_000)),
                    ][rng.integers(3)]
                elif kind == 6:
                    record.pop(path) if rng.random() < 0.5 else record.update({"more 1": Array(value[:1])})
                else:
                    name = tensors[0].replace("client", "result")
                    facts = dict(content[name]) | {"round": round - 1}
                    content[name] = ConfigRecord(facts)
                resealed(asked, reply, content)
                return [reply]

    def with_a_full_disk(self, asked: Message) -> Message:
        """The reply of a site without disk space for its clients' memories."""
        whole = files.write_all

        def full(file: Any, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        try:
            files.write_all = full
            return self.world.grid._answer(asked)
        finally:
            files.write_all = whole

    def network(self, round: int) -> None:
        """Disconnect random nodes for a few rounds."""
        for node, config in self.all_nodes.items():
            away = any(
                generator(self.seed, "cut", r, node).random() < 0.02 for r in range(max(1, round - 3), round)
            )
            if away:
                self.world.grid.nodes.pop(node, None)
            else:
                self.world.grid.nodes[node] = config


def stormy(folder: Path, seed: int) -> tuple[World, int, int]:
    """Serve until the run is finished; returns how often the server was killed and how often its disk was full."""
    killed = full = 0
    while True:
        world = World(folder, nodes=NODES, among=digits(), method="scaffold", model="mlp:64", precision="float32",
                      seed=seed, deadline=60.0, evaluate_every=5, **{k: v for k, v in SCHEDULE.items()})  # fmt: skip
        world.grid.fault = Weather(seed, world)
        child = os.fork()
        if not child:
            serve(world, seed, killed + full)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended == 0:
            return world, killed, full
        assert ended in (-signal.SIGKILL, 3), ended
        killed, full = killed + (ended == -signal.SIGKILL), full + (ended == 3)
        assert killed + full < 60


def serve(world: World, seed: int, attempt: int) -> None:
    """Serve in a child process that is killed after a random number of writes, or stopped by a full disk."""
    rng = generator(seed, "kill", attempt)
    left, disk = int(rng.integers(30, 400)), rng.random() < 0.3
    whole = files.write_all

    def write_all(file: Any, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            if not disk:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        whole(file, data)

    code = 1
    try:
        files.write_all = write_all
        world.run()
        code = 0
    except hf.HoldfastError as error:
        code = 3 if "no space is left" in str(error) else 4
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def test_a_hundred_rounds_in_a_storm(tmp_path: Path) -> None:
    calm = []
    for seed in range(5):
        run = hf.train(
            parse_method("scaffold"), hf.parse_model("mlp:64"), digits(), engine="sequential", device="cpu",
            evaluate_locals=False, evaluate_every=5, seed=seed, **SCHEDULE,
        )  # fmt: skip
        calm.append(run.accuracy)
    world, killed, full = stormy(tmp_path, seed=0)
    records = world.records
    accuracy = records[-1]["accuracy"]
    kinds: dict[str, int] = {}
    for record in records:
        for incident in record["incidents"]:
            kinds[incident["kind"]] = kinds.get(incident["kind"], 0) + 1
    print(f"\ncalm {np.mean(calm):.4f} ± {np.std(calm, ddof=1):.4f} {calm}; storm {accuracy:.4f}")
    print(f"server killed {killed} times, disk full {full} times, incidents {kinds}")
    assert [r["round"] for r in records] == list(range(1, ROUNDS + 1))
    assert killed >= 3
    assert len(kinds) >= 8
    assert abs(accuracy - np.mean(calm)) <= max(2 * np.std(calm, ddof=1), 0.01)
