"""Replayed, reordered and forged replies: each is named and left out, and the run goes on without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import copied
from flower_world import SIZES, World, apart
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from processes import Deployment, wait_until
from test_flower_processes import APP, CONFIG, records

from holdfast.flower.sealing import SEAL, check_seal, new_binding, seal_of
from holdfast.flower.wire import WireError

FIRST, SECOND, NODES = 101, 102, 3  # node 101 has the clients 0 and 3, node 102 has 1 and 4


def of_round(asked: Message, number: int) -> bool:
    return "request" in asked.content and asked.content["request"]["round"] == number


def without(folder: Path, lost: list[int]) -> World:
    """The same run in which these nodes do not answer in round 2."""
    world = World(folder, method="scaffold", nodes=NODES)
    world.grid.fault = lambda asked, reply: (
        [] if of_round(asked, 2) and asked.metadata.dst_node_id in lost else [reply]
    )
    return world.run()


def assert_lost(world: World, kind: str, lost: list[int], folder: Path) -> None:
    clients = [k for k in range(len(SIZES)) if FIRST + k % NODES in lost]
    assert world.incidents() == [(2, k, kind) for k in clients]
    assert apart(world.model, without(folder, lost).model) == 0


def given(content: RecordDict, reply: Message) -> Message:
    reply.__dict__["_content"] = content
    return reply


def test_a_reply_of_the_round_before_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "a", method="scaffold", nodes=NODES)
    kept: dict[int, RecordDict] = {}

    def fault(asked: Message, reply: Message) -> list[Message]:
        if of_round(asked, 1):
            kept[asked.metadata.dst_node_id] = copied(reply.content)
        if of_round(asked, 2) and asked.metadata.dst_node_id == SECOND:
            given(kept[SECOND], reply)
        return [reply]

    world.grid.fault = fault
    assert_lost(world.run(), "wrong request", [SECOND], tmp_path / "b")


def test_a_reply_of_the_same_round_of_another_run_is_refused(tmp_path: Path) -> None:
    other = World(tmp_path / "other", method="scaffold", nodes=NODES, seed=9).run()
    recorded = [m for m in other.grid.received if any(name.startswith("result") for name in m.content)]
    world = World(tmp_path / "a", method="scaffold", nodes=NODES)

    def fault(asked: Message, reply: Message) -> list[Message]:
        if of_round(asked, 2) and asked.metadata.dst_node_id == SECOND:
            given(recorded[NODES + 1].content, reply)  # of the same node and round
        return [reply]

    world.grid.fault = fault
    assert_lost(world.run(), "wrong request", [SECOND], tmp_path / "b")


def test_replies_in_each_others_place_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "a", method="scaffold", nodes=NODES)
    waiting: list[Message] = []

    def fault(asked: Message, reply: Message) -> list[Message]:
        if not of_round(asked, 2) or asked.metadata.dst_node_id not in (FIRST, SECOND):
            return [reply]
        waiting.append(reply)
        if len(waiting) < 2:
            return []
        one, other = waiting
        contents = copied(one.content), copied(other.content)
        return [given(contents[1], one), given(contents[0], other)]

    world.grid.fault = fault
    assert_lost(world.run(), "wrong request", [FIRST, SECOND], tmp_path / "b")


def flipped(content: RecordDict) -> None:
    """One bit of a tensor."""
    record = content["client 1"]
    name = next(iter(record))
    data = bytearray(record[name].data)
    data[-1] ^= 1
    old = record[name]
    record[name] = Array(dtype=old.dtype, shape=old.shape, stype=old.stype, data=bytes(data))


FORGERIES: dict[str, Callable[[RecordDict], object]] = {
    "a bit of a tensor": flipped,
    "a fact": lambda c: c["result 1"].update({"samples": 1}),
    "a record more": lambda c: c.update({"failed 1": ConfigRecord({"detail": "no"})}),
    "a record less": lambda c: c.pop("client 1"),
    "another client's tensors": lambda c: c.update({"client 1": c["client 4"]}),
    "no seal": lambda c: c.pop(SEAL),
    "a seal of zeros": lambda c: c[SEAL].update({"code": "0" * 64}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_changed_reply_is_refused(name: str, tmp_path: Path) -> None:
    world = World(tmp_path / "a", method="scaffold", nodes=NODES)

    def fault(asked: Message, reply: Message) -> list[Message]:
        if of_round(asked, 2) and asked.metadata.dst_node_id == SECOND:
            content = copied(reply.content)
            FORGERIES[name](content)
            given(content, reply)
        return [reply]

    world.grid.fault = fault
    assert_lost(world.run(), "forged", [SECOND], tmp_path / "b")


def test_a_reply_from_another_node_is_refused_and_the_true_one_counts(tmp_path: Path) -> None:
    """The forgery arrives first, with a content that this node could have sealed."""
    world = World(tmp_path, method="scaffold", nodes=NODES)

    def fault(asked: Message, reply: Message) -> list[Message]:
        if not of_round(asked, 2) or asked.metadata.dst_node_id != SECOND:
            return [reply]
        forged = copy.deepcopy(reply)
        forged.metadata.__dict__["_src_node_id"] = FIRST
        return [forged, reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == [(2, k, "forged") for k in (1, 4)]
    assert world.records[1]["participants"] == list(range(len(SIZES)))


def test_reports_and_statistics_are_sealed_too(tmp_path: Path) -> None:
    world = World(tmp_path, method="ccvr").run()
    assert {m.metadata.message_type for m in world.grid.sent} == {"query", "train", "query.statistics"}
    assert all(SEAL in reply.content for reply in world.grid.received)
    nonces = [m.content["binding"]["nonce"] for m in world.grid.sent]
    assert len(set(nonces)) == len(nonces)


def test_a_seal_covers_what_was_requested() -> None:
    """A site that was asked for another round by someone in between seals that."""
    request = RecordDict({**new_binding(), "request": ConfigRecord({"round": 2, "clients": [1, 2]})})
    reply = RecordDict({"client 1": ArrayRecord({"a 3": Array(np.arange(3.0))})})
    changed = copied(request)
    changed["request"]["round"] = 1
    for asked, fits in ((request, True), (changed, False)):
        reply[SEAL] = seal_of(asked, reply)
        if fits:
            check_seal(request, reply)
        else:
            with pytest.raises(WireError, match="does not match its content"):
                check_seal(request, reply)


HOSTILE = """
from flwr.app import Array, RecordDict
from flwr.clientapp import ClientApp

class Hostile(ClientApp):
    '''Site 1 sends its first reply again in round 2, and changes its reply after it was sealed in round 3.'''

    def __call__(self, message, context):
        reply = super().__call__(message, context)
        round = message.content["request"]["round"] if "request" in message.content else 0
        if context.node_config["partition-id"] != 1:
            return reply
        if round == 1:
            context.state = RecordDict(dict(reply.content))
        if round == 2:
            for name, record in context.state.items():
                reply.content[name] = record
        if round == 3:
            record = reply.content["client 1"]
            for name, old in list(record.items()):
                data = old.data[:-1] + bytes([old.data[-1] ^ 1])
                record[name] = Array(dtype=old.dtype, shape=old.shape, stype=old.stype, data=data)
        return reply

client.__class__ = Hostile
"""


def test_replayed_and_forged_replies_of_real_processes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Deployment(tmp_path, 2, 2, APP + HOSTILE, database=False) as deployment:
        run = deployment.submit(out=str(out), method="scaffold", rounds=4, **CONFIG)
        wait_until(lambda: (out / "model.safetensors").exists(), 300)
        assert deployment.finish(run, out) == "finished:completed"
    found = [(r["round"], i["client"], i["kind"]) for r in records(out) for i in r["incidents"]]
    assert found == [(2, 1, "wrong request"), (3, 1, "forged")]
    assert [r["participants"] for r in records(out)] == [[0, 1], [0], [0], [0, 1]]
