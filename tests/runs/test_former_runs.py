"""Runs that version 0.1.0 wrote, under the names that settings had then."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.settings import FORMER_NAMES, with_current_names
from holdfast.runs import checkpoint

FORMER = {current: former for former, current in FORMER_NAMES.items()}
EXPERIMENT = hf.Experiment(
    data="digits", partition="dirichlet:0.5", clients=4, clients_per_round=3, rounds=4, local_epochs=2,
    client_dropout=0.1, probe_every=2, local_test_samples=40, method="scaffold", model="mlp:8",
    engine="vectorized", device="cpu", checkpoint_seconds=0,
)  # fmt: skip


def with_former_names(settings: dict) -> dict:
    former = {FORMER.get(key, key): value for key, value in settings.items()}
    return former | ({"engine": "lanes"} if former["engine"] == "vectorized" else {})


def as_written_by_0_1_0(run: Path) -> None:
    """Rename the settings in experiment.yaml and in every checkpoint of a run."""
    (run / "checksums.json").unlink()
    path = run / "experiment.yaml"
    written = with_former_names(yaml.safe_load(path.read_text()))
    assert {
        "sample",
        "epochs",
        "dropout",
        "norm",
        "probe",
        "local_test",
        "lanes",
        "address",
    } <= written.keys()
    path.write_text(yaml.safe_dump(written, sort_keys=False))
    for path in (run / "checkpoint").glob("checkpoint.json*"):
        manifest = json.loads(path.read_bytes())["checkpoint"]
        manifest["meta"]["made_of"] = with_former_names(manifest["meta"]["made_of"])
        path.write_bytes(checkpoint._manifest_bytes(manifest))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A whole run and one that was interrupted after round 2, both with former names."""

    def interrupt(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("former")
    EXPERIMENT.run(folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.run(folder / "interrupted", on_round=interrupt)
    for path in folder.iterdir():
        as_written_by_0_1_0(path)
    return folder / "whole", folder / "interrupted"


def call(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_settings_of_a_former_run_have_their_current_names(runs):
    for path in runs:
        experiment = hf.RunDirectory.open(path).experiment
        assert experiment == with_current_names(experiment)
        assert (experiment["local_epochs"], experiment["engine"]) == (2, "vectorized")
        assert experiment["parallel_clients"] == 3


def test_names_inside_a_method_or_a_model_stay(tmp_path):
    """``epochs`` and ``norm`` are hyper-parameters there."""
    method, model = {"name": "creff", "epochs": 3}, {"name": "resnet18", "norm": "group"}
    run = hf.RunDirectory.create(tmp_path / "run", {"method": method, "model": model, "epochs": 5})
    opened = hf.RunDirectory.open(run.path).experiment
    assert opened == {"method": method, "model": model, "local_epochs": 5}


def test_a_former_run_is_opened_shown_and_reported(runs, tmp_path):
    whole, interrupted = runs
    assert hf.Run.open(whole).accuracy == json.loads(call("show", whole, "--json"))["accuracy"]
    assert "interrupted after 2 of 4 rounds" in call("show", interrupted)
    call("report", whole, interrupted, "--out", tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_an_interrupted_former_run_ends_with_the_bits_of_a_whole_one(runs, tmp_path):
    whole, interrupted = runs
    path = tmp_path / "resumed"
    shutil.copytree(interrupted, path)
    call("resume", path)
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [record["round"] for record in hf.RunDirectory.open(path).records()] == [1, 2, 3, 4]
