"""Sites that fail, send invalid replies, are late or reconnect, and servers that are killed: the run continues or stops
with an error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from damage import copied, damaged, resealed
from flower_world import SIZES, World, apart, reference
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

import holdfast as hf
from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.flower.messages import tree_from_record, tree_to_record
from holdfast.methods.registry import METHODS

LIAR = 2  # the client whose replies are tampered with, in round 2


def tampered(world: World, change: Callable[[RecordDict], Any], round: int | None = 2) -> None:
    """Change the reply of the liar's node in one round, or the reply with statistics if ``round`` is None."""

    def fault(asked: Message, reply: Message) -> list[Message]:
        request, statistics = asked.content.get("request"), asked.metadata.message_type == "query.statistics"
        if request is None or LIAR not in request["clients"] or reply.has_error():
            return [reply]
        if not statistics if round is None else request["round"] != round:
            return [reply]
        content = copied(reply.content)
        change(content)
        resealed(asked, reply, content)
        return [reply]

    world.grid.fault = fault


def array(content: RecordDict, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the values of the first manifest."""
    record = content[f"client {LIAR}"]
    manifest = next(iter(record))
    record[manifest] = Array(change(record[manifest].numpy().copy()))


def manifest(content: RecordDict, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of the first manifest, each a name and a shape."""
    record = content[f"client {LIAR}"]
    old = next(iter(record))
    record["\n".join(change(old.split("\n")))] = record.pop(old)


def set_fact(content: RecordDict, key: str, value: Any) -> None:
    content[f"result {LIAR}"][key] = value


def first(a: np.ndarray, value: float) -> np.ndarray:
    a.flat[0] = value
    return a


LIES: dict[str, list[Callable[[RecordDict], Any]]] = {
    "not finite": [
        lambda c: array(c, lambda a: first(a, np.nan)),
        lambda c: array(c, lambda a: first(a, np.inf)),
        lambda c: set_fact(c, "loss", float("nan")),
    ],
    "wrong shape": [
        lambda c: manifest(c, lambda lines: [lines[0].replace("8,16", "16,8"), *lines[1:]]),
        lambda c: manifest(c, lambda lines: [lines[0].replace("8,16", "128"), *lines[1:]]),
    ],
    "wrong dtype": [
        lambda c: array(c, lambda a: a.astype(np.float32)),
        lambda c: array(c, lambda a: a.astype(np.int64)),
        lambda c: array(c, lambda a: a.astype(np.complex128)),
    ],
    "wrong keys": [
        lambda c: c[f"client {LIAR}"].pop(next(iter(c[f"client {LIAR}"]))),
        lambda c: c[f"client {LIAR}"].update({"extra 1": Array(np.zeros(1, np.float32))}),
        lambda c: c[f"client {LIAR}"].update(extra=Array(np.zeros(1, np.float32))),
        lambda c: c[f"client {LIAR}"].update({"memory/more 1": Array(np.zeros(1, np.float32))}),
        lambda c: manifest(c, lambda lines: lines[1:]),
        lambda c: manifest(c, lambda lines: [*lines, lines[0]]),
        lambda c: manifest(c, lambda lines: [*lines, "more 0"]),
        lambda c: manifest(c, lambda lines: []),
        lambda c: c.pop(f"client {LIAR}"),
        lambda c: c.pop(f"result {LIAR}"),
        lambda c: c.update({f"client {LIAR}": ConfigRecord({"a": 1})}),
    ],
    "absurd size": [lambda c: array(c, lambda a: np.zeros(10_000_000, a.dtype))],
    "wrong round": [lambda c: set_fact(c, "round", 1), lambda c: set_fact(c, "round", 99)],
    "wrong values": [
        lambda c: set_fact(c, "weight", 1e9),
        lambda c: set_fact(c, "weight", -1.0),
        lambda c: set_fact(c, "samples", 10_000),
        lambda c: set_fact(c, "label-counts", [1, 2]),
        lambda c: set_fact(c, "round", "2"),
    ],
    "wrong size": [
        lambda c: _cut(c),
        lambda c: array(c, lambda a: a[:-1]),
        lambda c: array(c, lambda a: a.reshape(2, -1)),
    ],
}


def _cut(content: RecordDict) -> None:
    record = content[f"client {LIAR}"]
    name = next(iter(record))
    old = record[name]
    record[name] = Array(dtype=old.dtype, shape=old.shape, stype=old.stype, data=old.data[:-1])


@pytest.mark.parametrize(("kind", "lie"), [(kind, lie) for kind, several in LIES.items() for lie in several])
def test_a_lie_is_named_and_left_out(kind: str, lie: Callable[[RecordDict], Any], tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold")
    tampered(world, lie)
    world.run()
    assert world.incidents() == [(2, LIAR, kind)]
    assert LIAR not in world.records[1]["participants"]
    assert world.records[2]["participants"] == list(range(len(SIZES)))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("not finite", lambda c: array(c, lambda a: first(a, np.nan))),
        ("wrong shape", lambda c: manifest(c, lambda lines: [lines[0].replace(" 4", " 2,2"), *lines[1:]])),
        ("wrong keys", lambda c: c.pop(f"client {LIAR}")),
        ("wrong keys", lambda c: manifest(c, lambda lines: ["count 4", "sum 4,8", "other 4,8,8"])),
        ("failed", lambda c: c.update({f"failed {LIAR}": ConfigRecord({"detail": "OSError: gone"})})),
    ],
)
def test_a_lie_about_the_final_model_is_named_too(
    kind: str, change: Callable[[RecordDict], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CCVR requests statistics from every client; the first reply does not determine the expected spec."""
    monkeypatch.setattr(f"{__name__}.LIAR", 0)
    world = World(tmp_path, method="ccvr")

    tampered(world, change, round=None)
    world.run()
    assert world.incidents() == [(3, LIAR, kind)]
    assert all(value.isfinite().all() for value in world.model.values())


def test_nobody_speaks_of_the_final_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.flower.engine.PAUSE_SECONDS", 0.0)
    world = World(tmp_path, method="ccvr")
    world.grid.fault = lambda asked, reply: (
        [] if asked.metadata.message_type == "query.statistics" else [reply]
    )
    with pytest.raises(HoldfastError, match=r"round 3: no usable update is left .*client 0: late"):
        world.run()
    assert [r["round"] for r in world.records] == [1, 2]
    world.grid.fault = lambda asked, reply: [reply]
    world.run()
    assert apart(world.model, reference(METHODS["ccvr"]()).model.state_dict()) <= 1e-9


def test_the_report_counts_and_names_what_went_wrong(tmp_path: Path) -> None:
    from holdfast.report.page import write_report

    world = World(tmp_path, method="scaffold", evaluate_locals=True)
    tampered(world, lambda c: set_fact(c, "weight", -1.0))
    world.run()
    page = write_report([world.out], tmp_path / "report.html").read_text()
    assert '"counts":"1 x wrong values"' in page.replace(": ", ":")
    assert "its weight is -1, but it has 1 samples" in page


def test_a_refused_client_goes_on_from_what_the_server_knows_of(tmp_path: Path) -> None:
    """The site does not use SCAFFOLD's control variate of the refused round."""
    world = World(tmp_path, method="scaffold")
    tampered(world, lambda c: set_fact(c, "weight", -1.0))
    world.run()
    last = [m for m in world.grid.sent if m.metadata.message_type == "train"][-2:]
    remembers = dict(
        pair
        for m in last
        for pair in zip(m.content["request"]["clients"], m.content["request"]["memory-rounds"], strict=True)
    )
    assert remembers == {k: 1 if k == LIAR else 2 for k in range(len(SIZES))}


def test_an_answer_that_comes_twice_counts_once(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg")
    world.grid.fault = lambda asked, reply: [reply, reply] if "request" in asked.content else [reply]
    world.run()
    assert {kind for _, _, kind in world.incidents()} == {"answered twice"}
    assert apart(world.model, reference(hf.FedAvg()).model.state_dict()) <= 1e-9


def test_a_site_that_does_not_answer_in_time(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg", deadline=7.0)

    def fault(asked: Message, reply: Message) -> list[Message]:
        late = "request" in asked.content and asked.content["request"]["round"] == 2
        return [] if late and asked.metadata.dst_node_id == 101 else [reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == [(2, k, "late") for k in (0, 2, 4)]
    assert world.records[1]["participants"] == [1, 3, 5]
    # What comes too late is not even begun: messages are valid as long as the round.
    assert all(m.metadata.ttl == 7.0 for m in world.grid.sent if m.metadata.message_type == "train")


def test_too_few_answers_stop_the_run_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.flower.engine.PAUSE_SECONDS", 0.0)
    world = World(tmp_path, method="fedavg", min_clients=4)
    world.grid.fault = lambda asked, reply: (
        []
        if "request" in asked.content
        and asked.content["request"]["round"] == 2
        and reply.metadata.src_node_id == 101
        else [reply]
    )
    with pytest.raises(
        HoldfastError, match=r"round 2: 3 usable updates were received, but min_clients is 4 .*client 0: late"
    ):
        world.run()
    world.grid.fault = lambda asked, reply: [reply]
    world.run()
    assert apart(world.model, reference(hf.FedAvg()).model.state_dict()) <= 1e-9


@pytest.mark.parametrize(("code", "kind"), [(2, "failed"), (5, "site lost"), (8, "site crashed")])
def test_what_flower_says_of_a_lost_site(code: int, kind: str, tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg")

    def fault(asked: Message, reply: Message) -> list[Message]:
        if (
            "request" not in asked.content
            or asked.content["request"]["round"] != 2
            or reply.metadata.src_node_id != 102
        ):
            return [reply]
        error = Message(Error(code, "Traceback\nOSError: gone"), reply_to=asked)
        error.metadata.__dict__["_src_node_id"] = 1 if code == 5 else 102  # as Flower does
        return [error]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == [(2, k, kind) for k in (1, 3, 5)]
    assert world.records[1]["incidents"][0]["detail"] == "OSError: gone"


def test_a_network_cut_for_a_while_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.flower.engine.PAUSE_SECONDS", 0.0)
    world = World(tmp_path, method="scaffold", deadline=5.0)
    asked: list[int] = []

    def fault(message: Message, reply: Message) -> list[Message]:
        if "request" not in message.content or message.content["request"]["round"] != 2:
            return [reply]
        asked.append(message.metadata.dst_node_id)
        return [] if len(asked) <= 2 else [reply]  # nothing gets through the first time

    world.grid.fault = fault
    world.run()
    assert asked == [101, 102, 101, 102]
    assert world.incidents() == [(2, k, "late") for k in range(len(SIZES))]
    assert world.records[1]["participants"] == list(range(len(SIZES)))
    assert apart(world.model, reference(METHODS["scaffold"]()).model.state_dict()) <= 1e-9


@pytest.mark.parametrize(
    "error",
    [
        httpx.ReadTimeout("500 Internal Server Error"),
        ObjectPushError("object", 1, "session"),  # the SuperLink was restarted during an upload
        ValueError("Unexpected format for object head."),  # a reply that Flower cannot read
    ],
)
def test_a_superlink_that_refuses_single_calls_is_asked_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.flower.engine.PAUSE_SECONDS", 0.0)
    world = World(tmp_path, method="scaffold", wait=60)
    calls = {"send": 0, "nodes": 0}
    send, nodes = world.grid.send_and_receive, world.grid.get_node_ids

    def refused(call: str, turns: tuple[int, ...]) -> None:
        calls[call] += 1
        if calls[call] in turns:
            raise error

    def send_and_receive(messages: Any, **more: Any) -> list[Message]:
        refused("send", (1, 4))  # who is there at all; the training of round 2
        return send(messages, **more)

    def get_node_ids() -> Any:
        refused("nodes", (3,))  # before round 2
        return nodes()

    world.grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    world.grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    world.run()
    assert world.incidents() == [(2, k, "not reached") for k in range(len(SIZES))]
    assert world.records[1]["participants"] == list(range(len(SIZES)))
    assert apart(world.model, reference(METHODS["scaffold"]()).model.state_dict()) <= 1e-9


def test_a_node_that_comes_back_under_another_id(tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold")
    rounds: list[int] = []

    def fault(asked: Message, reply: Message) -> list[Message]:
        if "request" in asked.content:
            rounds.append(asked.content["request"]["round"])
            if rounds == [1, 1]:
                world.grid.nodes[999] = world.grid.nodes.pop(101)
        return [reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == []
    assert apart(world.model, reference(METHODS["scaffold"]()).model.state_dict()) <= 1e-9


def test_a_node_that_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg")

    def fault(asked: Message, reply: Message) -> list[Message]:
        if "request" in asked.content:
            world.grid.nodes.pop(101, None)
        return [reply]

    world.grid.fault = fault
    world.run()
    assert set(world.incidents()) == {(r, k, "offline") for r in (2, 3) for k in (0, 2, 4)}


def test_a_stranger_that_talks_nonsense_is_ignored(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg")
    world.grid.nodes[666] = dict(world.grid.nodes[101])

    def fault(asked: Message, reply: Message) -> list[Message]:
        if asked.metadata.dst_node_id == 666 and "clients" in reply.content:
            counted = tree_from_record(reply.content, "clients")
            reply.content["clients"] = tree_to_record(counted | {"counts": -counted["counts"]})
            resealed(asked, reply, reply.content)
        return [reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == []


def test_one_client_fails_and_its_neighbours_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the site, for one client's memory."""
    whole = files.replace

    def full(path: Path, data: bytes) -> None:
        if path.parent.name == "3" and path.stem == "2":
            with files.writing(path):
                raise OSError(28, "No space left on device")
        whole(path, data)

    monkeypatch.setattr(files, "replace", full)
    world = World(tmp_path, method="scaffold").run()
    assert world.incidents() == [(2, 3, "failed")]
    assert "no space is left" in world.records[1]["incidents"][0]["detail"]
    assert world.records[1]["participants"] == [0, 1, 2, 4, 5]


def test_a_lost_memory_is_said(tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold")

    def fault(asked: Message, reply: Message) -> list[Message]:
        for path in (tmp_path / "state").glob("*/1/1.safetensors"):
            path.unlink()
        return [reply]

    world.grid.fault = fault
    world.run()
    assert (2, 1, "memory lost") in world.incidents()
    assert 1 in world.records[1]["participants"]


def test_a_site_keeps_no_more_than_it_needs(tmp_path: Path) -> None:
    World(tmp_path, method="scaffold", rounds=8).run()
    kept = [len(list(folder.iterdir())) for folder in (tmp_path / "state").glob("*/*")]
    assert len(kept) == len(SIZES)
    assert max(kept) <= 3


# A disk that is really full ------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(small, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def fill(disk: Path) -> None:
    """Use all free space."""
    with suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def while_full(disk: Path, world: World, rounds: tuple[int, ...]) -> None:
    """The disk is full while these rounds are trained."""
    send = world.grid.send_and_receive

    def send_and_receive(messages: Any, **more: Any) -> list[Message]:
        messages = list(messages)
        request = next((m.content["request"] for m in messages if "request" in m.content), {"round": 0})
        (disk / "ballast").unlink(missing_ok=True)
        if request["round"] in rounds:
            fill(disk)
        return send(messages, **more)

    world.grid.send_and_receive = send_and_receive  # type: ignore[method-assign]


def test_a_site_whose_disk_is_full(disk: Path, tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold")
    world.grid.nodes[101]["state-dir"] = str(disk / "state")
    while_full(disk, world, rounds=(2,))
    world.run()
    assert world.incidents() == [(2, k, "failed") for k in (0, 2, 4)]
    assert all("no space is left" in i["detail"] for i in world.records[1]["incidents"])
    assert world.records[2]["participants"] == list(range(len(SIZES)))


def test_a_server_whose_disk_is_full(disk: Path, tmp_path: Path) -> None:
    full = World(tmp_path, method="scaffold", out=str(disk / "run"))
    while_full(disk, full, rounds=(2,))
    with pytest.raises(HoldfastError, match="no space is left"):
        full.run()
    complete = hf.RunDirectory.open(disk / "run").records()[0]
    (disk / "ballast").unlink()
    world = World(tmp_path, method="scaffold", out=str(disk / "run"))
    world.out = disk / "run"
    world.run()
    assert world.records[0] == complete
    assert apart(world.model, reference(METHODS["scaffold"]()).model.state_dict()) <= 1e-9


# The server is killed ------------------------------------------------------------------------------------


class Countdown:
    """Kills this process at the n-th event: before and after sending, and before and after every rename."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def serve_until(world: World, moment: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the server in a child process that is killed at an event; returns the child's exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        tick, renamed, send = Countdown(moment), os.replace, world.grid.send_and_receive

        def replace(*args: Any) -> None:
            tick()
            renamed(*args)
            tick()

        def send_and_receive(*args: Any, **kwargs: Any) -> list[Message]:
            tick()
            replies = send(*args, **kwargs)
            tick()
            return replies

        monkeypatch.setattr(os, "replace", replace)
        world.grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
        world.run()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("name", ["scaffold", "flashback"])
def test_a_server_killed_at_any_moment_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = World(tmp_path / "calm", method=name, rounds=2, clients_per_round=4).run()
    moment, killed = 0, 0
    while True:
        moment += 4 if killed > 12 else 2
        world = World(tmp_path / str(moment), method=name, rounds=2, clients_per_round=4)
        ended = serve_until(world, moment, monkeypatch)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        killed += 1
        world.run()
        assert apart(world.model, calm.model) == 0
        assert [r["participants"] for r in world.records] == [r["participants"] for r in calm.records]
    assert killed > 10


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg").run()
    sent = len(world.grid.sent)
    world.run()
    assert len(world.grid.sent) == sent


def test_a_full_disk_at_the_server_stops_the_run_and_loses_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = files.write_all

    def full(file: Any, data: bytes) -> None:
        if b'"round": 2' in data or b'"round":2' in data:
            raise OSError(28, "No space left on device")
        whole(file, data)

    monkeypatch.setattr(files, "write_all", full)
    world = World(tmp_path, method="fedavg")
    with pytest.raises(HoldfastError, match="no space is left"):
        world.run()
    assert [r["round"] for r in world.records] == [1]
    monkeypatch.setattr(files, "write_all", whole)
    world.run()
    assert apart(world.model, reference(hf.FedAvg()).model.state_dict()) <= 1e-9


# Anything at all -----------------------------------------------------------------------------------------


def test_no_reply_whatever_stops_the_server(tmp_path: Path) -> None:
    """Randomly damaged replies are used or reported, and do not affect the other clients."""
    rng = np.random.default_rng(0)
    rounds = 40
    world = World(tmp_path, method="scaffold", rounds=rounds, nodes=6)
    tampered_with = []

    def fault(asked: Message, reply: Message) -> list[Message]:
        if "request" not in asked.content or LIAR not in asked.content["request"]["clients"]:
            return [reply]
        resealed(asked, reply, damaged(reply.content, rng))
        tampered_with.append(asked.content["request"]["round"])
        return [reply]

    world.grid.fault = fault
    world.run()
    assert len(world.records) == rounds
    assert len(tampered_with) == rounds
    for record in world.records:
        assert set(range(len(SIZES))) - {LIAR} <= set(record["participants"])
