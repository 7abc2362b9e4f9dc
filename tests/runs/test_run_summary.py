import json
import os
import time
from pathlib import Path

import pytest
import torch
import yaml

from holdfast.core.errors import HoldfastError
from holdfast.runs import RunDirectory, list_runs, metrics_file

EXPERIMENT = {
    "name": "x",
    "method": {"name": "fedntd", "beta": 1.0, "tau": 1.0},
    "data": {"name": "cifar10", "classes": [f"class {number}" for number in range(100)]},
    "partition": {"name": "dirichlet", "alpha": 0.1, "hash": "0" * 64},
    "versions": {f"package-{number}": "1.2.3" for number in range(20)},
}


def make(path: Path, rounds: int, **experiment: object) -> RunDirectory:
    run = RunDirectory.create(path, {**EXPERIMENT, **experiment})
    with run.lock():
        for round in range(1, rounds + 1):
            run.append({"round": round, "accuracy": round / 100})
    return run


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_records_are_read_from_the_last_to_the_first(block: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK", block)
    path = make(tmp_path / "run", 5).path / "metrics.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"round": 6, "accu')  # never finished
    assert [record["round"] for record in metrics_file.newest_first(path)] == [5, 4, 3, 2, 1]
    path.write_bytes(b'{"round": 1}\n')
    assert list(metrics_file.newest_first(path)) == [{"round": 1}]


def test_states_numbers_and_order(tmp_path: Path) -> None:
    finished = make(tmp_path / "finished", 3)
    with finished.lock():
        finished.save_model({"w": torch.ones(1)})
    make(tmp_path / "grid" / "seeds" / "interrupted", 2, method="fedavg")
    make(tmp_path / "new", 0)
    running = make(tmp_path / "running", 1)
    for age, name in enumerate(["new", "running", "grid/seeds/interrupted", "finished"]):
        for file in (tmp_path / name).glob("*.*"):
            os.utime(file, (1e9 - age, 1e9 - age))
    with running.lock():
        rows = [
            (
                run.name,
                run.state,
                run.rounds,
                run.accuracy,
                run.method,
                run.dataset,
                run.modified,
                run.problem,
            )
            for run in list_runs(tmp_path)
        ]
    assert rows == [
        ("new", "interrupted", 0, None, "fedntd", "cifar10", 1e9, None),
        ("running", "running", 1, 0.01, "fedntd", "cifar10", 1e9 - 1, None),
        ("grid/seeds/interrupted", "interrupted", 2, 0.02, "fedavg", "cifar10", 1e9 - 2, None),
        ("finished", "finished", 3, 0.03, "fedntd", "cifar10", 1e9 - 3, None),
    ]


def test_a_run_directory_lists_itself(tmp_path: Path) -> None:
    run = make(tmp_path / "one", 1)
    (only,) = list_runs(run.path)
    assert (only.name, only.path) == ("one", run.path)


def test_other_directories_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "file.txt").write_text("")
    make(tmp_path / ".hidden" / "run", 1)
    assert list_runs(tmp_path) == []
    with pytest.raises(HoldfastError, match="is not a directory"):
        list_runs(tmp_path / "missing")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("experiment.yaml", b"a: [", "experiment.yaml is damaged"),
        ("experiment.yaml", None, "experiment.yaml"),
        ("metrics.jsonl", b"junk\njunk\njunk\n", "metrics.jsonl is damaged"),
    ],
)
def test_a_corrupt_run_is_listed_as_such(
    tmp_path: Path, file: str, content: bytes | None, named: str
) -> None:
    run = make(tmp_path / "bad", 2)
    make(tmp_path / "good", 2)
    if content is None:
        (run.path / file).unlink()
    else:
        (run.path / file).write_bytes(content)
    states = {summary.name: summary for summary in list_runs(tmp_path)}
    assert states["bad"].state == "corrupt"
    assert named in (states["bad"].problem or "")
    assert states["good"].state == "interrupted"


@pytest.mark.parametrize("padding", [0, 70_000, 300_000])
@pytest.mark.parametrize("tail", ["", '{"round": 9, "accur', "broken\n"])
def test_the_last_record_is_found_from_the_end(tmp_path: Path, padding: int, tail: str) -> None:
    """Also where lines are longer than what is read at a time, the last was cut, or measured nothing."""
    run = make(tmp_path / "run", 0)
    records = [{"round": round, "accuracy": round / 8, "padding": "x" * padding} for round in range(1, 6)]
    records.append({"round": 6, "accuracy": None})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run.path / "metrics.jsonl").write_text(text + tail)
    (summary,) = list_runs(tmp_path)
    assert (summary.rounds, summary.accuracy) == (6, 5 / 8)


def test_five_hundred_runs_within_a_second(tmp_path: Path) -> None:
    text = yaml.safe_dump(EXPERIMENT)
    line = json.dumps({"round": 1, "accuracy": 0.5, "locals": [[0.123456789] * 10] * 100}) + "\n"
    for number in range(500):
        path = tmp_path / f"run-{number}"
        path.mkdir()
        (path / "experiment.yaml").write_text(text)
        (path / "metrics.jsonl").write_text(line * 20)
    start = time.process_time()
    assert len(list_runs(tmp_path)) == 500
    first = time.process_time() - start
    start = time.process_time()
    list_runs(tmp_path)
    second = time.process_time() - start
    print(f"500 runs: {first:.3f} s, again {second:.3f} s")
    assert first < 2  # about 0.6 s on one quiet core; generous for a busy one
    assert second < first
