"""Recommendations: which methods are tried, how they are judged, and what is said of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.errors import HoldfastError
from holdfast.data.validation import hold_out
from holdfast.methods import parse_method
from holdfast.papers.rankings import load_rankings
from holdfast.tuning.candidates import BASELINE, RECIPE, Candidate, candidates
from holdfast.tuning.recommend import Recommendation, Trials, judge, recommend
from holdfast.tuning.results import StoredRuns

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")


def federation(partition: str = "dirichlet:0.3") -> hf.Federation:
    rng = np.random.default_rng(0)
    y = np.arange(300) % 5
    x = (rng.normal(size=(300, 6)) + 2 * np.eye(5, 6)[y]).astype(np.float32)
    return hf.federate(hf.Dataset.from_arrays(x, y), partition, clients=4, seed=1)


def judged(tmp_path: Path, values: dict[str, list[float | None]], less: bool = False) -> Recommendation:
    """The recommendation from these values by method and seed; None for a run that diverged."""
    trials = Trials(hf.Experiment(rounds=4), list(values), range(len(next(iter(values.values())))))
    results = StoredRuns(tmp_path)
    for method, of_seeds in values.items():
        for seed, value in zip(trials.seeds, of_seeds, strict=True):
            entry: dict[str, Any] = {"hash": trials.job(method, seed).hash, "rounds": 4, "seconds": 1.0}
            entry |= {"measure": "mae" if less else "accuracy", "less_is_better": less}
            entry |= {"bytes_up": 1_000_000, "bytes_down": 2_000_000}
            failed = {"failed": "round 1: no usable update"}
            entry |= failed if value is None else {"tested": [4], "curve": [value]}
            results.add("runs", entry)
    return judge(trials, [Candidate(method, "made up") for method in values], results)


def test_the_best_mean_is_recommended_and_the_others_are_tested_against_it(tmp_path: Path) -> None:
    one, two, far = [0.70, 0.72, 0.71, 0.74], [0.69, 0.73, 0.70, 0.72], [0.50, 0.53, 0.51, 0.52]
    found = judged(tmp_path, {"fedavg": list(two), "fedprox": list(far), "fedntd": list(one)})
    assert [row.method for row in found.table] == ["fedntd", "fedavg", "fedprox"]
    p = []
    for other in (two, far):  # by the definition, with a share of 0.1 held out anew for each seed
        d = np.array(one) - other
        t = d.mean() / np.sqrt((1 / 4 + 0.1 / 0.9) * d.var(ddof=1))
        p.append(2 * stats.t.sf(abs(t), 3))
    assert p[1] < p[0]
    assert found.table[1].p_value == pytest.approx(max(p[0], 2 * p[1]))
    assert found.table[2].p_value == pytest.approx(2 * p[1])
    assert found.table[1].difference == pytest.approx(np.mean(one) - np.mean(two))
    assert found.alike == ["fedavg"]
    assert found.sentence == (
        "Take fedntd, which is ahead on average, but over 4 seeds is not distinguishable from fedavg "
        f"(p = {p[0]:.2g}); it is ahead of fedprox by more than chance. fedavg is the simplest and cheapest of these. "
        "More seeds or rounds may decide."
    )
    assert found.table[0].megabytes == [3.0] * 4


def test_a_clear_case_is_called_clear(tmp_path: Path) -> None:
    found = judged(tmp_path, {"fedavg": [0.5, 0.51, 0.5, 0.52], "fedntd": [0.7, 0.72, 0.71, 0.71]})
    assert found.alike == []
    assert found.sentence.startswith(
        "Take fedntd: it is ahead of fedavg over 4 seeds, by more than chance (p < 0.00"
    )


def test_one_seed_allows_no_test(tmp_path: Path) -> None:
    found = judged(tmp_path, {"fedavg": [0.5], "fedntd": [0.9]})
    assert found.sentence == (
        "Take fedntd, which is ahead with one seed; whether by more than chance, only more seeds can show."
    )
    assert found.table[1].p_value is None


def test_diverged_methods_are_last_and_less_may_be_better(tmp_path: Path) -> None:
    found = judged(tmp_path, {"fedavg": [3.0, 3.1], "fedprox": [None, 1.0], "fedntd": [2.0, 2.1]}, less=True)
    assert [row.method for row in found.table] == ["fedntd", "fedavg", "fedprox"]
    assert found.table[1].difference == pytest.approx(1.0)
    assert math.isnan(found.table[2].values[0])
    with pytest.raises(HoldfastError, match="training diverged with every method"):
        judged(tmp_path / "all", {"fedavg": [None], "fedntd": [None]})


def test_candidates_are_the_recipe_the_baseline_and_the_best_of_the_nearest_ranking() -> None:
    parse_method(RECIPE)
    chosen, left_out = candidates(hf.Experiment(model="linear", rounds=3), federation())
    methods = [candidate.method for candidate in chosen]
    assert methods[:2] == [RECIPE, BASELINE]
    assert len(methods) == len({method.partition(":")[0] for method in methods}) == 5
    table = chosen[2].reason.partition(" in ")[2].rpartition(", at distance")[0]
    ranked = [
        s.method for one in load_rankings() if one.table == table for s in one.scores if s.method != BASELINE
    ]
    possible = [method for method in ranked if not any(method in sentence for sentence in left_out)]
    assert methods[2] == possible[0]


def test_methods_that_need_classes_are_left_out_where_there_are_none() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    made = hf.Dataset.from_arrays(x, x.sum(1), task="regression")
    chosen, left_out = candidates(
        hf.Experiment(model="linear", rounds=3), hf.federate(made, "iid", clients=3)
    )
    assert BASELINE in [candidate.method for candidate in chosen]
    assert RECIPE not in [candidate.method for candidate in chosen]
    assert left_out[0].startswith(f"{RECIPE} is left out: ")


def test_runs_differ_in_their_seed_and_validation_samples_only(tmp_path: Path) -> None:
    lines: list[str] = []
    given = {"rounds": 4, "seeds": 2, "engine": "sequential", "validation": 0.2, "out": tmp_path}
    found = recommend("linear", federation(), log=lines.append, **given)
    assert len(lines) == 2 * len(found.table) == 10
    row = next(row for row in found.table if row.method == "fedavg")
    for seed, value in enumerate(row.values):
        held = hold_out(federation(), 0.2, seed)
        x, y = held.dataset.x_train, held.dataset.y_train
        alone = hf.train("fedavg", "linear", held, rounds=4, engine="sequential", seed=seed, progress=False)
        with_grad = alone.model(x[held.validation]).argmax(1)
        assert value == pytest.approx(float((with_grad == y[held.validation]).float().mean()), abs=1e-5)
    again = recommend("linear", federation(), log=lines.append, **given)
    assert (again.table, len(lines)) == (found.table, 10)
    with pytest.raises(HoldfastError, match=r"holds a recommendation with another lr: 0\.1, not 0\.5"):
        recommend("linear", federation(), log=lines.append, lr=0.5, **given)


@pytest.mark.parametrize(
    ("given", "told"),
    [({"seeds": 0}, "seeds is 0"), ({"workers": 0}, "at least 1 worker"), ({"lr": -1}, "lr is -1")],
)
def test_bad_input(given: dict[str, Any], told: str) -> None:
    with pytest.raises(HoldfastError, match=told):
        recommend("linear", federation(), progress=False, **({"rounds": 1} | given))


def test_the_command_takes_a_saved_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    saved = [
        "partition",
        "--data",
        "digits",
        "--partition",
        "dirichlet:0.5",
        "--clients",
        "3",
        "--save",
        "f.json",
    ]
    assert runner.invoke(app, saved).exit_code == 0
    words = [
        "recommend",
        "f.json",
        "--model",
        "linear",
        "--rounds",
        "2",
        "--seeds",
        "1",
        "--engine",
        "sequential",
    ]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Take " in result.output
    described = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    assert len(described["table"]) == 5
    assert described["method"] == described["table"][0]["method"]
    for more, told in (
        (["--method", "fedntd"], "cannot be given, because recommend"),
        (["--seeds", "0"], "seeds is 0"),
        (["--clients", "4"], "clients is given together with a federation file"),
    ):
        failed = runner.invoke(app, [*words, *more])
        assert failed.exit_code == 2
        assert told in failed.output + failed.stderr
    (tmp_path / "other.json").write_text("{}")
    assert "is not a federation" in runner.invoke(app, ["recommend", "other.json"]).stderr
