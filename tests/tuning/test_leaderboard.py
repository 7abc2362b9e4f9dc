"""The leaderboard: its definition, what it runs, and how methods stand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.core.errors import HoldfastError
from holdfast.methods.registry import METHODS, parse_method
from holdfast.sweeps.workers import run_jobs
from holdfast.tuning import leaderboard
from holdfast.tuning.jobs import TrainingWork
from holdfast.tuning.leaderboard import Protocol, board, left_out, load_protocols, standings
from holdfast.tuning.leaderboard_page import write_leaderboard
from holdfast.tuning.results import StoredRuns
from holdfast.tuning.space import parse_space

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "data": "digits", "model": "linear", "clients": 4, "clients_per_round": 2, "rounds": 4, "partition": "iid",
    "partition_seed": 0, "evaluate_locals": False,
}  # fmt: skip
SMALL = Protocol(
    key="small",
    title="Small",
    about="For tests.",
    methods={"fedavg": {}, "fedprox": {}},
    spaces={"fedavg": ["lr=0.03..0.3:log"], "fedprox": ["lr=0.03..0.3:log", "method.mu=0.01..1:log"]},
    budget=3,
    seeds=2,
    settings=SETTINGS,
    published={},
)


def run(protocol: Protocol, folder: Path) -> StoredRuns:
    work = TrainingWork(board(protocol), folder / "results", folder / "work", "cpu")
    assert run_jobs(work, lambda line: None)
    return StoredRuns(folder / "results")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StoredRuns]:
    folder = tmp_path_factory.mktemp("board")
    return folder, run(SMALL, folder)


@pytest.mark.parametrize("protocol", load_protocols().values(), ids=lambda p: p.key)
def test_every_protocol_can_be_read(protocol: Protocol) -> None:
    for method in protocol.methods:
        experiment = protocol.experiment(method)
        assert experiment.make_method() == parse_method(method)
    for spaces in protocol.spaces.values():
        assert parse_space(spaces)
    assert set(protocol.published) <= set(protocol.methods)
    if protocol.budget:
        plan = board(protocol, ["fedavg", "fedprox"] if "fedprox" in protocol.methods else ["fedavg"])
        assert all(len(search.trials) == protocol.budget for search in plan.searches.values())


def test_every_method_is_compared_or_left_out_with_a_reason() -> None:
    for key in ("cifar10-shards", "cifar10-dirichlet", "cifar100-shards"):
        compared = {method.partition(":")[0] for method in load_protocols()[key].methods}
        assert compared | left_out().keys() == METHODS.keys()
        assert not compared & left_out().keys()


def test_final_runs_have_the_best_settings_other_seeds_and_the_test_set(
    small: tuple[Path, StoredRuns],
) -> None:
    _, results = small
    for method in SMALL.methods:
        trials = [run for run in results.of("trials") if run["search"] == method]
        whole = [run for run in trials if run["rounds"] == 4]
        assert len(trials) == 4  # three to round 2, the best of them to round 4
        final = [run for run in results.of("final") if run["method"] == method]
        assert [run["seed"] for run in final] == [1, 2]
        assert all(run["changes"] == whole[0]["changes"] and run["validation"] == 0 for run in final)
        assert all(run["validation"] == 0.1 and run["seed"] == 0 for run in trials)


def test_standings_are_the_numbers_of_the_final_runs(small: tuple[Path, StoredRuns]) -> None:
    _, results = small
    rows = {row.method: row for row in standings(SMALL, results)}
    target = fmean(run["curve"][-1] for run in results.of("final") if run["method"] == "fedavg")
    for method, row in rows.items():
        final = [run for run in results.of("final") if run["method"] == method]
        assert row.last == [100 * run["curve"][-1] for run in final]
        assert row.averaged == row.last  # of four rounds the last quarter is one
        assert row.megabytes == [(run["bytes_up"] + run["bytes_down"]) / 1e6 for run in final]
        for run_, reached in zip(final, row.reached, strict=True):
            above = np.flatnonzero(np.array(run_["curve"]) >= target)
            assert reached == (above[0] + 1 if len(above) else math.inf)
        assert row.state == ""


def test_repeated_it_runs_nothing(small: tuple[Path, StoredRuns]) -> None:
    folder, results = small
    assert board(SMALL).jobs(results) == []
    before = (folder / "results" / "final.json").read_bytes()
    run(SMALL, folder)
    assert (folder / "results" / "final.json").read_bytes() == before


def test_a_diverged_method_is_named(tmp_path: Path) -> None:
    wild = replace(
        SMALL,
        methods={"fedavg": {"lr": 1e30, "max_update_norm": 100.0}},
        spaces={"fedavg": ["lr=1e30..1e32:log"]},
        budget=1,
        seeds=1,
    )
    (row,) = standings(wild, run(wild, tmp_path))
    assert (row.state, row.averaged) == ("diverged", [])


def test_given_settings_are_run_without_a_search(tmp_path: Path) -> None:
    given = replace(SMALL, methods={"fedavg": {}}, spaces={}, budget=0, seeds=1, published={"fedavg": 90.0})
    results = run(given, tmp_path)
    assert not results.of("trials")
    (row,) = standings(given, results)
    assert (row.changes, row.published, len(row.last)) == ({}, 90.0, 1)


def test_the_command_runs_prints_and_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "load_protocols", lambda: {"small": SMALL})
    monkeypatch.setattr("holdfast.tuning.leaderboard_page.load_protocols", lambda: {"small": SMALL})
    monkeypatch.chdir(tmp_path)

    def called(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["leaderboard", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    assert "0 of 2" in called()
    output = called("small", "--methods", "fedavg", "--page", "docs/leaderboard.md", "--device", "cpu")
    assert "mean of last ten %" in output
    assert "1 of 2" in called()
    page = Path("docs/leaderboard.md").read_text()
    assert "| `fedavg` |" in page
    assert "Not run: `fedprox`." in page
    (described,) = json.loads(called("small", "--status", "--json"))
    assert [row["method"] for row in described["methods"]] == ["fedavg", "fedprox"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(HoldfastError, match="unknown protocol 'digit'"):
        leaderboard.select_protocols("digit")
    with pytest.raises(HoldfastError, match="unknown method of small 'fedntd'"):
        board(SMALL, ["fedntd"])


def test_the_page_of_the_documentation_is_that_of_the_stored_results(tmp_path: Path) -> None:
    write_leaderboard(ROOT / "results" / "leaderboard", tmp_path / "leaderboard.md")
    assert (tmp_path / "leaderboard.md").read_text() == (ROOT / "docs" / "leaderboard.md").read_text(), (
        "docs/leaderboard.md is not what `holdfast leaderboard --page docs/leaderboard.md` writes"
    )
