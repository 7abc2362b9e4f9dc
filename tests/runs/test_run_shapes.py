"""Files of a run whose syntax is right and whose content is not: every reader works, or one sentence names the file."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.errors import HoldfastError
from holdfast.report.loading import load_run
from holdfast.report.page import report_html
from holdfast.report.tables import table
from holdfast.runs import RunDirectory, checkpoint, list_runs

MUTATIONS = int(os.environ.get("HOLDFAST_FUZZ", "40000")) // 400  # of each file

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 1e300, float("nan"), "", "x", "1", [], {}, [1], ["x"], [[]], [[1], [1, 2]], [[[1]]],
    {"name": 1}, {"": {}}, {"x": None}, [None], [{}],
)  # fmt: skip


def deep(levels: int = 10_000) -> str:
    return "[" * levels + "]" * levels


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all parts of a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(content: Any, rng: np.random.Generator) -> Any:
    """The content with one to three parts replaced, removed or repeated."""
    content = {"root": copy.deepcopy(content)}
    for _ in range(rng.integers(1, 4)):
        paths = [path for path in places(content) if path and path != ("root",)] or [("root",)]
        # A part near the root is as probable as any of the many numbers in the lists.
        depth = rng.choice(sorted({len(path) for path in paths}))
        candidates = [path for path in paths if len(path) == depth]
        path = candidates[rng.integers(len(candidates))]
        inside: Any = content
        for key in path[:-1]:
            inside = inside[key]
        match rng.integers(4):
            case 0:
                del inside[path[-1]]
            case 1 if isinstance(inside, list):
                inside.insert(path[-1], copy.deepcopy(inside[path[-1]]))
            case _:
                inside[path[-1]] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
        content.setdefault("root", None)
    return content["root"]


@pytest.fixture(scope="module", params=["static", "stream"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after its third round and has all kinds of files."""
    path = tmp_path_factory.mktemp("shapes") / "run"
    stream = {"stream": "2", "method": "fedavg"} if request.param == "stream" else {"method": "fedprox"}
    experiment = hf.Experiment(
        data="digits", partition="iid", clients=3, model="mlp:4", rounds=3, local_epochs=1, probe_every=3,
        client_dropout=0.3, local_test_samples=20, engine="sequential", checkpoint_seconds=0, **stream,
    )  # fmt: skip
    experiment.run(path)
    (path / "checksums.json").unlink()  # it would detect every change
    return path


def resume(path: Path) -> None:
    """Resume from the checkpoint; the run is complete, so no round is trained."""
    hf.Experiment.from_mapping(RunDirectory.open(path).experiment).run(path, resume=True)


READERS: dict[str, Callable[[Path], Any]] = {
    "report": lambda path: report_html([load_run(path)]),
    "table": lambda path: table([path]),
    "show": lambda path: cli("show", str(path)),
    "show --json": lambda path: cli("show", str(path), "--json"),
    "export": lambda path: cli("export", str(path), str(path.parent / "metrics.csv")),
    "open": lambda path: repr(hf.Run.open(path)),
    "list": lambda path: list_runs(path.parent),
}


def cli(*arguments: str) -> None:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


FILES = {
    "metrics.jsonl": ("report", "table", "show", "show --json", "export", "open", "list"),
    "experiment.yaml": ("report", "table", "show", "show --json", "export", "open", "list"),
    "federation.json": ("report", "table"),
    "probe.json": ("report", "table"),
    "checksums.json": ("report", "show", "open", "list"),
}


def read_parts(file: Path) -> Any:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return yaml.safe_load(file.read_text()) if file.suffix == ".yaml" else json.loads(file.read_text())


def write_parts(file: Path, content: Any) -> None:
    if file.suffix == ".jsonl":
        lines = content if isinstance(content, list) else [content]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        file.write_text(yaml.safe_dump(content) if file.suffix == ".yaml" else json.dumps(content))


@pytest.mark.parametrize("name", FILES)
def test_every_reader_works_or_refuses_in_one_sentence(name: str, run: Path) -> None:
    rng, file = np.random.default_rng(0), run / name
    if name == "checksums.json":
        RunDirectory.open(run)
        file.write_text(json.dumps({"metrics.jsonl": ["0" * 64], "model.safetensors": ["1" * 64]}))
    whole, content = file.read_bytes(), read_parts(file)
    sentences = []
    try:
        for turn in range(MUTATIONS):
            write_parts(file, mutated(content, rng))
            reader = FILES[name][turn % len(FILES[name])]
            try:
                with warnings.catch_warnings(action="ignore"):
                    READERS[reader](run)
            except HoldfastError as error:
                sentences.append(str(error))
    finally:
        file.write_bytes(whole)
        (run / "checksums.json").unlink(missing_ok=True)
    assert len(sentences) > MUTATIONS / 20
    assert not any("\n" in sentence for sentence in sentences)


@pytest.mark.parametrize("name", ["metrics.jsonl", "federation.json", "probe.json", "experiment.yaml"])
def test_deeply_nested_files_are_refused(name: str, run: Path) -> None:
    file = run / name
    whole = file.read_bytes()
    file.write_text(deep() + "\n" + deep() + "\n")
    try:
        with pytest.raises(HoldfastError, match=name.replace(".", r"\.")):
            READERS["report"](run)
    finally:
        file.write_bytes(whole)


def test_a_checkpoint_of_the_wrong_shape_is_refused(run: Path) -> None:
    """Its hash is right, so only the schema can detect it."""
    rng, file = np.random.default_rng(0), run / "checkpoint" / "checkpoint.json"
    whole = file.read_bytes()
    previous = file.with_name("checkpoint.json.previous")
    before = previous.read_bytes() if previous.exists() else None
    if before is not None:
        previous.unlink()
    content = json.loads(whole)["checkpoint"]
    refused = 0
    for _ in range(MUTATIONS // 2):
        try:
            file.write_bytes(checkpoint._manifest_bytes(mutated(content, rng)))
            with warnings.catch_warnings(action="ignore"):
                resume(run)
        except HoldfastError:
            refused += 1
        finally:
            (run / "checksums.json").unlink(missing_ok=True)
            file.write_bytes(whole)
    if before is not None:
        previous.write_bytes(before)
    assert refused > MUTATIONS / 10


@pytest.mark.parametrize(
    "name", ["experiment.yaml", "metrics.jsonl", "federation.json", "probe.json", "model.safetensors"]
)
def test_any_changed_byte_of_a_finished_run_is_detected(name: str, tmp_path: Path) -> None:
    hf.Experiment(
        data="digits", partition="iid", clients=3, method="fedavg", model="mlp:4", rounds=2, probe_every=2,
        engine="sequential",
    ).run(tmp_path / "run")  # fmt: skip
    rng, file = np.random.default_rng(0), tmp_path / "run" / name
    whole = file.read_bytes()
    for _ in range(20):
        changed = bytearray(whole)
        at = int(rng.integers(len(changed)))
        changed[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        with pytest.raises(HoldfastError, match=f"{name} is damaged"):
            READERS["open" if name == "model.safetensors" else "report"](tmp_path / "run")
    file.write_bytes(whole)
    READERS["report"](tmp_path / "run")
    READERS["open"](tmp_path / "run")
