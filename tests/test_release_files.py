"""The files that describe the package elsewhere agree with the package and with each other."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _yaml(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_version_is_everywhere_the_same() -> None:
    assert _yaml("CITATION.cff")["version"] == holdfast.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == holdfast.__version__
    wheels = re.findall(r"holdfast_fl-([\d.]+)-", (ROOT / "docs" / "deploy.md").read_text())
    assert set(wheels) <= {holdfast.__version__}


def test_citation_names_the_package_s_authors_and_licence() -> None:
    citation = _yaml("CITATION.cff")
    assert [author["name"] for author in citation["authors"]] == [a["name"] for a in PROJECT["authors"]]
    assert citation["license"] == PROJECT["license"]


def test_every_python_version_of_the_metadata_is_tested() -> None:
    tested = _yaml(".github/workflows/checks.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [found[1] for c in PROJECT["classifiers"] if (found := re.fullmatch(r".*:: (3\.\d+)", c))]
    assert tested == named
    assert PROJECT["requires-python"] == f">={tested[0]}"


def _commands(workflow: str) -> list[str]:
    jobs = _yaml(workflow)["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def test_every_make_target_of_the_workflows_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = _yaml(".github/workflows/checks.yml")["jobs"]
    called = {
        c.removeprefix("make ") for c in _commands(".github/workflows/checks.yml") if c.startswith("make ")
    }
    matrix = set(jobs["integrations"]["strategy"]["matrix"]["target"])
    assert "lint" in called
    assert (called - {"${{ matrix.target }}"}) | matrix <= targets


@pytest.mark.parametrize("hook", _yaml(".pre-commit-config.yaml")["repos"][0]["hooks"], ids=lambda h: h["id"])
def test_pre_commit_runs_the_tools_of_make_lint(hook: dict[str, Any]) -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    tool = " ".join(word for word in hook["entry"].split() if not word.startswith("-"))
    assert tool.replace(".venv/bin", "$(BIN)") in recipe[1]
