"""Results that version 0.1.0 stored, under the names that settings had then."""

import json

from paper_entries import entry

from holdfast.papers.cells import hash_of, plan
from holdfast.papers.published import load_tables
from holdfast.papers.results import Results

SETTINGS = {
    "preprocess": "fedntd", "clients": 100, "sample": 10, "rounds": 200, "epochs": 5, "batch_size": 50, "lr": 0.01,
    "lr_decay": 0.99, "momentum": 0.9, "weight_decay": 1e-05, "partition_seed": 19940817, "evaluate_locals": True,
    "probe": 200, "local_test": 2000, "data": "cifar10", "model": "ntd-cifar", "partition": "dirichlet:0.05",
    "method": "fedavg",
}  # fmt: skip
HASH = "dd2373c6356834ac"


def stored(tmp_path):
    """The cell of FedNTD's Table 2 and a directory with its result as version 0.1.0 wrote it."""
    (cell,) = plan(load_tables()["fedntd/table2"], ["cifar10:alpha=0.05"], ["fedavg"])
    former = entry(cell, [0.1, 0.3]) | {"settings": SETTINGS, "hash": HASH, "engine": "lanes"}
    path = tmp_path / "fedntd" / "table2.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"table": "fedntd/table2", "cells": [former]}))
    return cell, path


def test_the_former_hash_is_that_of_the_former_settings():
    assert hash_of(SETTINGS, 2022) == HASH


def test_a_result_under_former_names_is_found(tmp_path):
    cell, _ = stored(tmp_path)
    assert cell.hash != HASH
    found = Results(tmp_path).get(cell)
    assert found == entry(cell, [0.1, 0.3])
    assert found["settings"] == cell.settings
    assert found["engine"] == "vectorized"


def test_a_further_result_rewrites_the_file_under_current_names(tmp_path):
    cell, path = stored(tmp_path)
    (other,) = plan(load_tables()["fedntd/table2"], ["cifar10:alpha=0.05"], ["fedntd"])
    Results(tmp_path).add(other, entry(other, [0.2, 0.4]))
    written = json.loads(path.read_text())["cells"]
    assert written == [entry(cell, [0.1, 0.3]), entry(other, [0.2, 0.4])]


def test_running_a_cell_again_replaces_its_former_result(tmp_path):
    cell, path = stored(tmp_path)
    Results(tmp_path).add(cell, entry(cell, [0.5]))
    assert json.loads(path.read_text())["cells"] == [entry(cell, [0.5])]
