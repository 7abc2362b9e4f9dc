"""The audit log: what it holds, what it detects, and that killed runs leave one that fits."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core import files
from holdfast.core.digests import digest
from holdfast.core.errors import HoldfastError
from holdfast.runs import RunDirectory, read_audit, verify_audit
from holdfast.runs.audit_log import sealed

FIRST = "0" * 64


def experiment(**changes: Any) -> hf.Experiment:
    settings = {
        "data": "digits", "partition": "iid", "clients": 4, "model": "mlp:4", "method": "fedavg", "rounds": 3,
        "client_dropout": 0.3, "seed": 1, "evaluate_locals": False, "engine": "sequential", "checkpoint_seconds": 0,
    }  # fmt: skip
    return hf.Experiment(**settings | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "run"
    experiment().run(path)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def lines_of(run: Path) -> list[bytes]:
    return (run / "audit.jsonl").read_bytes().splitlines()


def write(run: Path, lines: list[bytes]) -> None:
    (run / "audit.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (run / "checksums.json").unlink(missing_ok=True)


def problem(run: Path) -> str:
    found = verify_audit(run).problem
    assert found is not None
    return found


def chained(entries: list[dict[str, Any]]) -> list[bytes]:
    """The lines of a forger who knows the format: every hash fits."""
    lines, previous = [], FIRST
    for entry in entries:
        content = {key: value for key, value in entry.items() if key != "hash"} | {"previous": previous}
        lines.append(sealed(content))
        previous = json.loads(lines[-1])["hash"]
    return lines


# What it holds ------------------------------------------------------------------------------------------


def test_the_chain_and_the_hashes_of_files_fit_by_hand(run: Path) -> None:
    previous, events = FIRST, []
    for line in lines_of(run):
        entry = json.loads(line)
        body, _, seal = line.rpartition(b', "hash": ')
        assert seal == f'"{entry["hash"]}"}}'.encode()
        assert sha256(body + b"}").hexdigest() == entry["hash"]
        assert entry["previous"] == previous
        previous = entry["hash"]
        events.append(entry)
    assert [entry["event"] for entry in events] == ["begun", "round", "round", "round", "ended"]
    begun, *rounds, ended = events
    for name, hash in (begun["files"] | ended["files"]).items():
        assert sha256((run / name).read_bytes()).hexdigest() == hash
    assert {"experiment.yaml", "federation.json"} == begun["files"].keys()
    assert ended["files"].keys() == {*begun["files"], "metrics.jsonl", "model.safetensors"}
    assert begun["versions"]["torch"] == str(torch.__version__)
    records = (run / "metrics.jsonl").read_bytes().splitlines()
    for entry, line in zip(rounds, records, strict=True):
        record = json.loads(line)
        assert sha256(line).hexdigest() == entry["record"]
        assert entry["used"] == record["participants"]
        assert entry["received"].keys() == {str(client) for client in entry["used"]}
        lost = {incident["client"] for incident in record["incidents"]}
        assert {*entry["used"], *lost} == set(range(4))
    assert verify_audit(run) == verify_audit(run, head=begun["hash"])
    assert verify_audit(run).head == previous


def test_the_hash_of_tensors_by_hand() -> None:
    tree = {
        "w": {"b": torch.arange(3.0), "a": torch.tensor([[1, 2]])},
        "half": torch.ones((), dtype=torch.bfloat16),
    }
    expected = sha256(
        b"half bfloat16 \n" + b"\x80\x3f"
        + b"w/a int64 1,2\n" + np.array([1, 2], "<i8").tobytes()
        + b"w/b float32 3\n" + np.arange(3, dtype="<f4").tobytes()
    )  # fmt: skip
    assert digest(tree) == expected.hexdigest()
    assert digest({"w": torch.arange(6.0).reshape(2, 3).T}) == digest(
        {"w": torch.tensor([[0.0, 3], [1, 4], [2, 5]])}
    )


def test_engines_receive_the_same_and_the_same_run_has_the_same_hashes(
    finished: Path, tmp_path: Path
) -> None:
    experiment().run(tmp_path / "again")
    experiment(engine="vectorized").run(tmp_path / "vectorized")

    def facts(run: Path) -> list[Any]:
        kept = ("asked", "used", "received", "model", "incidents")
        return [[entry[key] for key in kept] for entry in read_audit(run) if entry["event"] == "round"]

    assert facts(tmp_path / "again") == facts(finished)
    for one, other in zip(facts(tmp_path / "vectorized"), facts(finished), strict=True):
        assert one[:2] == other[:2]
        assert one[2].keys() == other[2].keys()
    assert verify_audit(tmp_path / "vectorized").problem is None


def test_refused_updates_and_budgets(tmp_path: Path) -> None:
    experiment(client_dropout=0, attack="scaled:0.25,scale=50", max_update_ratio=5).run(tmp_path / "attacked")
    for entry in read_audit(tmp_path / "attacked"):
        if entry["event"] == "round":
            [bad] = [incident["client"] for incident in entry["incidents"]]
            assert entry["incidents"] == [{"client": bad, "kind": "large update"}]
            assert bad not in entry["used"]
            assert str(bad) in entry["received"]
            assert len(entry["used"]) == 3
    experiment(robust="krum:attackers=1", client_dropout=0, clients=5).run(tmp_path / "robust")
    assert all(len(e["rejected"]) == 4 for e in read_audit(tmp_path / "robust") if e["event"] == "round")
    experiment(dp="epsilon=8,delta=1e-2", client_dropout=0).run(tmp_path / "private")
    spent = [entry["epsilon"] for entry in read_audit(tmp_path / "private") if entry["event"] == "round"]
    assert spent == [record["epsilon"] for record in RunDirectory.open(tmp_path / "private").records()]
    for name in ("attacked", "robust", "private"):
        assert verify_audit(tmp_path / name).problem is None


def test_uploads_under_secure_aggregation_are_not_hashed(tmp_path: Path) -> None:
    experiment(secure="secagg+", client_dropout=0).run(tmp_path / "secure")
    rounds = [entry for entry in read_audit(tmp_path / "secure") if entry["event"] == "round"]
    assert all("received" not in entry and entry["used"] == [0, 1, 2, 3] for entry in rounds)


def test_nothing_but_a_number_names_a_client(run: Path) -> None:
    """Details of incidents, which may hold what a client wrote, stay in metrics.jsonl."""
    experiment(client_dropout=0, attack="scaled:0.25,scale=50", max_update_ratio=5).run(run / "personal name")
    path = run / "personal name"
    [incident] = RunDirectory.open(path).records()[0]["incidents"]
    log = (path / "audit.jsonl").read_text()
    assert incident["detail"] not in log
    assert "personal name" not in log


# What it detects ----------------------------------------------------------------------------------------


def test_a_changed_line_is_named(run: Path) -> None:
    lines = lines_of(run)
    for number, line in enumerate(lines, start=1):
        for key, value in json.loads(line).items():
            changed = json.loads(line) | {key: _other(value)}
            write(run, [*lines[: number - 1], json.dumps(changed).encode(), *lines[number:]])
            assert problem(run).startswith(f"audit.jsonl, line {number}:"), key


def test_a_changed_line_with_a_hash_that_fits_breaks_the_chain(run: Path) -> None:
    lines = lines_of(run)
    for number, line in enumerate(lines[:-1], start=1):
        entry = json.loads(line)
        content = {key: value for key, value in entry.items() if key != "hash"} | {
            "time": "2020-01-01T00:00:00+00:00"
        }
        write(run, [*lines[: number - 1], sealed(content), *lines[number:]])
        assert problem(run).startswith(f"audit.jsonl, line {number + 1}: it follows a line that is not here")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_line_that_is_deleted_repeated_or_moved_is_detected(number: int, run: Path) -> None:
    lines = lines_of(run)
    write(run, lines[: number - 1] + lines[number:])
    expected = f"audit.jsonl, line {number}: it follows" if number < 5 else "audit.jsonl has no end"
    assert problem(run).startswith(expected)
    write(run, [*lines[:number], lines[number - 1], *lines[number:]])
    assert problem(run).startswith(f"audit.jsonl, line {number + 1}: it follows")
    if number < 5:
        write(run, [*lines[: number - 1], lines[number], lines[number - 1], *lines[number + 1 :]])
        assert problem(run).startswith(f"audit.jsonl, line {number}: it follows")


def test_a_log_that_is_cut_short_is_detected(run: Path) -> None:
    lines, data = lines_of(run), (run / "audit.jsonl").read_bytes()
    for kept in range(1, 5):
        write(run, lines[:kept])
        assert problem(run) == "audit.jsonl has no end of the run, but model.safetensors exists" or kept < 4
    write(run, lines)
    (run / "audit.jsonl").write_bytes(data[:-10])
    assert verify_audit(run).incomplete
    assert "has no end" in problem(run)
    (run / "audit.jsonl").write_bytes(data[:10])
    assert problem(run) == "audit.jsonl has no complete line"


FORGERIES: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "settings": (lambda log: log[0]["files"].update({"federation.json": FIRST}), "is not the file whose hash"),
    "federation": (lambda log: log[0].update(federation=FIRST), "line 1: its federation is not that"),
    "start": (lambda log: log[0].update(round=2), "line 1: audit.jsonl|line 1: begun|line 2|metrics.jsonl has other"),
    "record": (lambda log: log[2].update(record=FIRST), "line 3: metrics.jsonl has another record of round 2"),
    "incidents": (lambda log: log[2].update(incidents=[]), "line 3: its incidents is not that|its incidents"),
    "a round less": (lambda log: log.pop(3), "line 4: ended after round 3, but there are 2"),
    "rounds exchanged": (lambda log: log.insert(1, log.pop(2)), "line 2: round 2 follows round 0"),
    "a second beginning": (lambda log: log.insert(1, log[0]), "line 2: begun is in the wrong place"),
    "no beginning": (lambda log: log.pop(0), "line 1: round is in the wrong place"),
    "two ends": (lambda log: log.append(log[-1]), "line 6: ended follows the end of the run"),
    "model": (lambda log: log[-1]["files"].update({"model.safetensors": FIRST}), "model.safetensors is not the file"),
    "epsilon": (lambda log: log.insert(2, log[1] | {"event": "stopped", "round": 3}), "line 3: stopped after round 3"),
    "resumption": (lambda log: log.insert(2, log[0] | {"event": "resumed", "round": 2}), "line 3: resumed after round"),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_chain_contradicts_the_other_files(what: str, run: Path) -> None:
    before = verify_audit(run).head
    forge, expected = FORGERIES[what]
    log = [json.loads(line) for line in lines_of(run)]
    forge(log)
    write(run, chained(log))
    assert any(part in problem(run) for part in expected.split("|"))
    if what != "two ends":
        assert "no line of audit.jsonl has the hash" in str(verify_audit(run, head=before).problem)


def test_what_no_other_file_contradicts_is_detected_by_a_hash_noted_before(run: Path) -> None:
    noted = verify_audit(run).head
    log = [json.loads(line) for line in lines_of(run)]
    log[1]["received"][str(log[1]["used"][0])] = FIRST
    write(run, chained(log))
    assert verify_audit(run).problem is None
    assert "no line of audit.jsonl has the hash" in str(verify_audit(run, head=noted).problem)


@pytest.mark.parametrize("name", ["experiment.yaml", "federation.json", "metrics.jsonl", "model.safetensors"])
def test_a_changed_file_of_the_run_is_named(name: str, run: Path) -> None:
    data = (run / name).read_bytes()
    changed = (
        data.replace(b"0.3", b"0.4").replace(b"1", b"2", 1) if name != "model.safetensors" else data + b" "
    )
    assert changed != data
    (run / name).write_bytes(changed)
    assert name in problem(run)  # by its checksum, where it is read
    (run / "checksums.json").unlink()
    assert name in problem(run)  # by the log alone
    (run / name).unlink()
    if name == "experiment.yaml":
        with pytest.raises(HoldfastError, match="holds no run"):
            verify_audit(run)
    else:
        assert name in problem(run)


def test_changed_checksums_are_named(run: Path) -> None:
    file = run / "checksums.json"
    entries = json.loads(file.read_text())
    for name in ("model.safetensors", "federation.json"):
        file.write_text(json.dumps(entries | {name: [FIRST]}))
        assert problem(run) == f"{name} does not match its hash in checksums.json"


def test_a_record_that_is_removed_or_added_is_named(run: Path) -> None:
    (run / "model.safetensors").unlink()
    write(run, lines_of(run)[:-1])  # as after an interrupt
    records = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert verify_audit(run).problem is None
    (run / "metrics.jsonl").write_bytes(b"".join(records[:2]))
    assert verify_audit(run).problem is None  # as killed between the two files
    (run / "metrics.jsonl").write_bytes(records[0])
    assert problem(run) == "audit.jsonl, line 3: metrics.jsonl has no record of round 2"
    more = records[2].replace(b'"round": 3', b'"round": 4')
    (run / "metrics.jsonl").write_bytes(b"".join([*records, more]))
    assert problem(run) == "metrics.jsonl: audit.jsonl has no line for round 4"


def _other(value: Any) -> Any:
    match value:
        case str():
            return value[:-1] + ("0" if value[-1] != "0" else "1")
        case int():
            return value + 1
        case list():
            return [*value, 99]
    return value | {"x": "y"}


def test_the_commands(run: Path) -> None:
    def holdfast(*arguments: str) -> tuple[int, str]:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["audit", *arguments])
        return result.exit_code, result.output + getattr(result, "stderr", "")

    head = json.loads(lines_of(run)[-1])["hash"]
    assert holdfast("verify", str(run)) == (0, f"Intact: 5 lines, 3 rounds\nhead {head}\n")
    assert holdfast("verify", str(run), "--head", head)[0] == 0
    assert holdfast("verify", str(run), "--head", FIRST)[0] == 1
    code, table = holdfast("show", str(run))
    assert code == 0
    assert [line.split()[2] for line in table.splitlines()[1:]] == [
        "begun",
        "round",
        "round",
        "round",
        "ended",
    ]
    (run / "audit.jsonl").write_bytes((run / "audit.jsonl").read_bytes().replace(b"begun", b"began"))
    assert holdfast("verify", str(run)) == (
        1,
        "Not intact: audit.jsonl, line 1: its event, 'began', is unknown\n",
    )
    code, sentence = holdfast("show", str(run))
    assert code == 2
    assert "audit.jsonl is damaged: line 1" in sentence
    (run / "audit.jsonl").unlink()
    assert holdfast("verify", str(run))[0] == 2
    assert holdfast("verify", str(run / "nowhere"))[0] == 2


def test_an_extended_run_and_one_from_before_the_log(run: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        hf.resume(run, rounds=5)
    assert [entry["event"] for entry in read_audit(run)][4:] == [
        "ended",
        "extended",
        "round",
        "round",
        "ended",
    ]
    assert verify_audit(run).problem is None
    (run / "audit.jsonl").unlink()
    with warnings.catch_warnings(action="ignore"):
        hf.resume(run, rounds=6)
    assert [entry["event"] for entry in read_audit(run)] == ["extended", "round", "ended"]
    assert verify_audit(run).problem is None
    records = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(records.replace(b'"round": 2, ', b'"round": 2, "x": 1, '))
    (run / "checksums.json").unlink()
    assert "other records of rounds 1 to 5" in problem(run)


# Killed and resumed -------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Ends the process, as far as its files are concerned, at the nth of the operations on files that follow."""
    left = {"operations": 10**9}

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            left["operations"] -= 1
            if left["operations"] < 0:
                raise Killed  # also whatever is tried after the end
            return function(*arguments, **keywords)

        return call

    def write_all(file: Any, data: bytes) -> None:
        left["operations"] -= 1
        if left["operations"] < 0:
            if left["operations"] == -1:
                file.write(data[: len(data) // 2])
            raise Killed
        file.write(data)

    monkeypatch.setattr(files, "write_all", write_all)
    monkeypatch.setattr(
        os, "fsync", counted(lambda descriptor: None)
    )  # waiting for the disk changes nothing here
    for name in ("replace", "truncate"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return left


def go_on(path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 2
    federation = hf.federate(hf.Dataset.from_arrays(x, y, x, y), np.split(np.arange(12), 2))
    with warnings.catch_warnings(action="ignore"):  # of a run without a checkpoint
        hf.train(
            "fedavg", "mlp:2", federation, rounds=2, evaluate_locals=False, engine="sequential", device="cpu",
            checkpoint_seconds=0, out=path, resume=(path / "experiment.yaml").exists(), progress=False,
        )  # fmt: skip


def test_killed_before_every_operation_on_a_file(tmp_path: Path, mortal: dict[str, int]) -> None:
    """Also half-way through a line; the log fits at every moment, or names the file that resuming writes."""
    survived = 0
    go_on(tmp_path / "whole")
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    for operation in count():
        path = tmp_path / str(operation)
        mortal["operations"] = operation
        with suppress(Killed):
            go_on(path)
        killed, mortal["operations"] = mortal["operations"] < 0, 10**9
        if (path / "audit.jsonl").exists() and b"\n" in (path / "audit.jsonl").read_bytes():
            found = verify_audit(path).problem
            assert found is None or "`holdfast resume" in found
        go_on(path)
        assert verify_audit(path).problem is None
        assert (path / "model.safetensors").read_bytes() == expected
        if not killed:
            break
        survived += 1
    assert survived > 30
