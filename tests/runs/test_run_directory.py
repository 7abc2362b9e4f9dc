import errno
import json
import math
import multiprocessing
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from holdfast.core.errors import HoldfastError
from holdfast.runs import RunDirectory

EXPERIMENT = {
    "name": "größer",
    "method": {"name": "fedntd", "beta": 1.0, "tau": 1e-05},
    "data": {"name": "cifar10"},
    "clients": 100,
    "classes": ["0", "no", "1e-5"],
    "target": None,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "a" / "run", EXPERIMENT)


def test_the_experiment_comes_back_as_given(run: RunDirectory) -> None:
    assert RunDirectory.open(run.path).experiment == EXPERIMENT
    assert yaml.safe_load((run.path / "experiment.yaml").read_text()) == EXPERIMENT
    assert list(run.experiment) == list(EXPERIMENT)


def test_a_directory_that_holds_a_run_is_refused(run: RunDirectory) -> None:
    with pytest.raises(HoldfastError, match=r"already holds a run.*holdfast resume .*--out"):
        RunDirectory.create(run.path, {"other": 1})
    assert run.experiment == EXPERIMENT


def test_commands_that_are_named_can_be_copied(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "two words", EXPERIMENT)
    for attempt in (run.load_model, lambda: RunDirectory.create(run.path, EXPERIMENT)):
        with pytest.raises(HoldfastError) as refused:
            attempt()
        command = str(refused.value).split("`")[1]
        assert shlex.split(command) == ["holdfast", "resume", str(run.path)]


def test_metrics_without_their_experiment_are_not_overwritten(run: RunDirectory) -> None:
    with run.lock():
        run.append({"round": 1})
    (run.path / "experiment.yaml").unlink()
    with pytest.raises(HoldfastError, match="already holds a run"):
        RunDirectory.create(run.path, EXPERIMENT)


def test_places_where_no_run_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(HoldfastError, match="a file exists where a directory is needed"):
            RunDirectory.create(path, EXPERIMENT)
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(HoldfastError, match="holds no run"):
            RunDirectory.open(path)


@pytest.mark.parametrize(
    "text", ["a: [1", "- 1\n- 2\n", "", "a: !!python/object/apply:os.getcwd []", "\x00\x01"]
)
def test_a_damaged_experiment_is_named(run: RunDirectory, text: str) -> None:
    (run.path / "experiment.yaml").write_text(text)
    with pytest.raises(HoldfastError, match=r"experiment\.yaml is damaged"):
        _ = RunDirectory.open(run.path).experiment


def test_records_come_back_and_are_seen_at_once(run: RunDirectory) -> None:
    with run.lock():
        for number in range(1, 4):
            run.append({"round": number, "accuracy": number / 7, "class_accuracy": [0.1, 0.2]})
            assert len(RunDirectory.open(run.path).records()) == number
    assert run.records()[-1] == {"round": 3, "accuracy": 3 / 7, "class_accuracy": [0.1, 0.2]}


def test_what_json_cannot_hold_becomes_null_and_arrays_lists(run: RunDirectory) -> None:
    with run.lock():
        run.append(
            {
                "round": np.int64(1),
                "loss": math.nan,
                "nested": {"up": [math.inf, -math.inf, 1.5], "array": np.array([[1.0, np.nan]])},
                "scalar": np.float32(0.5),
                "flag": np.bool_(True),
                "tensor": torch.tensor([1, 2]),
                "name": "zwölf",
            }
        )

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = (run.path / "metrics.jsonl").read_text()
    assert line.endswith("\n")
    assert json.loads(line, parse_constant=refuse) == {
        "round": 1,
        "loss": None,
        "nested": {"up": [None, None, 1.5], "array": [[1.0, None]]},
        "scalar": 0.5,
        "flag": True,
        "tensor": [1, 2],
        "name": "zwölf",
    }


def test_a_record_without_a_round_is_a_mistake(run: RunDirectory) -> None:
    with run.lock(), pytest.raises(ValueError, match="round"):
        run.append({"accuracy": 0.1})
    assert run.records() == []


def test_writing_needs_the_lock(run: RunDirectory) -> None:
    writes = [
        lambda: run.append({"round": 1}),
        lambda: run.rewind(0),
        lambda: run.save_checkpoint(1, {}, {}, {}),
        lambda: run.save_model({}),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="lock"):
            write()
    again = RunDirectory.open(run.path)
    refused = pytest.raises(HoldfastError, match=f"in use by process {os.getpid()}")
    with run.lock(), refused, again.lock():
        pass


def write_lines(run: RunDirectory, text: str) -> None:
    (run.path / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    "tail", ['{"round": 3, "accu', '{"round": 3}', "\x00" * 50, "broken\n", '{"a": 1}\n']
)
def test_a_last_line_cut_short_is_left_out_and_dropped_on_resume(run: RunDirectory, tail: str) -> None:
    write_lines(run, '{"round": 1}\n{"round": 2}\n' + tail)
    assert [record["round"] for record in run.records()] == [1, 2]
    with run.lock():
        run.rewind(2)
        run.append({"round": 3, "again": True})
    assert run.records() == [{"round": 1}, {"round": 2}, {"round": 3, "again": True}]


@pytest.mark.parametrize("line", ["{", "[1]", "", "\udcff", "[" * 100_000])
def test_a_damaged_line_in_the_middle_is_named(run: RunDirectory, line: str) -> None:
    content = f'{{"round": 1}}\n{line}\n{{"round": 3}}\n'
    (run.path / "metrics.jsonl").write_bytes(content.encode("utf8", "surrogateescape"))
    with pytest.raises(HoldfastError, match=r"metrics\.jsonl is damaged: line 2 "):
        run.records()


def test_rewind_drops_later_rounds_and_keeps_the_bytes_before(run: RunDirectory) -> None:
    with run.lock():
        run.rewind(0)  # nothing there yet
        for number in range(1, 6):
            run.append({"round": number, "x": 0.1 * number})
        whole = (run.path / "metrics.jsonl").read_bytes()
        run.rewind(3)
        assert (run.path / "metrics.jsonl").read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
        run.append({"round": 4, "x": 0.0})
        run.rewind(10)
        assert [record["round"] for record in run.records()] == [1, 2, 3, 4]
        run.rewind(0)
        assert run.records() == []


def test_the_final_model_comes_back_and_marks_the_end(run: RunDirectory) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    model = {"z.weight": tied.T, "a.bias": tied, "steps": torch.tensor(7), "flat": torch.zeros(12)[2:5]}
    assert not run.finished
    with pytest.raises(HoldfastError, match="no final model yet"):
        run.load_model()
    with run.lock():
        run.save_model(model)
    loaded = RunDirectory.open(run.path).load_model()
    assert run.finished
    assert list(loaded) == list(model)
    assert all(torch.equal(loaded[name], model[name]) for name in model)
    for damaged in (b"", b"\xff" * 40, (run.path / "model.safetensors").read_bytes()[:-1]):
        (run.path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(HoldfastError, match=r"model\.safetensors is damaged"):
            run.load_model()


def test_a_full_disk_leaves_no_half_line(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes a part of the line, then no more."""
    from holdfast.core import files

    def half(file, data: bytes) -> None:
        file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with run.lock():
        run.append({"round": 1})
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_all", half)
            with pytest.raises(HoldfastError, match=r"cannot write .*metrics\.jsonl: no space is left"):
                run.append({"round": 2, "long": "x" * 1000})
        assert (run.path / "metrics.jsonl").read_text() == '{"round": 1}\n'
        run.append({"round": 2})
    assert [record["round"] for record in run.records()] == [1, 2]


def _fill(path: Path, limit: int) -> None:
    """Write a run under a limit on the size of files until it fails; exit 3 with the sentence printed."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run = RunDirectory.open(path)
    try:
        with run.lock():
            for round in range(1, 50):
                run.append({"round": round, "padding": "x" * 500})
                run.save_checkpoint(round, {"w": torch.full((100 * round,), float(round))}, {}, {})
    except HoldfastError as error:
        (path / "sentence").write_text(str(error))
        sys.exit(3)


def test_the_kernel_refuses_more_bytes(run: RunDirectory) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_fill, args=(run.path, 10_000))
    process.start()
    process.join()
    assert process.exitcode == 3
    assert "no space is left" in (run.path / "sentence").read_text()
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.warning is None
    assert torch.equal(
        checkpoint.tensors["w"], torch.full((100 * checkpoint.round,), float(checkpoint.round))
    )
    assert len(run.records()) >= checkpoint.round > 5
    assert not list(run.path.rglob("*.tmp"))


def test_a_really_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    try:
        run = RunDirectory.create(mount / "run", EXPERIMENT)
        with run.lock():
            run.append({"round": 1})
            run.save_checkpoint(1, {"w": torch.ones(10_000)}, {}, {0: {"c": torch.ones(3000)}})
            with pytest.raises(HoldfastError, match="no space is left"):
                run.save_checkpoint(
                    2, {"w": torch.ones(20_000)}, {}, {k: {"c": torch.ones(9000)} for k in range(9)}
                )
            assert len(list(run.path.rglob("*.safetensors"))) == 2  # the failed attempt gave its space back
            run.append({"round": 2})
            checkpoint = run.load_checkpoint()
            assert checkpoint is not None
            assert (checkpoint.round, checkpoint.warning) == (1, None)
            run.save_checkpoint(2, {"w": torch.zeros(10_000)}, {}, {})
        with pytest.raises(HoldfastError, match="no space is left"):
            RunDirectory.create(mount / "second", {"text": "x" * 300_000})
        assert [record["round"] for record in run.records()] == [1, 2]
        assert not list(mount.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _write_as_nobody(path: Path, sentences: Path) -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    run = RunDirectory.open(path)
    assert run.records() == [{"round": 1}]
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 1
    attempts = [lambda: run.lock().__enter__(), lambda: RunDirectory.create(path / "below", EXPERIMENT)]
    for attempt in attempts:
        try:
            attempt()
        except HoldfastError as error:
            with sentences.open("a") as file:
                file.write(f"{error}\n")


def test_a_read_only_directory_can_be_read_and_refuses_writes() -> None:
    # Not below pytest's own directory: only its owner may enter that one.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        run = RunDirectory.create(Path(folder) / "run", EXPERIMENT)
        with run.lock():
            run.append({"round": 1})
            run.save_checkpoint(1, {"w": torch.ones(3)}, {}, {})
        for path in (run.path / ".lock", run.path):
            path.chmod(0o555 if path.is_dir() else 0o444)
        sentences = Path(folder) / "sentences"
        process = multiprocessing.get_context("fork").Process(
            target=_write_as_nobody, args=(run.path, sentences)
        )
        process.start()
        process.join()
        run.path.chmod(0o755)
        assert process.exitcode == 0
        said = sentences.read_text().splitlines()
        assert len(said) == 2
        assert all("read-only for this user" in sentence for sentence in said)
