"""Successive halving, against sorting by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.tuning.halving import entrants, ranking, remaining, rung_sizes, rungs


@pytest.mark.parametrize(
    ("rounds", "budget", "expected", "sizes"),
    [
        (100, 60, (12, 34, 100), [60, 20, 6]),
        (100, 9, (12, 34, 100), [9, 3, 1]),
        (100, 8, (34, 100), [8, 2]),
        (100, 2, (100,), [2]),
        (100, 1, (100,), [1]),
        (2, 60, (2,), [60]),
        (5, 60, (2, 5), [60, 20]),
    ],
)
def test_rounds_and_sizes_of_rungs(
    rounds: int, budget: int, expected: tuple[int, ...], sizes: list[int]
) -> None:
    assert rungs(rounds, budget) == expected
    assert rung_sizes(budget, len(expected)) == sizes


def test_promotions_by_hand() -> None:
    #        trial  0    1    2    3    4    5    6    7    8
    first = [0.5, 0.7, 0.6, 0.1, 0.7, 0.2, 0.3, 0.4, 0.65]
    scores: list[list[float | None]] = [list(first), [None] * 9, [None] * 9]
    assert entrants(scores)[:2] == [list(range(9)), [1, 4, 8]]  # 0.7, 0.7, 0.65
    assert remaining(scores) == [(1, 1), (1, 4), (1, 8)]
    scores[1][1], scores[1][4], scores[1][8] = 0.71, 0.74, 0.74
    assert remaining(scores) == [(2, 4)]  # of equals the first
    scores[2][4] = 0.5
    assert remaining(scores) == []
    assert [trial for trial, _ in ranking(scores)] == [4, 8, 1, 2, 0, 7, 6, 5, 3]


def test_a_trial_is_promoted_once_the_missing_scores_cannot_matter() -> None:
    # Six trials, two go on. With one score missing only the best is certain, with two missing none.
    scores: list[list[float | None]] = [[0.1, 0.9, 0.8, None, 0.2, 0.3], [None] * 6]
    assert entrants(scores)[1] == [1]
    assert remaining(scores) == [(1, 1), (0, 3)]
    scores[0][0] = None
    assert entrants(scores)[1] == []
    scores[0][0], scores[0][3] = 0.1, 0.85
    assert entrants(scores)[1] == [1, 3]


def test_failed_trials_are_not_promoted_and_leave_their_places_empty() -> None:
    lost = -math.inf
    scores: list[list[float | None]] = [
        [lost, 0.5, lost, lost, lost, lost, lost, lost, lost],
        [None] * 9,
        [None] * 9,
    ]
    assert remaining(scores) == [(1, 1)]
    scores[1][1] = 0.6
    assert remaining(scores) == [(2, 1)]  # the only one of its rung, without waiting for two that cannot come
    scores[1][1] = lost
    assert remaining(scores) == []
    assert ranking(scores)[-1][0] == 8


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_results_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trials = int(rng.integers(1, 40))
    count = len(rungs(100, trials))
    final = rng.choice(np.linspace(0, 1, 15), (count, trials))  # with equal scores
    final[rng.random((count, trials)) < 0.1] = -np.inf
    # By hand: sort each rung, keep the best third.
    expected = [np.arange(trials)]
    for rung, size in enumerate(rung_sizes(trials, count)[1:]):
        order = expected[-1][np.argsort(-final[rung][expected[-1]], kind="stable")]
        expected.append(np.sort([t for t in order[:size] if final[rung][t] > -np.inf]).astype(int))
    scores: list[list[float | None]] = [[None] * trials for _ in range(count)]
    run = set()
    while jobs := remaining(scores):
        rung, trial = jobs[rng.integers(len(jobs))]
        run.add((rung, trial))
        scores[rung][trial] = float(final[rung][trial])
    assert run == {(rung, int(trial)) for rung, of_rung in enumerate(expected) for trial in of_rung}
