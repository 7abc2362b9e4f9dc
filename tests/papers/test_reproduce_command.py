import json

import pytest
from paper_entries import entry
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.papers.cells import Cell, plan
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


def test_the_list_shows_the_data_and_the_runs_of_each_table(tmp_path):
    (cell,) = plan(load_tables()["fedka/table1"], ["cifar10"], ["fedka"])
    Results(tmp_path / "results").add(cell, entry(cell, [0.5]))
    code, output = reproduce("--json")
    assert code == 0
    tables = {row["table"]: row for row in json.loads(output)["tables"]}
    # 28 of the papers, one counted twice, and 8 of the recipe
    assert len([key for key in tables if load_tables()[key].published]) == 28 + 8
    assert tables["fedka/fig3"]["runs"] == 2
    assert tables["fedka/table1"]["data"] == {"cifar10": False, "cifar100": False, "tiny-imagenet": False}
    assert tables["fedka/table1"]["done"] == 1
    assert tables["fedka/table7"]["done"] == 1  # the same run
    assert all(row["gpu_minutes"] > 0 for row in tables.values())
    code, output = reproduce()
    assert code == 0
    assert "fedka/table1" in output
    assert "(tiny-imagenet)" in output


def test_a_figure_is_printed_with_what_the_papers_shows_and_the_state_of_its_runs(tmp_path):
    code, output = reproduce("fedka/fig6", "--status")
    assert code == 0
    assert "In the paper: the forgetting degree of a non-dominant class" in output
    assert output.count("needs data: cifar10") == 2
    assert "difference" not in output  # there are no published numbers


def test_missing_data_makes_cells_that_need_data_and_no_error():
    code, output = reproduce("fedntd/table1", "--columns", "cifar10:s=2", "--methods", "fedavg,fedntd")
    assert code == 0
    assert output.count("needs data: cifar10") == 2
    assert "52.61" in output
    assert "table1-lda" not in output  # it has no such column
    assert "docs/data.md lists the files" in output


def test_published_numbers_and_ours_are_printed_with_the_finding(tmp_path):
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
    (shown,) = json.loads(output)
    assert shown["findings"][0]["holds"] is True
    assert shown["lines"][0]["values"][0]["published"] == 40.14


def test_excluded_cells_are_printed_with_the_reason():
    code, output = reproduce("fedka/table8", "--columns", "cifar10:alpha=0.5", "--status")
    assert code == 0
    assert "not a target [1]" in output
    assert "[1] digit for digit the column epoch 20 of Table 4: a copy error" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fedntd/tabel1",), "unknown table 'fedntd/tabel1'"),
        (("fedntd/fig8",), "unknown figure 'fedntd/fig8'"),
        (("fedntd/table2", "--columns", "cifar10:s=3"), "unknown column 'cifar10:s=3'"),
        (("fedntd/table2", "--methods", "fedmagic"), "unknown method 'fedmagic'"),
        (("fedntd/table2", "--seeds", "0"), "a cell needs at least 1 seed, not 0"),
        (("fedntd/table2", "--workers", "0"), "a sweep needs at least 1 worker, not 0"),
        (("fedntd/table2", "--columns", ","), "no column is named"),
        (("fedntd/table2", "--methods", ""), "no method is named"),
        (
            ("fedntd", "--columns", "cifar10:iid", "--methods", "fedcurv"),
            "no table of fedntd has these methods",
        ),
        (("fedntd/table2", "--time-limit", "-5"), "--time-limit is -5; it must be more than 0 seconds"),
        (("fedntd/table2", "--time-limit", "nan"), "--time-limit is nan"),
        (("--columns", "cifar10"), "--columns is given without a table"),
        (("fedntd", "--page", "page.md"), "--page applies to all tables; leave out TABLE"),
        (("--page", "."), ". is a folder; pass the name of a file"),
        (
            ("fedntd/table2", "--status", "--results", "a-file"),
            "a-file is a file; results are kept in a folder",
        ),
        (("--results", "a-file"), "a-file is a file; results are kept in a folder"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, tmp_path):
    (tmp_path / "a-file").write_text("")
    code, output = reproduce(*arguments)
    assert code == 2
    assert output.startswith(f"holdfast: {sentence}")
    assert output.count("\n") == 1


def test_the_page_is_written(tmp_path):
    assert reproduce("--page", "docs/results.md")[0] == 0
    assert (tmp_path / "docs" / "results.md").read_text().startswith("# Results")


def store(tmp_path, table, columns, accuracy, seeds=1):
    for cell in plan(load_tables()[table], columns, list(accuracy), seeds):
        Results(tmp_path / "results").add(cell, entry(cell, accuracy[cell.row]))


def test_a_table_named_in_full_is_that_one_alone():
    for name, tables in (("flashback/table1", 1), ("flashback/table1-levels", 1), ("fedntd/table1", 2)):
        assert len(json.loads(reproduce(name, "--status", "--json")[1])) == tables


def test_targets_do_not_depend_on_which_methods_are_shown(tmp_path):
    accuracy = {"fedavg": [0.3, 0.4, 0.5], "flashback": [0.5, 0.55, 0.6], "fedntd": [0.3, 0.4, 0.9]}
    store(tmp_path, "flashback/table1", ["cifar10:beta=0.1"], accuracy)
    chosen = ("flashback/table1", "--columns", "cifar10:beta=0.1", "--status", "--json")
    (whole,), (part,) = (
        json.loads(reproduce(*chosen, *more)[1]) for more in ((), ("--methods", "fedavg,flashback"))
    )
    assert whole["targets"] == part["targets"] == {"cifar10:beta=0.1": pytest.approx(0.95 * 0.9)}
    shown = {line["method"]: line for line in whole["lines"]}
    assert all(line == shown[line["method"]] for line in part["lines"])


def test_all_seeds_that_were_run_are_shown_or_as_many_as_asked_for(tmp_path):
    store(tmp_path, "fedntd/table2", ["cifar10:s=2"], {"fedavg": [0.5]}, seeds=3)
    chosen = ("fedntd/table2", "--columns", "cifar10:s=2", "--methods", "fedavg", "--status", "--json")
    (shown,), (one,) = (json.loads(reproduce(*chosen, *more)[1]) for more in ((), ("--seeds", "1")))
    assert (shown["lines"][0]["seeds"], shown["lines"][0]["state"]) == (3, "3 run")
    assert (one["lines"][0]["seeds"], one["lines"][0]["state"]) == (1, "run")


def test_a_column_about_one_seed_shows_that_one(tmp_path):
    store(tmp_path, "fedfa/table2", ["cifar10:c=2"], {"fedavg": [0.5]}, seeds=3)
    code, output = reproduce("fedfa/notebooks", "--status", "--json")
    line = next(one for one in json.loads(output)[0]["lines"] if one["method"] == "fedavg")
    assert (code, line["seeds"]) == (0, 1)


def test_a_candidate_of_a_search_is_named_with_its_commas():
    wanted = "fedka:discard=dominant,beta=0.5,gamma=0.05,mu=10"
    code, output = reproduce("fedka/search", "--methods", f"{wanted},fedprox:mu=1", "--status", "--json")
    assert code == 0
    assert [line["method"] for line in json.loads(output)[0]["lines"]] == [wanted, "fedprox:mu=1"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"cells": 3}', b'{"cells": [3]}', b'{"cells": [{"column": "a"}]}', b'{"cells": {"a": 1}}',
        b'{"cells": [{"hash": "0"}]}', b"\xff\xfe\x00", b"[]", b"",
    ],
)  # fmt: skip
def test_damaged_results_are_one_sentence(content, tmp_path):
    (tmp_path / "results" / "fedfa").mkdir(parents=True)
    (tmp_path / "results" / "fedfa" / "f2.json").write_bytes(content)
    code, output = reproduce("fedfa/f2", "--status")
    assert code == 2
    assert output.startswith("holdfast: results/fedfa/f2.json is damaged")
    assert output.count("\n") == 1


def make_digits_a_table(monkeypatch, method="fedavg"):
    """The only cell of every table is a run of a second on data that is always there."""
    settings = {
        "data": "digits", "partition": "iid", "clients": 2, "model": "mlp:8", "method": method, "rounds": 2,
    }  # fmt: skip
    cell = Cell("fedntd/table2", "cifar10:iid", "fedavg", 0, settings)
    monkeypatch.setattr("holdfast.papers.cells.plan", lambda *chosen, **more: [cell])
    monkeypatch.setattr("holdfast.papers.results.plan", lambda *chosen, **more: [cell])


def test_progress_is_not_part_of_the_json(monkeypatch):
    make_digits_a_table(monkeypatch)
    done = CliRunner().invoke(app, ["reproduce", "fedntd/table2", "--device", "cpu", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)[0]["lines"][0]["seeds"] == 1
    assert "fedntd/table2 cifar10:iid fedavg seed 0" in done.stderr


def test_a_cell_that_cannot_be_run_shows_in_the_exit_status(monkeypatch):
    make_digits_a_table(monkeypatch, "fedntd:beta=-1")
    done = CliRunner().invoke(app, ["reproduce", "fedntd/table2", "--device", "cpu"])
    assert done.exit_code == 1
    assert "beta is -1" in done.stderr
    assert "not run" in done.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--device", "tpu", "device is 'tpu'"),
        ("--work", "a-file", "cannot write a-file/leases: a file exists"),
        ("--results", "a-file", "a-file is a file"),
        ("--results", "a-file/below", "cannot write a-file/below: a file exists"),
    ],
)
def test_what_would_stop_every_cell_is_reported_before_the_first(
    option, value, sentence, workers, monkeypatch, tmp_path
):
    make_digits_a_table(monkeypatch)
    (tmp_path / "a-file").write_text("")
    code, output = reproduce("fedntd/table2", "--workers", workers, option, value)
    assert code == 2
    assert output.startswith(f"holdfast: {sentence}")
    assert not list(tmp_path.glob("**/metrics.jsonl"))


def test_numbers_that_no_run_measures_are_printed_with_the_reason(tmp_path):
    store(tmp_path, "fedntd/table2", ["cifar10:s=2"], {"fedntd": [0.5]})
    code, output = reproduce("fedntd/table2", "--status", "--columns", "cifar10:s=2", "--methods", "fedntd")
    assert code == 0
    assert output.count("not measured") == 2
    assert output.count("Not measured: the released network does not have the second layer") == 1
