"""What `holdfast diagnose` says of methods comes from measured tables, or is not said."""

from pathlib import Path

import pytest

from holdfast.data.diagnosis import REGIMES, diagnose
from holdfast.methods import parse_method
from holdfast.papers import measured
from holdfast.papers.measured import ALIKE, measured_like, measured_settings

ROOT = Path(__file__).parents[2]


def test_every_setting_names_a_table_that_is_there_and_methods_that_exist():
    assert measured_settings()
    for setting in measured_settings():
        assert (ROOT / setting.table.split(",")[0]).exists()
        means = [score.mean for score in setting.scores]
        assert means == sorted(means, reverse=True)
        for score in setting.scores:
            parse_method(score.method)
            assert (score.deviation is None) == (score.seeds == 1)


def test_a_measured_regime_finds_its_own_table():
    regime = next(r for r in REGIMES if r.name == "cifar10 s=5")
    (apart, found), *_ = measured_like(diagnose(regime.label_counts()))
    assert apart <= ALIKE
    assert found.table == "results/fedntd/table1-sharding.json, cifar10:s=5"


def test_what_was_not_measured_is_told_with_its_distance(monkeypatch):
    iid = next(r for r in REGIMES if r.name == "cifar10 iid")
    ((apart, _), *_) = measured_like(diagnose(iid.label_counts()))
    assert apart > ALIKE
    monkeypatch.setattr(measured, "measured_settings", tuple)
    assert measured_like(diagnose(iid.label_counts())) == []


@pytest.mark.parametrize("streaming", [True, False])
def test_streams_are_compared_with_streams_alone(streaming):
    anything = diagnose([[5, 5], [9, 1]])
    assert all(found.streaming == streaming for _, found in measured_like(anything, streaming=streaming))
