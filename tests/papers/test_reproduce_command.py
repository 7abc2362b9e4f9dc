import json

import pytest
from paper_entries import entry
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.papers.cells import plan
from holdfast.papers.published import load_tables
from holdfast.papers.results import Results


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def reproduce(*arguments):
    done = CliRunner().invoke(app, ["reproduce", *arguments])
    return done.exit_code, done.output


def test_the_list_says_what_each_table_needs_and_what_was_run(tmp_path):
    (cell,) = plan(load_tables()["fedka/table1"], ["cifar10"], ["fedka"])
    Results(tmp_path / "results").add(cell, entry(cell, [0.5]))
    code, output = reproduce("--json")
    assert code == 0
    tables = {row["table"]: row for row in json.loads(output)["tables"]}
    assert len([key for key in tables if not load_tables()[key].is_search]) == 26  # one counted twice
    assert tables["fedka/table1"]["data"] == {"cifar10": False, "cifar100": False, "tiny-imagenet": False}
    assert tables["fedka/table1"]["done"] == 1
    assert tables["fedka/table7"]["done"] == 1  # the same run
    assert all(row["gpu_minutes"] > 0 for row in tables.values())
    code, output = reproduce()
    assert code == 0
    assert "fedka/table1" in output
    assert "(tiny-imagenet)" in output


def test_missing_data_makes_cells_that_need_data_and_no_error():
    code, output = reproduce("fedntd/table1", "--columns", "cifar10:s=2", "--methods", "fedavg,fedntd")
    assert code == 0
    assert output.count("needs data: cifar10") == 2
    assert "52.61" in output
    assert "table1-lda" not in output  # it has no such column


def test_ours_are_printed_beside_theirs_with_the_finding(tmp_path):
    table = load_tables()["fedntd/table1-sharding"]
    for cell in plan(table, ["cifar10:s=2"], ["fedavg", "fedntd"]):
        Results(tmp_path / "results").add(cell, entry(cell, [0.2, 0.42 if cell.row == "fedavg" else 0.54]))
    chosen = ("fedntd/table1-sharding", "--columns", "cifar10:s=2", "--methods", "fedavg,fedntd")
    code, output = reproduce(*chosen, "--status")
    assert code == 0
    assert "54.00" in output
    assert "+1.39" in output
    assert "12.00 ahead (published +12.47), 1.39 above the published level: holds" in output
    code, output = reproduce(*chosen, "--status", "--json")
    (told,) = json.loads(output)
    assert told["findings"][0]["holds"] is True
    assert told["lines"][0]["values"][0]["published"] == 40.14


def test_cells_that_are_no_targets_carry_their_reason():
    code, output = reproduce("fedka/table8", "--columns", "cifar10:alpha=0.5", "--status")
    assert code == 0
    assert "not a target [1]" in output
    assert "[1] digit for digit the column epoch 20 of Table 4: a copy error" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fedntd/tabel1",), "unknown table 'fedntd/tabel1'"),
        (("fedntd/table2", "--columns", "cifar10:s=3"), "unknown column 'cifar10:s=3'"),
        (("fedntd/table2", "--methods", "fedmagic"), "unknown method 'fedmagic'"),
        (("fedntd/table2", "--seeds", "0"), "a cell needs at least 1 seed, not 0"),
        (("fedntd/table2", "--workers", "0"), "a sweep needs at least 1 worker, not 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence):
    code, output = reproduce(*arguments)
    assert code == 2
    assert output.startswith(f"holdfast: {sentence}")
    assert output.count("\n") == 1


def test_the_page_is_written(tmp_path):
    assert reproduce("--page", "docs/results.md")[0] == 0
    assert (tmp_path / "docs" / "results.md").read_text().startswith("# Results")
