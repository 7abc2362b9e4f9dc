"""The command line, command by command."""

import csv
import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import COMMANDS, app
from holdfast.cli.inspect import FIGURES as cli_figures
from holdfast.cli.printing import print_table
from holdfast.cli.reference import EXTRAS
from holdfast.core.errors import install
from holdfast.report import tracker

PROGRAM = [sys.executable, "-m", "holdfast"]
SMALL = ["--clients", "5", "--model", "linear", "--rounds", "3", "--lr", "0.1", "--device", "cpu"]


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def good(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "one"
    good("run", *SMALL, "--method", "fedntd", "--partition", "dirichlet:0.5", "--seed", 1, "--out", out)
    return out


def test_a_warning_is_one_sentence(tmp_path):
    images = np.random.default_rng(0).normal(size=(22, 1, 8, 8)).astype(np.float32)
    labels = np.arange(22) % 2
    data = tmp_path / "images.npz"
    np.savez(data, x_train=images, y_train=labels, x_test=images, y_test=labels)
    command = [*PROGRAM, "run", "--data", data, "--partition", "iid", "--clients", "1", "--model", "resnet18",
               "--batch-size", "4", "--rounds", "1", "--device", "cpu", "--out", tmp_path / "run"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = done.stderr.strip().splitlines()
    assert first == (
        "holdfast: 1 of 1 clients have a last batch of as few as 2 samples, on which this model's BatchNorm may make "
        "training unstable; set drop_last to leave such batches out"
    )
    assert second.startswith(
        "holdfast: fedavg: the accuracy after 1 round, 50.0%, is not significantly better than"
    )


# Help -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["flower", *(c.__name__ for commands in COMMANDS.values() for c in commands)]
)
def test_every_command_explains_itself_with_an_example(command):
    assert f"Example: holdfast {command}" in " ".join(good(command, "--help").split())


def test_every_setting_is_an_option_and_explained():
    shown = good("run", "--help")
    for field in fields(hf.Experiment):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert field.metadata["help"]


def test_help_names_every_preset():
    from holdfast.data.preprocess import PRESETS

    (preprocess,) = [f.metadata["help"] for f in fields(hf.Experiment) if f.name == "preprocess"]
    assert set(re.findall(r"[\w-]+", preprocess.split(":")[1])) == set(PRESETS)


def test_help_of_compare_hides_the_refused_option():
    assert "--method" not in good("compare", "--help")


def test_help_does_not_import_torch():
    code = "import sys; from holdfast.cli import app; print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "False\n"


def test_the_version_is_printed():
    shown = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown == f"holdfast {hf.__version__}\n"


# Training -------------------------------------------------------------------------------------------------


def test_run_by_options_is_run_by_file(run, tmp_path):
    output = json.loads(good("run", run / "experiment.yaml", "--out", tmp_path / "again", "--json"))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    direct = hf.Experiment(
        clients=5,
        model="linear",
        rounds=3,
        lr=0.1,
        method="fedntd",
        partition="dirichlet:0.5",
        seed=1,
        device="cpu",
    ).run()
    assert output["accuracy"] == direct.accuracy
    assert output["hash"] == direct.experiment["hash"]
    changed = good(
        "run",
        run / "experiment.yaml",
        "--set",
        "method.beta=0.5",
        "--rounds",
        2,
        "--out",
        tmp_path / "c",
        "--json",
    )
    assert json.loads(changed)["rounds"] == 2
    assert hf.RunDirectory.open(tmp_path / "c").experiment["method"]["beta"] == 0.5


def test_a_run_without_out_gets_a_new_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good("run", *SMALL, "--rounds", 1)
    good("run", *SMALL, "--rounds", 1)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "digits-fedavg-seed0",
        "digits-fedavg-seed0-2",
    ]


def test_resume_of_a_finished_run_changes_nothing(run):
    before = (run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()
    good("resume", run)
    assert before == ((run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes())


def test_compare_prints_means_and_a_test(tmp_path):
    arguments = ["compare", "fedavg", "fedprox", *SMALL, "--seeds", 2, "--out", tmp_path / "c"]
    shown = good(*arguments)
    output = json.loads(good(*arguments, "--json"))
    for row in output["rows"]:
        mean, deviation = 100 * np.mean(row["accuracy"]), 100 * np.std(row["accuracy"], ddof=1)
        assert re.search(rf"{row['method']}\s+{mean:.2f} ± {deviation:.2f}", shown)
    assert f"{output['rows'][1]['p_value']:.3f}" in shown
    assert good("table", tmp_path / "c").count("\n| fed") == 2


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_tables_fold_words_and_never_cut_numbers(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    head = ["method", " accuracy", " forgetting", " rounds", " seconds", " MB", " vs first", " p"]
    row = ["fedntd+fedprox", "74.23 ± 3.74", "-17.29 ± 2.74", "3 (1/2)", "10.1", "12.1", "+13.48", "0.457"]
    print_table("", head, [row])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "p"
    assert re.split(r" {2,}", lines[1].strip())[1:] == row[1:]
    folded = [re.split(r" {2,}", line)[0] for line in lines[1:]]
    assert "".join(folded) == row[0]
    assert (len(folded) == 1) == (columns == 200)
    assert columns < 80 or max(map(len, lines)) <= columns


def test_records_go_to_trackers(tmp_path):
    good("run", *SMALL, "--track", "csv", "--out", tmp_path / "t")
    with open(tmp_path / "t" / "metrics.csv", newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1", "2", "3"]


def test_a_resumed_run_continues_its_tracker(tmp_path):
    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "t"
    experiment = hf.Experiment(clients=4, model="linear", rounds=4, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(out, trackers=[tracker("csv", out)], on_round=stop)
    good("resume", out, "--track", "csv")
    with open(out / "metrics.csv", newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]


def test_an_interrupt_prints_how_to_continue(tmp_path):
    out = tmp_path / "my run"
    process = subprocess.Popen(
        [*PROGRAM, "run", *SMALL, "--rounds", "1000000", "--out", str(out)], stderr=subprocess.PIPE, text=True,
        # Whoever runs these tests in the background ignores interrupts, and so would the process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert process.stderr.read().strip() == f"holdfast: stopped; continue with: holdfast resume '{out}'"


# Inspecting -----------------------------------------------------------------------------------------------


def test_show(run):
    output = json.loads(good("show", run, "--json"))
    opened = hf.Run.open(run)
    assert output["state"] == "finished"
    assert output["accuracy"] == opened.accuracy
    assert output["forgetting"] == pytest.approx(opened.forgetting)
    assert f"{opened.accuracy:.2%}" in good("show", run)


def test_show_and_export_of_a_run_that_recorded_little(tmp_path):
    little = hf.RunDirectory.create(tmp_path / "little", {"method": {"name": "mine"}, "rounds": 3})
    with little.lock():
        for round in (1, 2):
            little.append({"round": round, "accuracy": round / 4})
    assert "mine: interrupted after 2 of 3 rounds" in good("show", little.path)
    output = json.loads(good("show", little.path, "--json"))
    assert (output["accuracy"], output["forgetting"]) == (0.5, None)
    good("export", little.path, tmp_path / "little.csv")
    assert (tmp_path / "little.csv").read_text().splitlines() == ["round,accuracy", "1,0.25", "2,0.5"]


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt2", "m.csv"])
def test_what_cannot_be_written_is_one_sentence_and_leaves_the_old_file(name, run, tmp_path, monkeypatch):
    (tmp_path / name).write_text("old")

    def full(*names):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.replace", full)
    for arguments in (
        ["export", run, tmp_path / name],
        ["partition", "--clients", 3, "--save", tmp_path / name],
    ):
        result = call(*arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"{name}: it is read-only for this user" in result.stderr
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "old")]


def test_what_is_written_makes_its_folder(run, tmp_path):
    good("export", run, tmp_path / "new" / "m.csv")
    good("partition", "--clients", 3, "--save", tmp_path / "newer" / "f.json")
    result = call("partition", "--clients", 3, "--save", run / "experiment.yaml" / "f.json")
    assert (result.exit_code, "a file exists where a directory is needed" in result.stderr) == (2, True)


def test_export(run, tmp_path):
    for name in ("m.safetensors", "m.pt2", "m.csv", "m.md"):
        good("export", run, tmp_path / name)
    good("export", run, tmp_path / "README", "--format", "card")
    assert (tmp_path / "README").read_text() == (tmp_path / "m.md").read_text()
    opened = hf.Run.open(run)
    weights = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(weights[k], v) for k, v in opened.model.state_dict().items())
    digits = hf.load("digits")
    inputs = digits.preprocess(digits.x_test)
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(inputs), opened.model(inputs))
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in rows] == [r["accuracy"] for r in opened.records]
    assert float(rows[-1]["accuracy_7"]) == opened.class_accuracy[-1, 7]


def test_report_figure_and_table(run, tmp_path):
    good("report", run, "--out", tmp_path / "r.html")
    assert "<html" in (tmp_path / "r.html").read_text()
    good("figure", "accuracy", run, "--out", tmp_path / "f.svg")
    assert "<svg" in (tmp_path / "f.svg").read_text()
    assert "fedntd" in good("table", run, "--format", "latex")


# Data -----------------------------------------------------------------------------------------------------


def test_partition_prints_saves_and_is_used_again(tmp_path):
    chosen = ["--clients", 6, "--partition", "shards:2", "--seed", 4]
    saved = tmp_path / "federation.json"
    output = json.loads(good("partition", *chosen, "--save", saved, "--draw", tmp_path / "who.png", "--json"))
    federation = hf.federate(hf.load("digits"), hf.Shards(2), clients=6, seed=4)
    assert output["hash"] == federation.hash
    assert output["label_counts"] == federation.label_counts().tolist()
    assert (tmp_path / "who.png").stat().st_size > 1000
    assert federation.hash in good("partition", *chosen)
    again = json.loads(
        good(
            "run",
            "--federation",
            saved,
            "--model",
            "linear",
            "--rounds",
            1,
            "--out",
            tmp_path / "run",
            "--json",
        )
    )
    assert again["hash"] == federation.hash
    measured = json.loads(good("diagnose", saved, "--json"))["measures"]
    assert measured["samples"] == federation.label_counts().sum()


def test_stream_prints_every_stage():
    output = json.loads(good("stream", "--clients", 3, "--stream", 2, "--partition", "iid", "--json"))
    assert output["stages"] == 2
    assert np.sum(output["label_counts"]) == 1438
    assert np.shape(output["label_counts"]) == (2, 3, 10)


def test_diagnose_own_counts(tmp_path):
    (tmp_path / "counts.csv").write_text("30,0\n0,10\n")
    output = json.loads(good("diagnose", tmp_path / "counts.csv", "--json"))["measures"]
    assert output["imbalance_ratio"] == 3
    assert output["missing_classes"] == 1
    assert "Most similar" in good("diagnose", tmp_path / "counts.csv")


@pytest.mark.parametrize(
    "text",
    [
        "5,6,7\n8,9,1",
        "0,1,2\n5,6,7\n8,9,1",
        ",0,1,2\n0,5,6,7\n1,8,9,1",
        "\ufeff,cat,dog,eel\n0,5,6,7\n1,8,9,1",
        "site,cat,dog,eel\n101,5,6,7\n207,8,9,1",
        "hospital,cat,dog,eel\n0,5,6,7\n1,8.0,9,1",
        "hospital,0,1,2\nBern,5,6,7\nOslo,8,9,1",
        "client,1,2,3\nBern,5,6,7\nOslo,8,9,1",
        "Bern,5,6,7\nOslo,8,9,1",
    ],
)
def test_diagnose_reads_counts_as_people_and_pandas_write_them(text, tmp_path):
    (tmp_path / "counts.csv").write_text(text, encoding="utf-8")
    output = json.loads(good("diagnose", tmp_path / "counts.csv", "--json"))["measures"]
    assert (output["clients"], output["classes"], output["samples"]) == (2, 3, 36)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("5,-6\n8,9", "'-6' in line 1 is not a number of samples"),
        ("cat,dog\n5,6.5", "'6.5' in line 2"),
        ("cat,dog\n5,6\n\n8,", "'' in line 4"),
        ("cat,dog\n5,6\n8", "line 3 has 1 columns, but the first line has 2"),
        ("cat;dog\n5;6", "its only column contains names; separate columns by commas"),
        ("cat,dog\n", "it contains no numbers"),
    ],
)
def test_counts_that_cannot_be_are_refused(text, sentence, tmp_path):
    (tmp_path / "counts.csv").write_text(text)
    result = call("diagnose", tmp_path / "counts.csv")
    assert result.exit_code == 2
    assert f"counts.csv' contains no label counts: {sentence}" in result.stderr


def test_diagnose_names_the_table_its_methods_come_from(tmp_path):
    named = ["client,cat,dog,eel"] + [f"{k},{'9,9,0' if k % 2 else '0,9,9'}" for k in range(10)]
    (tmp_path / "named.csv").write_text("\n".join(named))
    output = json.loads(good("diagnose", tmp_path / "named.csv", "--json"))
    assert output["measures"]["samples"] == 180
    assert all(found["table"].startswith("results/") for found in output["measured"])
    printed = good("diagnose", tmp_path / "named.csv")
    assert output["measured"][0]["table"] in printed
    assert output["measured"][0]["scores"][0]["method"] in printed


# Reference ------------------------------------------------------------------------------------------------


def test_methods_and_datasets_as_json():
    methods = {m["name"]: m for m in json.loads(good("methods", "--json"))}
    assert {"fedavg", "fedprox", "fedavgm", "scaffold", "fedntd"} <= set(methods)
    beta = next(p for p in methods["fedntd"]["parameters"] if p["name"] == "beta")
    assert beta["default"] == 1.0
    assert "weight of the distillation term" in beta["about"]
    assert json.loads(good("methods", "fedntd", "--json")) == methods["fedntd"]
    datasets = {d["name"]: d for d in json.loads(good("datasets", "--json"))}
    assert datasets["digits"]["found"] == "embedded"
    assert datasets["cifar10"]["train"] == 50_000


def test_datasets_lists_missing_files_and_where_to_put_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = good("datasets")
    assert "cifar100 needs cifar-100-binary.tar.gz: get it from https://www.cs.toronto.edu/" in output
    assert f"and put it in {tmp_path / 'cifar100'}" in output


def test_doctor_names_versions_and_engines():
    output = json.loads(good("doctor", "--json"))
    assert output["versions"]["torch"] == torch.__version__
    assert set(output["engines"]) >= {"sequential", "vectorized", "auto", "precision", "mixed precision"}
    active = "CUDA graphs" if torch.cuda.is_available() else "recorded steps"
    assert output["engines"][active].startswith("active")


# Errors ---------------------------------------------------------------------------------------------------

RUN = ["run", "--clients", "5"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*RUN, "--method", "fedntt"], "did you mean fedntd"),
        ([*RUN, "--method", "fedntd:betta=1"], "did you mean beta"),
        ([*RUN, "--data", "cifar11"], "did you mean cifar10"),
        ([*RUN, "--model", "resnet19"], "did you mean resnet18"),
        ([*RUN, "--partition", "dirichlet:0"], "alpha"),
        ([*RUN, "--partition", "dirichle:1"], "did you mean dirichlet"),
        ([*RUN, "--batch-size", "0"], "batch_size is 0; it must be at least 1"),
        ([*RUN, "--engine", "rays"], "unknown engine 'rays'"),
        ([*RUN, "--set", "method.betta=1", "--method", "fedntd"], "did you mean beta"),
        ([*RUN, "--set", "rounds"], "not of the form key=value"),
        ([*RUN, "--set", "lr.x=1"], "'lr.x' is not a setting"),
        ([*RUN, "--set", "metod.beta=1"], "did you mean method"),
        ([*RUN, "--track", "wandbb"], "did you mean wandb"),
        (["run"], "needs the number of clients"),
        (["run", "--clients", "2000"], "2000"),
        (["run", "nowhere.yaml"], "cannot read the experiment 'nowhere.yaml': No such file or directory"),
        (["run", "--federation", "nowhere.json"], "cannot read the federation"),
        (["resume", "nowhere"], "holds no run"),
        (["show", "nowhere"], "holds no run"),
        (["report", "nowhere"], "is not a directory"),
        (["methods", "fedntt"], "did you mean fedntd"),
        (["methods", "none.py:Mine"], "for the method does not exist"),
        (
            [*RUN, "--method", "none.py:Mine"],
            "for the method does not exist; write the path of a file and a name in it",
        ),
        ([*RUN, "--method", "nowhere.methods:Mine"], "there is no module 'nowhere.methods' to import"),
        ([*RUN, "--method", "fedavg+json:loads"], "json:loads is the function loads; it must be a class"),
        ([*RUN, "--model", "none.py:net"], "for the model does not exist"),
        (
            [*RUN, "--model", "json:loads"],
            "json:loads needs s: besides shape, num_classes, seed, every argument",
        ),
        ([*RUN, "--data", "none.py:load"], "for the data set does not exist"),
        (["compare", "fedavg", "none.py:Mine", "--clients", "5"], "for the method does not exist"),
        (["compare", "fedavg", "fedavg", "--clients", "5"], "named twice"),
        (["compare", "fedavg", "--set", "method.beta=1", "--clients", "5"], "fedavg fedntd:beta=0.5"),
        (["compare", "fedavg", "--method", "fedntd", "--clients", "5"], "'--method fedntd' cannot be given"),
        (
            ["compare", "fedavg", "--target", "50", "--clients", "5"],
            "target is 50.0; it must be above 0, and at most 1 for an accuracy",
        ),
        (["diagnose", "nowhere.csv"], "cannot read 'nowhere.csv'"),
        (["diagnose", "nowhere"], "cannot read 'nowhere'"),
        ([*RUN, "--data", "photos/"], "there is no folder photos, and no data set of that name"),
        ([*RUN, "--skew", "rotation=-10,noise=1"], "feature skew: rotation is -10.0; it must be at least 0"),
        (
            [*RUN, "--partition", "by-writer"],
            "has no group 'writer'; femnist, or mnist with QMNIST's labels, has one",
        ),
        (["ui", ".", "--port", "99999"], "port is 99999; it must be from 1 to 65535"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("holdfast: ")
    assert sentence in lines[0]


def test_bad_data_and_files_are_refused(tmp_path, run):
    x, y = np.ones((20, 3)), np.arange(20) % 2
    x[3, 1] = np.nan
    np.savez(tmp_path / "nan.npz", x_train=x, y_train=y, x_test=np.ones((2, 3)), y_test=[0, 1])
    result = call("run", "--data", tmp_path / "nan.npz", "--clients", 2, "--out", tmp_path / "r")
    assert (result.exit_code, "contains NaN or infinite values in 1 of 20" in result.stderr) == (2, True)
    (tmp_path / "bad.yaml").write_text("clients: 5\nlearning_rate: 0.1\n")
    result = call("run", tmp_path / "bad.yaml")
    assert (result.exit_code, "unknown setting 'learning_rate'" in result.stderr) == (2, True)
    result = call("run", *SMALL, "--out", run)
    assert (result.exit_code, "already holds a run" in result.stderr) == (2, True)
    result = call("export", run, tmp_path / "m.h5")
    assert (result.exit_code, "the path must end in .pt, .safetensors" in result.stderr) == (2, True)
    result = call("export", run, tmp_path / "m.pt", "--format", "tensorflow")
    assert (result.exit_code, "unknown export format 'tensorflow'" in result.stderr) == (2, True)
    assert call("run", "--methd", "fedavg").exit_code == 2


def test_a_file_of_a_run_is_not_the_run(run):
    for command in ("resume", "show"):
        result = call(command, run / "experiment.yaml")
        assert result.exit_code == 2
        assert result.stderr.strip().endswith(
            f"experiment.yaml holds no run: it is a file; name a directory, such as {run}"
        )


def test_a_damaged_federation_file_is_refused(tmp_path):
    good("partition", "--clients", 3, "--save", tmp_path / "f.json")
    content = json.loads((tmp_path / "f.json").read_text())
    content["indices"][5] = "seven"
    (tmp_path / "f.json").write_text(json.dumps(content))
    result = call("run", "--federation", tmp_path / "f.json", "--model", "linear", "--out", tmp_path / "run")
    assert (result.exit_code, "indices[5] is 'seven', not a whole number" in result.stderr) == (2, True)


def test_diagnose_refuses_other_files(tmp_path):
    (tmp_path / "counts.txt").write_text("1,2")
    result = call("diagnose", tmp_path / "counts.txt")
    assert (result.exit_code, "it must be an experiment (.yaml), a federation" in result.stderr) == (2, True)
    x, y = np.ones((20, 3)), np.arange(20) % 2
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    own = ["--data", tmp_path / "mine.npz", "--clients", 2, "--partition", "iid"]
    good("partition", *own, "--save", tmp_path / "f.json")
    result = call("diagnose", tmp_path / "f.json")
    assert (result.exit_code, "data set 'mine', which cannot be loaded by name" in result.stderr) == (2, True)
    lines = [f"data: {tmp_path / 'mine.npz'}", f"federation: {tmp_path / 'f.json'}"]
    (tmp_path / "f.yaml").write_text("\n".join(lines))
    assert json.loads(good("diagnose", tmp_path / "f.yaml", "--json"))["measures"]["samples"] == 20


def test_diagnose_of_a_saved_mixture_finds_its_parts(tmp_path, monkeypatch):
    grey = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    labels = np.arange(40) % 10
    known = {
        name: hf.Dataset.from_arrays(grey, labels, grey, labels, name=name) for name in ("mnist", "usps")
    }
    monkeypatch.setattr("holdfast.data.sources.load", lambda name, **_: known[name])
    mixture = ["--data", "mixed-digits:mnist,usps", "--partition", "by-domain", "--clients", 4, "--seed", 3]
    good("partition", *mixture, "--save", tmp_path / "mixture.json")
    output = json.loads(good("diagnose", tmp_path / "mixture.json", "--json"))["measures"]
    assert (output["clients"], output["samples"]) == (4, 80)


def test_a_damaged_run_is_named_and_left_out(run, tmp_path):
    for name in ("whole", "unreadable", "broken"):
        shutil.copytree(run, tmp_path / "runs" / name)
    (tmp_path / "runs/unreadable/experiment.yaml").write_text("a: [")
    metrics = tmp_path / "runs/broken/metrics.jsonl"
    first, _, last = metrics.read_text().splitlines()
    metrics.write_text(f"{first}\nbroken\n{last}\n")
    result = call("table", tmp_path / "runs")
    assert (result.exit_code, result.stdout.count("\n| fed")) == (0, 1)
    output = sorted(result.stderr.splitlines())
    assert len(output) == 2
    assert "broken is left out: " in output[0]
    assert "metrics.jsonl is damaged: line 2" in output[0]
    assert "unreadable/experiment.yaml is damaged: it is not YAML" in output[1]
    for name, sentence in (("broken", "line 2"), ("unreadable", "experiment.yaml is damaged")):
        result = call("table", tmp_path / "runs" / name)
        assert (result.exit_code, result.stdout, sentence in result.stderr) == (2, "", True)
    shutil.rmtree(tmp_path / "runs" / "whole")
    result = call("report", tmp_path / "runs")
    assert (result.exit_code, "is damaged" in result.stderr) == (2, True)


def test_help_names_every_figure():
    from holdfast.report.figures import FIGURES

    assert cli_figures.split(", ") == list(FIGURES)


def test_a_missing_optional_package_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("figure", "accuracy", run, "--out", tmp_path / "f.pdf")
    assert result.exit_code == 2
    assert result.stderr == "holdfast: this needs matplotlib: pip install 'holdfast-fl[report]'\n"


def test_the_commands_that_add_optional_parts_name_what_the_project_declares():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra in EXTRAS:
        assert install(extra) == f"pip install '{project['name']}[{extra}]'"
        assert extra in project["optional-dependencies"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("command", [["methods"], ["methods", "fedntd"], ["doctor", "--json"]])
def test_output_that_cannot_be_written_is_one_sentence(command):
    with open("/dev/full", "w") as full:
        result = subprocess.run([*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (2, "holdfast: the output: No space left on device\n")


def test_a_closed_pipe_is_no_error():
    with subprocess.Popen([*PROGRAM, "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b""


def test_an_error_leaves_the_program_without_a_traceback():
    result = subprocess.run([*PROGRAM, "run", "--method", "fedntt"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("holdfast: unknown method 'fedntt'; did you mean fedntd")
    assert result.stderr.count("\n") == 1


def test_data_without_test_samples(tmp_path):
    rows = "\n".join(f"{i % 7},{i % 3},{i % 2}" for i in range(60))
    (tmp_path / "u.csv").write_text(f"a,b,label\n{rows}\n")
    data = ["--data", f"{tmp_path / 'u.csv'}:target=label,test=0", "--clients", "3", "--model", "linear"]
    options = ["--rounds", "2", "--method", "fedavg", "--validation", "0.2", "--out", str(tmp_path / "run")]
    shown = good("run", *data, *options)
    assert "validation accuracy" in shown
    summary = json.loads(good("resume", str(tmp_path / "run"), "--rounds", "3", "--json"))
    assert summary["rounds"] == 3
    assert 0 <= summary["validation"]["accuracy"] <= 1
