"""docs/own.md as it is written: its files, its Python, its command lines and its YAML, in a folder of their own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT, run_page
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.runs import RunDirectory

PAGE = (ROOT / "docs/own.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("page")
    outcome = run_page(PAGE, folder)
    assert len(outcome.printed) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("mine", None)


def test_python_yaml_and_the_command_line_record_and_train_the_same(folder: Path) -> None:
    one, three = (RunDirectory.open(folder / "runs" / name) for name in ("one", "three"))
    recorded = one.experiment["method"]
    assert (recorded["name"], recorded["beta"], recorded["file"]) == (
        "mine.py:Sparse",
        0.02,
        str(folder / "mine.py"),
    )
    same = {"data", "model", "hash", "rounds", "lr", "shape"}
    assert {key: one.experiment[key] for key in same} == {key: three.experiment[key] for key in same}
    assert three.experiment["method"] == recorded | {"beta": 0.05}
    in_python, on_the_line = folder / "runs/mine", folder / "runs/two"
    for python, text in (("fedavg", "fedavg"), ("sparse", "mine.py-Sparse")):
        for seed in (0, 1):
            pair = [RunDirectory.open(root / name / f"seed-{seed}")
                    for root, name in ((in_python, python), (on_the_line, text))]  # fmt: skip
            assert pair[0].experiment["method"] == pair[1].experiment["method"]
            assert [r["accuracy"] for r in pair[0].records()] == [r["accuracy"] for r in pair[1].records()]


def test_its_runs_are_opened_and_a_changed_file_is_refused(folder: Path) -> None:
    run = hf.Run.open(folder / "runs/one")
    assert run.accuracy == run.records[-1]["accuracy"]
    assert run.model[1].out_features == 16  # type: ignore[index, union-attr]
    result = CliRunner().invoke(app, ["resume", str(folder / "runs/one")])
    assert result.exit_code == 0
    mine = folder / "mine.py"
    text = mine.read_text()
    mine.write_text(text + "\n# a note\n")
    result = CliRunner().invoke(app, ["resume", str(folder / "runs/one")])
    assert result.exit_code == 2
    assert f"'{mine}', which the data set comes from, has changed since it was recorded" in result.stderr
    mine.write_text(text)
