"""The rankings of methods that `holdfast diagnose` prints come from stored results."""

from pathlib import Path

import pytest

from holdfast.data.diagnosis import REGIMES, diagnose
from holdfast.methods import parse_method
from holdfast.papers import rankings
from holdfast.papers.rankings import SAME_REGIME, load_rankings, similar_rankings

ROOT = Path(__file__).parents[2]


def test_every_setting_names_a_table_that_is_there_and_methods_that_exist():
    assert load_rankings()
    for setting in load_rankings():
        assert (ROOT / setting.table.split(",")[0]).exists()
        means = [score.mean for score in setting.scores]
        assert means == sorted(means, reverse=True)
        for score in setting.scores:
            parse_method(score.method)
            assert (score.deviation is None) == (score.seeds == 1)


def test_a_measured_regime_finds_its_own_table():
    regime = next(r for r in REGIMES if r.name == "cifar10 s=5")
    (apart, found), *_ = similar_rankings(diagnose(regime.label_counts()))
    assert apart <= SAME_REGIME
    assert found.table == "results/fedntd/table1-sharding.json, cifar10:s=5"


def test_a_regime_that_was_not_measured_has_the_nearest_with_its_distance(monkeypatch):
    iid = next(r for r in REGIMES if r.name == "cifar10 iid")
    ((apart, _), *_) = similar_rankings(diagnose(iid.label_counts()))
    assert apart > SAME_REGIME
    monkeypatch.setattr(rankings, "load_rankings", tuple)
    assert similar_rankings(diagnose(iid.label_counts())) == []


@pytest.mark.parametrize("streaming", [True, False])
def test_streams_are_compared_with_streams_alone(streaming):
    anything = diagnose([[5, 5], [9, 1]])
    assert all(found.streaming == streaming for _, found in similar_rankings(anything, streaming=streaming))
