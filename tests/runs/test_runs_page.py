"""The page of the run directory names what a record holds, and nothing else."""

import re
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.training.export import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Contents of a record")[1].split("\n## ")[0]
BY_ROUND, BY_CLIENT = (
    {
        key
        for cell in re.findall(r"^\| (`.*?) \|", part, flags=re.MULTILINE)
        for key in re.findall(r"`(\w+)`", cell)
    }
    for part in SECTION.split("With `evaluate_locals`, the record also")
)


def records(federation, **settings):
    settings = {"rounds": 2, "clients_per_round": 3} | settings
    return hf.train("fedavg", "linear", federation, **settings).records


def test_every_key_of_a_record_is_on_the_page():
    data = hf.load("digits")
    skewed = hf.federate(data, hf.IID(), clients=4, skew=hf.FeatureSkew(noise=0.1, groups=2))
    staged = hf.stream(data, hf.IID(), clients=4, tasks_per_client=2)
    plain = hf.federate(data, hf.IID(), clients=4)
    found = {
        key
        for record in (
            *records(skewed, probe_every=1),
            *records(staged),
            *records(plain, validation=0.1, patience=1, rounds=3, lr=1e-9),  # nothing improves
            *records(plain, attack="backdoor:0.3", robust="median"),
            *records(plain, secure="secagg+"),
            *records(plain, dp="epsilon=8,delta=0.01"),
            *records(plain, dp_samples="epsilon=8,delta=0.001"),
        )
        for key in record
    }
    assert found == BY_ROUND | BY_CLIENT


def test_values_by_client_have_an_entry_for_each():
    for record in records(hf.federate(hf.load("digits"), hf.IID(), clients=4)):
        told = {key: record[key] for key in BY_CLIENT if key in record and isinstance(record[key], list)}
        told |= {key: values for key, values in record["locals"].items() if not key.startswith("global")}
        assert {len(values) for values in told.values()} == {len(record["participants"])} == {3}
        assert told.keys() >= {"local_forgetting", "local_in", "class_accuracy"}
        assert [len(record["locals"][key]) for key in ("global_before", "global_after")] == [10, 10]


def test_the_lines_in_python_run(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    block = PAGE.split("## A run in Python")[1].split("```")[1].removeprefix("python\n")
    names = {}
    exec(block, names)
    assert names["run"].predict_proba(names["data"].x_test[:5]).shape == (5, 10)
    assert (tmp_path / "report.html").exists()
    assert hf.Run.open("runs/ditto").accuracy == names["run"].accuracy


def test_the_page_has_every_export_format():
    rows = re.findall(r"^\| `(\.\w+)` \| `([\w.]+)` \|", PAGE, flags=re.MULTILINE)
    assert dict(map(reversed, rows)) == {name: ending for name, (ending, _) in FORMATS.items()}
