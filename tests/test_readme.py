"""The examples on the first pages, as they are printed."""

import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def example():
    """The Python example, which both pages print, and what it leaves behind."""
    (code,) = re.findall(
        r"```python\n(import holdfast as hf\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    names = {}
    exec(code, names)
    return code, names


def test_the_example_learns(example):
    run = example[1]["run"]
    assert run.accuracy > 0.7
    assert run.class_accuracy.shape == (30, 10)


def test_the_first_page_has_the_same_example(example):
    federation_and_training = example[0].split("\n\n")[1].splitlines()[:2]
    assert "\n".join(federation_and_training) in (ROOT / "docs/index.md").read_text()


def test_the_experiment_files_on_the_first_page_are_valid():
    import yaml

    for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.S):
        assert hf.Experiment.from_mapping(yaml.safe_load(text)).rounds


def commands(page):
    """The command lines in a page's blocks of code, as words."""
    lines = (ROOT / page).read_text().replace("\\\n", " ").splitlines()
    found = (re.fullmatch(r"(?:    |\$ )holdfast (.*)", line) for line in lines)
    return [shlex.split(match[1], comments=True) for match in found if match]


PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_have_options_that_exist(page):
    for words in commands(page):
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        with command.make_context(command.name, words) as context:
            known = {field.name for field in fields(hf.Experiment)}
            given = {k: v for k, v in context.params.items() if k in known and v is not None}
            if not any(".py:" in str(value) or "clinics/" in str(value) for value in given.values()):
                hf.Experiment(**given)


def test_the_comparison_of_the_readme(tmp_path, monkeypatch):
    (words,) = [words for words in commands("README.md") if words[0] == "compare"]
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("notebooks"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.report.write_report", lambda paths, page: Path(page).write_text(str(paths)))
    words[words.index("--seeds") + 1] = "1"  # two more take only time
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    runs = [path.parent for path in Path("runs").rglob("experiment.yaml")]
    assert len(runs) == 3
    assert all(hf.Run.open(run).accuracy > 0.5 for run in runs)
