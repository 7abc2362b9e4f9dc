"""Every example in a help text, as it is printed: it works, and what it trains has learned."""

import re
import shlex
import shutil
from inspect import getdoc
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import COMMANDS, app, flower

GOOD = 0.6  # accuracy on digits, of ten classes

COUNTS = "client,a,b\n0,9,1\n1,2,8\n"
EXPERIMENT = "{data: digits, clients: 5, method: fedntd, model: linear, rounds: 10, partition: iid}"


def examples():
    """The examples of all help texts, the one to start with first."""
    commands = [c for commands in COMMANDS.values() for c in commands]
    commands += [c.callback for c in flower.registered_commands]
    texts = [app.info.help, flower.info.help, *map(getdoc, commands)]
    found = [re.findall(r"(?:Start with|Example):\s+holdfast (.*(?:\n--.*)*)", text) for text in texts]
    assert all(found), "a help text without an example"
    return list(dict.fromkeys(" ".join(one.split()) for text in found for one in text))


EXAMPLES = examples()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the examples read: a file of counts, an experiment, runs of the first example."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "label_counts.csv").write_text(COUNTS)
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, shlex.split(EXAMPLES[0]))
    assert done.exit_code == 0, done.output
    assert "holdfast:" not in done.stderr
    (made,) = (folder / "runs").iterdir()
    assert hf.Run.open(made).accuracy > GOOD
    for name in ("old", "fedavg", "fedntd"):
        shutil.copytree(made, folder / "runs" / name)
    for method in ("fedavg", "fedntd"):
        shutil.copytree(made, folder / "runs" / "compared" / method / "seed-0")
    return folder


@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_an_example_works_as_printed(example, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    command, *arguments = shlex.split(example)
    runs = Path("runs")
    if command != "run" and "runs/x" in arguments and not (runs / "x").exists():
        shutil.copytree(runs / "old", runs / "x")
    if command != "compare" and "runs/comparison" in arguments:
        arguments = ["runs/compared" if one == "runs/comparison" else one for one in arguments]
    if command == "ui":
        monkeypatch.setattr("holdfast.report.serve", lambda *_, ready: ready("http://…"))
    if command in ("reproduce", "leaderboard"):
        arguments.append("--status")  # their runs take a GPU, and data sets that must be downloaded
    if "certificates" in arguments:
        pytest.importorskip("cryptography")
    before = set(runs.rglob("experiment.yaml"))
    done = CliRunner().invoke(app, [command, *arguments])
    assert done.exit_code == 0, done.output
    assert "holdfast:" not in done.stderr
    made = [path.parent for path in set(runs.rglob("experiment.yaml")) - before]
    if command == "tune":  # most trials are left after a few rounds
        made = [path for path in made if hf.RunDirectory.open(path).finished]
    assert bool(made) == (command in ("run", "compare", "tune", "recommend"))
    for path in made:
        assert hf.Run.open(path).accuracy > GOOD
