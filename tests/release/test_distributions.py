"""The sdist and the wheel of `make dist`: their content, and their use in empty environments without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

if "HOLDFAST_DIST" not in os.environ:
    pytest.skip("takes minutes: make test-release", allow_module_level=True)

DIST = Path(os.environ["HOLDFAST_DIST"]).resolve()

# What runs with the oldest dependencies: the tests of what calls into other packages.
SUBSET = (
    "core",
    "data",
    "metrics",
    "models",
    "report",
    "runs",
    "tasks",
    "training/test_training.py",
    "training/test_resume.py",
)


def _only(pattern: str) -> Path:
    (found,) = DIST.glob(pattern)
    return found


def _environment(path: Path, *packages: str, constraints: Path) -> Path:
    """The `bin` of a new virtual environment with these packages and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    python = path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", constraints, *packages], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    return path / "bin"


def _run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST_"))}
    environment = kept | {"TERM": "dumb", "COLUMNS": "200"}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)


def _checked(*command: object, cwd: Path) -> str:
    done = _run(*command, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without extras."""
    return _environment(
        tmp_path_factory.mktemp("bare") / "venv", str(_only("*.whl")), constraints=CONSTRAINTS
    )


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with its extras and the oldest versions of all direct dependencies that pyproject.toml allows."""
    extras = ("data", "privacy", "report")
    lines = [
        *PROJECT["dependencies"],
        *(line for e in extras for line in PROJECT["optional-dependencies"][e]),
    ]
    folder = tmp_path_factory.mktemp("oldest")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line.replace(">=", "==") for line in lines))
    wheel = f"{_only('*.whl')}[{','.join(extras)}]"
    return _environment(folder / "venv", wheel, "pytest", "hypothesis", "httpx", constraints=constraints)


def test_the_wheel_contains_the_package_alone() -> None:
    wheel = _only("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "holdfast",
        f"holdfast_fl-{wheel.name.split('-')[1]}.dist-info",
    }
    packaged = {name for name in names if name.startswith("holdfast/")}
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/holdfast").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == source
    assert wheel.stat().st_size < 2 << 20


def test_the_sdist_contains_tests_and_pages_but_no_results() -> None:
    sdist = _only("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "CHANGELOG.md",
        "docs/index.md",
        "examples/experiment.yaml",
        "tests/core/test_spec.py",
    } <= names
    assert not [name for name in names if name.startswith(("results", "docs/images", "runs", "benchmarks"))]
    assert sdist.stat().st_size < 3 << 20


def test_the_wheel_runs_without_extras(bare: Path, tmp_path: Path) -> None:
    imported = _checked(bare / "python", "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path)
    assert bare.parent in Path(imported).parents
    options = ("--data", "digits", "--clients", "4", "--rounds", "2", "--json")
    run = json.loads(_checked(bare / "holdfast", "run", *options, "--out", "run", cwd=tmp_path))
    assert run["accuracy"] > 0.1
    _checked(bare / "holdfast", "report", "run", cwd=tmp_path)  # torch brings jinja2
    assert list((tmp_path / "run").glob("*.html"))
    assert "not installed" in _checked(bare / "holdfast", "doctor", cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("figure", "accuracy", "run"),
            "holdfast: this needs matplotlib: pip install 'holdfast-fl[report]'\n",
        ),
        (("ui", "."), "holdfast: this needs uvicorn: pip install 'holdfast-fl[report]'\n"),
    ],
)
def test_a_missing_extra_is_named(
    bare: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    options = ("--data", "digits", "--clients", "2", "--rounds", "1", "--out", "run")
    _checked(bare / "holdfast", "run", *options, cwd=tmp_path)
    done = _run(bare / "holdfast", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, message)


def test_a_run_and_its_report_with_the_oldest_dependencies(oldest: Path, tmp_path: Path) -> None:
    options = ("--data", "digits", "--clients", "4", "--rounds", "2")
    _checked(oldest / "holdfast", "run", *options, "--method", "fedntd+fedprox", "--out", "run", cwd=tmp_path)
    _checked(oldest / "holdfast", "report", "run", cwd=tmp_path)
    (page,) = (tmp_path / "run").glob("*.html")
    assert "fedntd" in page.read_text()


def test_the_sdist_s_tests_with_the_oldest_dependencies(oldest: Path, tmp_path: Path) -> None:
    with tarfile.open(_only("*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    subset = [f"tests/{name}" for name in SUBSET.split()]
    print(_checked(oldest / "python", "-m", "pytest", *subset, cwd=source)[-500:])
