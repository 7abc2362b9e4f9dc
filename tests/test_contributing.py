"""A method added by the steps of CONTRIBUTING.md is listed, described and trained like the built-in ones."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r'```python title="(?P<file>[^"]+)"\n(?P<code>.*?)\n\s*```', re.DOTALL)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of src/ with the files of the page written, or extended where they exist."""
    copy = tmp_path_factory.mktemp("contributed")
    shutil.copytree(
        ROOT / "src/holdfast", copy / "src/holdfast", ignore=shutil.ignore_patterns("__pycache__")
    )
    blocks = list(BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert [block["file"].rpartition("/")[2] for block in blocks] == ["fedpull.py", "builtin.py"]
    for block in blocks:
        path = copy / block["file"]
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(before + textwrap.dedent(block["code"]) + "\n", encoding="utf-8")
    return copy / "src"


def holdfast(source: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(source), "TERM": "dumb", "COLUMNS": "200"}
    command = [sys.executable, "-m", "holdfast", *arguments]
    done = subprocess.run(command, env=environment, cwd=source.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_without_measurements(source: Path) -> None:
    listed = {method["name"]: method for method in json.loads(holdfast(source, "methods", "--json"))}
    assert listed["fedpull"]["when"] == "clients drift because they take many local steps"
    assert listed["fedpull"]["results"] == []
    assert listed.keys() > {"fedavg", "fedntd"}
    assert "fedpull" in holdfast(source, "methods")


def test_it_is_described(source: Path) -> None:
    page = holdfast(source, "methods", "fedpull")
    assert "μ: strength of the penalty" in page
    assert "not measured" in page


def test_it_trains_as_the_method_it_repeats(source: Path) -> None:
    settings = (
        "--clients",
        "4",
        "--rounds",
        "2",
        "--local-epochs",
        "2",
        "--model",
        "mlp:8",
        "--lr",
        "0.1",
        "--json",
    )
    own, built_in = (
        json.loads(holdfast(source, "run", "--method", f"{name}:mu=0.5", "--out", f"runs/{name}", *settings))
        for name in ("fedpull", "fedprox")
    )
    assert own["accuracy"] == pytest.approx(built_in["accuracy"], abs=0.01)


def test_a_hyper_parameter_out_of_range_is_refused(source: Path) -> None:
    with pytest.raises(AssertionError, match=r"fedpull: mu is -1\.0; it must be at least 0"):
        holdfast(source, "run", "--method", "fedpull:mu=-1", "--clients", "4")
