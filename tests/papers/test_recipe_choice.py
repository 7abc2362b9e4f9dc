"""The rule by which the recipe is chosen, applied to made-up and to the stored results."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from paper_entries import entry

from holdfast.papers.cells import plan
from holdfast.papers.published import load_tables
from holdfast.papers.recipe_choice import IID_SEARCHES, SEARCHES, choose
from holdfast.papers.recipe_page import recipe_page
from holdfast.papers.results import Results

RESULTS = Path(__file__).parents[2] / "results"


def stored(folder, levels, iid=()):
    """Runs of these candidates, each at a constant accuracy on every federation, and at others without skew."""
    results = Results(folder)
    for name in (*SEARCHES, *IID_SEARCHES):
        for cell in plan(load_tables()[name]):
            level = dict(iid if name in IID_SEARCHES else levels).get(cell.row)
            if level is not None:
                results.add(cell, entry(cell, [level] * 20, forgetting=0.1))
    return results


def test_fewer_parts_win_within_half_a_point(tmp_path):
    three, two = "balanced:tau=0.5+fedavgm+ema", "fedavgm+ema"
    assert choose(stored(tmp_path / "a", {three: 0.700, two: 0.696, "fedavg": 0.6})).chosen.method == two
    assert choose(stored(tmp_path / "b", {three: 0.700, two: 0.694, "fedavg": 0.6})).chosen.method == three


def test_a_second_pass_must_be_two_points_ahead(tmp_path):
    sam, other = "balanced:tau=0.5+fedsam+fedavgm+ema", "balanced:tau=0.5+fedavgm+ema"
    assert choose(stored(tmp_path / "a", {sam: 0.719, other: 0.700})).chosen.method == other
    assert choose(stored(tmp_path / "b", {sam: 0.721, other: 0.700})).chosen.method == sam


def test_a_candidate_that_was_not_run_everywhere_is_not_judged(tmp_path):
    results = stored(tmp_path, {"ema": 0.6})
    (cell,) = plan(load_tables()[SEARCHES[1]], rows=["fedavgm+ema"])
    results.add(cell, entry(cell, [0.9] * 20, forgetting=0.1))
    choice = choose(results)
    assert choice.chosen.method == "ema"
    assert next(one for one in choice.candidates if one.method == "fedavgm+ema").score is None


def test_between_equal_numbers_of_parts_the_score_decides_unless_it_costs_something_without_skew(tmp_path):
    best, other = "balanced:tau=0.5+fedavgm:beta=0.9+ema", "balanced:tau=0.25+fedavgm+ema"
    levels = {best: 0.702, other: 0.700, "fedavg": 0.5}
    assert choose(stored(tmp_path / "a", levels)).chosen.method == best
    for level, method in ((0.796, best), (0.794, other)):
        folder = tmp_path / str(level)
        choice = choose(stored(folder, levels, {"fedavg": 0.8, best: level, other: 0.81}))
        assert choice.chosen.method == method
        text = recipe_page(Results(folder), tmp_path, tmp_path / "images")
        assert f"The rule selects `{method}`, named `steady`." in text
        assert (f"Excluded by the limit without skew: `{best}` (-0.60 points)." in text) == (method == other)


def test_scores_are_those_of_the_stored_curves():
    """Computed from the files by hand."""
    curves = {}
    for name in SEARCHES:
        for run in json.loads((RESULTS / f"{name}.json").read_text())["cells"]:
            curves.setdefault(run["row"], []).append(run["curves"]["accuracy"])
    choice = choose(Results(RESULTS))
    for one in choice.candidates:
        own = curves[one.method]
        assert one.score == pytest.approx(100 * statistics.fmean(statistics.fmean(c[190:]) for c in own))
        fluctuations = [100 * statistics.pstdev(b - a for a, b in pairwise(c[100:])) for c in own]
        assert sorted(run.fluctuation for run in one.runs.values()) == pytest.approx(sorted(fluctuations))


def test_the_page_before_any_run(tmp_path):
    text = recipe_page(Results(tmp_path / "results"), tmp_path, tmp_path / "images")
    assert "No candidate has been chosen yet." in text
    assert not (tmp_path / "images").exists()
