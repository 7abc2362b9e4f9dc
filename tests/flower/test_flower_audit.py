"""The audit log of a run on Flower: what arrived, with its hash, and what was refused."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from damage import copied, resealed
from flower_world import SIZES, World
from flwr.app import Message, RecordDict

from holdfast.runs import read_audit, verify_audit


def by_hand(content: RecordDict, client: int) -> str:
    """The hash of the two records of a client, the tensors and the numbers."""
    arrays, numbers = content[f"client {client}"], content[f"result {client}"]
    written = f"client {client}\n".encode()
    for manifest in arrays:
        one = arrays[manifest]
        written += f"{manifest}\n{one.dtype} {one.shape}\n".encode() + one.data
    written += f"result {client}\n".encode() + repr(sorted(numbers.items())).encode()
    return sha256(written).hexdigest()


def test_received_and_refused_updates(tmp_path: Path) -> None:
    world = World(tmp_path, method="scaffold")

    def fault(asked: Message, reply: Message) -> list[Message]:
        request = asked.content.get("request")
        if request is None or request["round"] != 2 or 1 not in request["clients"]:
            return [reply]
        content = copied(reply.content)
        content["result 1"]["weight"] = 1e9
        resealed(asked, reply, content)
        return [reply]

    world.grid.fault = fault
    world.run()
    assert verify_audit(world.out).problem is None
    rounds = [entry for entry in read_audit(world.out) if entry["event"] == "round"]
    everyone = list(range(len(SIZES)))
    replies: dict[int, dict[str, str]] = {}
    for message in world.grid.received:
        clients = [int(name.split()[1]) for name in message.content if name.startswith("result ")]
        for client in clients:
            round = message.content[f"result {client}"]["round"]
            replies.setdefault(round, {})[str(client)] = by_hand(message.content, client)
    for entry in rounds:
        arrived: Any = entry["received"] | entry.get("refused", {})
        assert arrived == replies[entry["round"]]
        assert arrived.keys() == {str(client) for client in everyone}
    assert [entry["used"] for entry in rounds] == [everyone, [0, *everyone[2:]], everyone]
    assert list(rounds[1]["refused"]) == ["1"]
    assert rounds[1]["incidents"] == [{"client": 1, "kind": "wrong values"}]


def test_under_secure_aggregation_the_masked_uploads_are_hashed(tmp_path: Path) -> None:
    world = World(tmp_path, method="fedavg", secure="secagg+", evaluate_locals=False).run()
    assert verify_audit(world.out).problem is None
    rounds = [entry for entry in read_audit(world.out) if entry["event"] == "round"]
    assert all(entry["received"].keys() == {str(client) for client in entry["used"]} for entry in rounds)
    assert [entry["used"] for entry in rounds] == [record["participants"] for record in world.records]
    assert len(rounds[0]["used"]) == len(SIZES)
