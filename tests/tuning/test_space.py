"""The space of a search."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.core.errors import HoldfastError
from holdfast.tuning.space import Interval, OneOf, draw_settings, parse_space


def test_spaces_are_read() -> None:
    space = parse_space(
        [
            "method.beta=0.1..10:log",
            "lr = 3e-3..1e-1:log",
            "local_epochs=1..5",
            "optimizer=[sgd,adam]",
            "x=-1..1",
        ]
    )
    assert space == {
        "method.beta": Interval(0.1, 10, True),
        "lr": Interval(0.003, 0.1, True),
        "local_epochs": Interval(1, 5),
        "optimizer": OneOf(("sgd", "adam")),
        "x": Interval(-1, 1),
    }
    assert [parse_space([f"a={values.describe()}"])["a"] for values in space.values()] == list(space.values())


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ([], "at least one setting"),
        (["lr"], "not of the form setting=values"),
        (["lr=0.1"], "must be a range or a list"),
        (["lr=[0.1]"], "must be a range or a list"),
        (["lr=0.1..x"], "'x' in 'lr=0.1..x' is not a number"),
        (["lr=0.1..0.01"], "must begin with the smaller"),
        (["lr=0..1:log"], "must begin above 0"),
        (["lr=0.1..1", "lr=0.1..2"], "lr is given twice"),
        (["lr=.nan..1"], "not a number"),
    ],
)
def test_bad_spaces_are_refused(written: list[str], sentence: str) -> None:
    with pytest.raises(HoldfastError, match=sentence):
        parse_space(written)


def test_draws_are_spread_over_the_space_and_reproducible() -> None:
    space = parse_space(
        ["lr=0.001..1:log", "momentum=0..0.9", "local_epochs=1..4", "optimizer=[sgd,adam,adamw]"]
    )
    drawn = draw_settings(space, 64, seed=3)
    assert drawn == draw_settings(space, 64, seed=3) != draw_settings(space, 64, seed=4)
    assert drawn[:10] == draw_settings(space, 10, seed=3)
    logs = np.log10([one["lr"] for one in drawn])
    assert np.histogram(logs, [-3, -2, -1, 0])[0].min() >= 19  # a third of 64 each, to Sobol's accuracy
    assert [sum(one["local_epochs"] == n for one in drawn) for n in (1, 2, 3, 4)] == [16] * 4
    assert {one["optimizer"] for one in drawn} == {"sgd", "adam", "adamw"}
    assert all(0 <= one["momentum"] <= 0.9 for one in drawn)


def test_a_small_grid_is_drawn_whole() -> None:
    drawn = draw_settings(parse_space(["a=[1,2,3]", "b=[x,y]"]), 60, seed=0)
    assert sorted((one["a"], one["b"]) for one in drawn) == [(a, b) for a in (1, 2, 3) for b in "xy"]
