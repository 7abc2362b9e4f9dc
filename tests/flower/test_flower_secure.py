"""Runs under secure aggregation on Flower: sums are the plain ones, single uploads are masked, clients may be lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import copied, damaged, resealed
from flower_world import CLASSES, SIZES, World, apart, federation, reference
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from processes import Deployment
from scipy.stats import kstest
from test_flower_processes import APP, CONFIG, records

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.flower.messages import KEYS, SHARES, TRAIN, TRAIN_MASKED, UNMASK, tree_from_record
from holdfast.methods.registry import parse_method

NODES = len(SIZES)  # one client each
SUMMED = ["scaffold+fedntd", "fedfa", "fedrep", "ccvr", "fednova"]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.flower.engine.PAUSE_SECONDS", 0.0)


def kind(message: Message) -> str:
    return str(message.metadata.message_type)


def client_of(message: Message) -> int:
    return int(message.metadata.dst_node_id) - 101


def of_kind(world: World, wanted: str) -> list[tuple[Message, Message]]:
    """Requests of this kind and their replies."""
    pairs = zip(world.grid.sent, world.grid.received, strict=True)
    return [(asked, reply) for asked, reply in pairs if kind(asked) == wanted]


# Sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SUMMED)
def test_methods_that_need_sums_alone(method: str, tmp_path: Path) -> None:
    """The model is that of a simulation to the bit: adding whole numbers has no order."""
    how: dict[str, Any] = {"clients_per_round": 4, "secure": "secagg+:neighbours=2,threshold=0.6"}
    world = World(tmp_path, method=method, **how).run()
    run = reference(parse_method(method), **how)
    assert apart(world.model, run.model.state_dict()) == 0
    assert world.incidents() == []
    for mine, theirs in zip(world.records, run.records, strict=True):
        for key in theirs.keys() - {"seconds", "train_loss"}:
            assert mine[key] == theirs[key], key
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9)  # a sum, too


@pytest.mark.parametrize("bits", [32, 64])
def test_a_secure_sum_is_the_plain_average_to_quantisation(bits: int, tmp_path: Path) -> None:
    """One round against NumPy's weighted mean of the uploads of a plain run."""
    plain = World(tmp_path / "plain", nodes=NODES, rounds=1).run()
    uploads = {
        client_of(asked): tree_from_record(reply.content, f"client {client_of(asked)}")["params"]
        for asked, reply in of_kind(plain, TRAIN)
    }
    secure = World(tmp_path / "secure", nodes=NODES, rounds=1, secure=f"secagg+:bits={bits}").run()
    record = secure.records[0]["secure"]
    assert 0 < record["error"] < (1e-4 if bits == 32 else 1e-12)
    for name, value in secure.model.items():
        mean = np.average([uploads[k][name].numpy() for k in sorted(uploads)], axis=0, weights=SIZES)
        assert np.abs(value.numpy() - mean).max() <= record["error"] + 1e-15


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "fedfomo"}, "needs individual uploads"),
        ({"method": "fedmlp"}, "reads how many samples of each class the clients hold"),
        ({"robust": "median"}, "secure cannot be combined with robust"),
        ({"evaluate_locals": True}, "evaluate_locals needs every client's model on the server"),
    ],
)
def test_what_needs_single_uploads_is_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    world = World(tmp_path, secure="secagg+", **given)
    with pytest.raises(HoldfastError, match=sentence):
        world.run()
    assert not {kind(message) for message in world.grid.sent} - {"query"}  # before training


# What the server receives -------------------------------------------------------------------------------------


def test_single_uploads_arrive_masked(tmp_path: Path) -> None:
    """Two runs with the same seed: what arrives of a client is uniform, differs from run to run and from the plain
    upload, and none of its plain bytes occur in any reply; the models are the same."""
    plain = World(tmp_path / "plain", nodes=NODES, rounds=1, method="scaffold").run()
    runs = [
        World(tmp_path / name, nodes=NODES, rounds=1, method="scaffold", secure="secagg+").run()
        for name in ("a", "b")
    ]
    assert apart(runs[0].model, runs[1].model) == 0
    masked: list[dict[int, np.ndarray]] = []
    for world in runs:
        assert of_kind(world, TRAIN) == []
        of_client = {}
        for asked, reply in of_kind(world, TRAIN_MASKED):
            k = client_of(asked)
            tree = tree_from_record(reply.content, f"client {k}")
            assert tree.keys() == {"masked"}
            of_client[k] = tree["masked"].numpy()
            assert kstest(of_client[k] / 2.0**64 + 0.5, "uniform").pvalue > 1e-4
            assert {*reply.content[f"result {k}"]} == {
                "round", "samples", "protected-rounds", "has-memory", "memory-lost"
            }  # fmt: skip
        masked.append(of_client)
    for k in range(NODES):
        assert not (masked[0][k] == masked[1][k]).any()
    for asked, reply in of_kind(plain, TRAIN):
        (array,) = reply.content[f"client {client_of(asked)}"].values()
        values = np.frombuffer(array.data[-array.shape[0] * 8 :])
        pieces = {value.tobytes() for value in values[np.abs(values) > 1e-6]}
        for other in runs[0].grid.received:
            for record in other.content.values():
                for sent in record.values() if isinstance(record, ArrayRecord) else ():
                    assert not pieces & {
                        sent.data[i : i + 8] for i in range(len(sent.data) % 8, len(sent.data), 8)
                    }


def test_label_counts_stay_at_the_sites(tmp_path: Path) -> None:
    world = World(tmp_path, rounds=1, secure="secagg+").run()
    counts = json.loads((world.out / "federation.json").read_text())["label_counts"]
    assert counts == [[size] + [0] * (CLASSES - 1) for size in SIZES]


# Lost clients -------------------------------------------------------------------------------------------------


def losing(world: World, stage: str, clients: set[int], number: int = 2) -> World:
    """The nodes of these clients do not answer in a stage of a round."""
    rounds = {"now": 0}

    def fault(asked: Message, reply: Message) -> list[Message]:
        if kind(asked) in (KEYS, TRAIN) and "request" in asked.content:
            rounds["now"] = asked.content["request"]["round"]
        return (
            [] if (kind(asked), rounds["now"]) == (stage, number) and client_of(asked) in clients else [reply]
        )

    world.grid.fault = fault
    return world


@pytest.mark.parametrize("stage", [KEYS, SHARES, TRAIN_MASKED, UNMASK])
def test_clients_lost_in_any_stage_up_to_the_threshold(stage: str, tmp_path: Path) -> None:
    """The round is that of the others; who is lost after its upload arrived is in it."""
    world = losing(
        World(tmp_path / "a", nodes=NODES, rounds=2, method="scaffold", secure="secagg+"), stage, {0, 4}
    ).run()
    assert world.incidents() == [(2, 0, "late"), (2, 4, "late")]
    lost = set() if stage == UNMASK else {0, 4}
    plain = losing(World(tmp_path / "b", nodes=NODES, rounds=2, method="scaffold"), TRAIN, lost).run()
    assert [r["participants"] for r in world.records] == [r["participants"] for r in plain.records]
    assert apart(world.model, plain.model) < 1e-10


def test_more_losses_stop_the_run_which_goes_on_when_clients_are_back(tmp_path: Path) -> None:
    world = losing(
        World(tmp_path / "a", nodes=NODES, rounds=2, method="scaffold", secure="secagg+"),
        TRAIN_MASKED,
        {0, 1, 4},
    )
    sentence = r"round 2: secure aggregation needs 4 of 6 clients to the end, and 3 remained \(client 0: late, client 1"
    with pytest.raises(HoldfastError, match=sentence):
        world.run()
    assert len(world.records) == 1
    assert (
        sum(kind(m) == KEYS for m in world.grid.sent) == (1 + 3) * NODES
    )  # three attempts, each with new keys
    world.grid.fault = lambda asked, reply: [reply]
    calm = World(tmp_path / "b", nodes=NODES, rounds=2, method="scaffold", secure="secagg+").run()
    assert apart(world.run().model, calm.model) == 0


def test_an_attempt_may_succeed_where_the_one_before_failed(tmp_path: Path) -> None:
    world = World(tmp_path / "a", nodes=NODES, secure="secagg+", rounds=1)
    attempts: list[int] = []

    def fault(asked: Message, reply: Message) -> list[Message]:
        attempts.extend([1] if kind(asked) == KEYS and client_of(asked) == 0 else [])
        return [] if kind(asked) == TRAIN_MASKED and len(attempts) == 1 and client_of(asked) < 3 else [reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == [(1, k, "late") for k in range(3)]
    calm = World(tmp_path / "b", nodes=NODES, secure="secagg+", rounds=1).run()
    assert apart(world.model, calm.model) == 0


def test_a_restarted_node_has_no_keys_and_is_left_out(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=NODES, secure="secagg+", rounds=1)

    def fault(asked: Message, reply: Message) -> list[Message]:
        if kind(asked) == SHARES and client_of(asked) == 2:
            world.grid.contexts.pop(103)
        return [reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == [(1, 2, "failed")]
    assert "its node was restarted" in world.records[0]["incidents"][0]["detail"]
    for context in world.grid.contexts.values():
        assert not context.state  # no secret outlives the round


# Authenticity -------------------------------------------------------------------------------------------------


def test_a_changed_masked_upload_is_refused_by_its_seal(tmp_path: Path) -> None:
    world = World(tmp_path / "a", nodes=NODES, secure="secagg+", rounds=1)

    def fault(asked: Message, reply: Message) -> list[Message]:
        if kind(asked) == TRAIN_MASKED and client_of(asked) == 3:
            record = reply.content["client 3"]
            for name, old in list(record.items()):
                data = old.data[:-1] + bytes([old.data[-1] ^ 1])
                record[name] = Array(dtype=old.dtype, shape=old.shape, stype=old.stype, data=data)
        return [reply]

    world.grid.fault = fault
    world.run()
    assert world.incidents() == [(1, 3, "forged")]
    plain = losing(World(tmp_path / "b", nodes=NODES, rounds=1), TRAIN, {3}, 1).run()
    assert apart(world.model, plain.model) < 1e-10


@pytest.mark.parametrize("forgers", [2, 3])
def test_sites_that_reveal_forged_shares(forgers: int, tmp_path: Path) -> None:
    """Up to the threshold their shares are recognised and the sum is right; beyond it the round fails."""
    world = World(tmp_path / "a", nodes=NODES, secure="secagg+", rounds=1)

    def fault(asked: Message, reply: Message) -> list[Message]:
        if kind(asked) == UNMASK and client_of(asked) < forgers:
            content = copied(reply.content)
            record = content[f"unmask {client_of(asked)}"]
            record["shares"] = [share[:-1] + bytes([share[-1] ^ 1]) for share in record["shares"]]
            resealed(asked, reply, content)
        return [reply]

    world.grid.fault = fault
    if forgers == 3:
        with pytest.raises(HoldfastError, match=r"needs 4 of 6 clients .*client 0: forged, client 1: forged"):
            world.run()
        return
    world.run()
    assert world.incidents() == [(1, 0, "forged"), (1, 1, "forged")]
    assert world.records[0]["participants"] == list(range(NODES))
    calm = World(tmp_path / "b", nodes=NODES, secure="secagg+", rounds=1).run()
    assert apart(world.model, calm.model) == 0


@pytest.mark.parametrize("stage", [SHARES, UNMASK])
def test_a_reply_of_the_round_before_is_refused(stage: str, tmp_path: Path) -> None:
    world = World(tmp_path, nodes=NODES, secure="secagg+", rounds=2)
    kept: list[RecordDict] = []

    def fault(asked: Message, reply: Message) -> list[Message]:
        if kind(asked) == stage and client_of(asked) == 5:
            kept.append(copied(reply.content))
            reply.__dict__["_content"] = kept[0]
        return [reply]

    world.grid.fault = fault
    assert world.run().incidents() == [(2, 5, "wrong request")]


def test_random_damage_never_changes_a_sum_and_is_no_traceback(tmp_path: Path) -> None:
    """One client's keys and shares, sealed as if it sent them on purpose: each round is right or fails clearly."""
    world = World(tmp_path, nodes=3, among=few(), clients=3, secure="secagg+", rounds=9, lr=1e-9)
    rng = np.random.default_rng(5)
    stages = [KEYS, SHARES, UNMASK]
    hit: list[str] = []

    def fault(asked: Message, reply: Message) -> list[Message]:
        if kind(asked) == stages[len(hit) % 3] and client_of(asked) == len(hit) // 3 % 3:
            hit.append(kind(asked))
            resealed(asked, reply, damaged(reply.content, rng))
        return [reply]

    world.grid.fault = fault
    failures = 0
    while not hf.RunDirectory.open(world.out).finished if world.out.exists() else True:
        try:
            world.run()
        except HoldfastError:
            failures += 1
    assert {*hit} == {*stages}
    assert failures < len(hit) / 2
    start = World(tmp_path / "calm", nodes=3, among=few(), clients=3, rounds=1, lr=1e-12).run().model
    assert apart(world.model, start) < 1e-6  # they hardly train: any wrong sum would be noise of 2^20


def few() -> hf.Federation:
    return hf.federate(federation().dataset, hf.IID(), clients=3)


def ask(world: World, node: int, kind: str, content: dict[str, Any]) -> RecordDict:
    """A request to one site by a server that is not ours."""
    message = Message(RecordDict(content), node, kind)
    (reply,) = world.grid.send_and_receive([message])
    return (
        reply.content
        if not reply.has_error()
        else RecordDict({"error": ConfigRecord({"it": reply.error.reason})})
    )


def test_a_site_refuses_what_would_uncover_one_upload(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=NODES, secure="secagg+", rounds=1).run()
    (asked, _), *_ = of_kind(world, TRAIN_MASKED)
    plain = ask(world, 101, TRAIN, {k: asked.content[k] for k in ("broadcast", "request")})
    assert "an upload without masks" in plain["error"]["it"]
    session = {"session": "0" * 32, "round": 1}
    keys = {
        k: ask(world, 101 + k, KEYS, {"request": ConfigRecord(session | {"clients": [k]})})[f"keys {k}"]
        for k in range(3)
    }

    def shares(threshold: int, clients: list[int]) -> str:
        near: dict[str, Any] = {"clients": clients}
        near |= {key: [keys[k][key] for k in clients] for key in ("masks", "channel")}
        request = ConfigRecord(session | {"clients": [0], "threshold": threshold})
        reply = ask(world, 101, SHARES, {"request": request, "neighbours 0": ConfigRecord(near)})
        return str(reply["failed 0"]["detail"]) if "failed 0" in reply else ""

    assert "a threshold of 1 among 3 clients; it must be at least 2" in shares(1, [0, 1, 2])
    assert "no other client takes part" in shares(1, [0])
    assert "keys for this client differ from" not in shares(2, [0, 1, 2])
    assert "shares were already dealt" in shares(2, [0, 1, 2])
    unmask = {
        "request": ConfigRecord(session | {"clients": [0]}),
        "unmask 0": ConfigRecord({"present": [0, 1], "lost": []}),
    }
    assert "may not reveal" in ask(world, 101, UNMASK, unmask)["failed 0"]["detail"]


# Privacy and other settings -----------------------------------------------------------------------------------


def test_noise_of_the_clients_has_the_wanted_variance(tmp_path: Path) -> None:
    """Clients that hardly train: what is left is noise of deviation z C √(clients / threshold) on the sum."""
    pytest.importorskip("dp_accounting")
    dp = "epsilon=1e4,delta=1e-2,noise_multiplier=0.7,clip=2,sampling=fixed"
    how: dict[str, Any] = {"nodes": NODES, "rounds": 1, "dp": dp, "lr": 1e-9, "model": "mlp:200"}
    one, other = (World(tmp_path / name, secure="secagg+", **how).run() for name in ("a", "b"))
    start = World(tmp_path / "c", **how | {"dp": None, "lr": 1e-12}).run().model
    noise = torch.cat([(one.model[k] - start[k]).flatten() for k in start]) * NODES
    variance = (0.7 * 2.0) ** 2 * NODES / 4
    assert float(noise.square().mean()) == pytest.approx(variance, rel=4 * math.sqrt(2 / len(noise)))
    assert apart(one.model, other.model) > 1e-3  # from secrets of the sites
    assert one.records[0]["epsilon"] > 0
    assert one.records[0]["train_loss"] is None  # it has no noise, and is not sent


@pytest.mark.parametrize(
    "given",
    [
        {"dp": "epsilon=1e4,delta=1e-2,noise_multiplier=0.3,clip_sums=1,adaptive=true,max_samples=5"},
        {"dp_samples": "epsilon=300,delta=1e-2,noise_multiplier=0.7"},
        {"client_dropout": 0.15, "rounds": 4},
        {"validation": 0.3},
    ],
    ids=lambda given: next(iter(given)),
)
def test_with_other_settings(given: dict[str, Any], tmp_path: Path) -> None:
    """The records are those of a simulation, apart from what noise changes."""
    pytest.importorskip("dp_accounting")
    even = hf.federate(federation().dataset, hf.IID(), clients=NODES)
    how: dict[str, Any] = {"method": "scaffold", "rounds": 1, "among": even} | given
    if "dp_samples" in given:
        how["method"] = "fedavg"
    world = World(tmp_path, secure="secagg+", nodes=NODES, **how).run()
    run = reference(parse_method(str(how.pop("method"))), secure="secagg+", **how)
    for mine, theirs in zip(world.records, run.records, strict=True):
        for key in ("participants", "samples", "epsilon", "sample_privacy", "bytes_up", "incidents"):
            if "dp" not in given or key not in ("participants", "samples", "bytes_up", "incidents"):
                assert mine.get(key) == theirs.get(key), key
    if not {"dp", "dp_samples"} & given.keys():
        assert apart(world.model, run.model.state_dict()) == 0
    if "validation" in given:
        assert all("validation" in record and "local_validation" in record for record in world.records)


def test_a_stream(tmp_path: Path) -> None:
    streaming = hf.stream(federation().dataset, hf.IID(), clients=3, tasks_per_client=2, seed=1)
    how: dict[str, Any] = {"among": streaming, "rounds": 4, "secure": "secagg+"}
    world = World(tmp_path, method="scaffold", **how).run()
    assert apart(world.model, reference(parse_method("scaffold"), **how).model.state_dict()) == 0


def test_a_value_out_of_range_is_left_out_and_named(tmp_path: Path) -> None:
    world = World(tmp_path, nodes=NODES, secure="secagg+:range=0.01", rounds=1)
    with pytest.raises(HoldfastError, match="secure aggregation needs 4 of 6 clients"):
        world.run()
    assert "range is 0.01; raise secure.range" in str(of_kind(world, TRAIN_MASKED)[0][1].content)


# Real processes -----------------------------------------------------------------------------------------------

LOSES_ONE = """
from holdfast.flower.messages import TRAIN_MASKED

handle = client.__class__.__call__

def lose(self, message, context):
    if message.metadata.message_type == TRAIN_MASKED and context.node_config["partition-id"] == 1:
        raise RuntimeError("out of memory")
    return handle(self, message, context)

client.__class__ = type("Losing", (client.__class__,), {"__call__": lose})
"""


def test_real_processes_with_tls_one_of_which_is_lost(tmp_path: Path) -> None:
    """Three clients at two sites, one of which fails after it has dealt its shares; as in one process."""
    out, config = tmp_path / "run", {**CONFIG, "rounds": 1, "method": "scaffold", "secure": "secagg+"}
    with Deployment(tmp_path, 2, 3, APP + LOSES_ONE, database=False) as deployment:
        run = deployment.submit(out=str(out), **config)
        assert deployment.finish(run, out) == "finished:completed"
    (record,) = records(out)
    (incident,) = record["incidents"]
    assert (incident["client"], incident["kind"]) == (1, "failed")
    assert "out of memory" in incident["detail"]
    names: dict[str, Any] = {"__name__": "app"}
    exec(APP, names)
    among = names["federation"]({"clients": 3, "data-partition": "", "data-public": 0.0})
    plain = World(tmp_path / "b", among=among, **config | {"secure": ""}, precision="auto")
    losing(plain, TRAIN, {1}, 1).run()
    assert apart(plain.model, hf.RunDirectory.open(out).load_model()) < 1e-6
