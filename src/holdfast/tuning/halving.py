"""Successive halving: many settings train for a few rounds, the best third of them for three times as many, and so on.

Li et al., Massively Parallel Hyperparameter Tuning, MLSys 2020 (ASHA). As there, a trial is promoted without waiting
for all others of its rung; but only once it is certain to be among the best, so that the trials of a search depend
neither on the number of workers nor on their speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ETA = 3  # the reduction factor: one of this many trials is promoted, to this multiple of the rounds
RUNGS = 3  # maximum number of rungs: no trial is compared before a ninth of the rounds

Scores = Sequence[Sequence[float | None]]
"""``[rungs][trials]``: a trial's score after a rung's rounds, higher is better; None if unknown.

Minus infinity for a trial that failed.
"""


def rungs(rounds: int, budget: int) -> tuple[int, ...]:
    """The rounds after which trials are compared, the last after all of them."""
    count = 1
    while count < RUNGS and ETA**count <= min(budget, rounds):
        count += 1
    return tuple(math.ceil(rounds / ETA**rung) for rung in reversed(range(count)))


def rung_sizes(budget: int, count: int) -> list[int]:
    """The number of trials in each of ``count`` rungs."""
    return [max(1, budget // ETA**rung) for rung in range(count)]


def entrants(scores: Scores) -> list[list[int]]:
    """The trials in each rung, as far as the known scores determine them.

    A trial is promoted if it is among the best of its rung for any values of the missing scores. Of equal scores the
    first trial's is the better one.
    """
    trials = len(scores[0])
    planned = rung_sizes(trials, len(scores))
    within = [list(range(trials))]
    expected = trials  # in this rung, fewer than planned where trials have failed
    for rung, size in enumerate(planned[1:]):
        known = [(score, trial) for trial in within[rung] if (score := scores[rung][trial]) is not None]
        usable = sorted((-score, trial) for score, trial in known if score != -math.inf)
        missing = expected - len(known)
        certain = usable[: max(0, size - missing)]
        within.append(sorted(trial for _, trial in certain))
        expected = size if missing else len(certain)
    return within


def remaining(scores: Scores) -> list[tuple[int, int]]:
    """The rungs and trials that can be run now, the longest runs first."""
    within = entrants(scores)
    return [
        (rung, trial)
        for rung in reversed(range(len(scores)))
        for trial in within[rung]
        if scores[rung][trial] is None
    ]


def discarded(scores: Scores) -> list[int]:
    """The trials that are not continued for any values of the missing scores."""
    within, out = entrants(scores), list[int]()
    for rung, inside in enumerate(within):
        if any(scores[rung][trial] is None for trial in inside):
            break
        promoted = within[rung + 1] if rung + 1 < len(within) else []
        out += [trial for trial in inside if trial not in promoted]
    return out


def ranking(scores: Scores) -> list[tuple[int, int]]:
    """Every trial with its last rung, the best first: later rungs before earlier ones, then by score."""
    last = [
        max((rung for rung in range(len(scores)) if scores[rung][trial] is not None), default=0)
        for trial in range(len(scores[0]))
    ]

    def place(trial: int) -> tuple[bool, int, float, int]:
        score = scores[last[trial]][trial]
        failed = score is None or score == -math.inf
        return failed, -last[trial], 0.0 if failed or score is None else -score, trial

    return [(trial, last[trial]) for trial in sorted(range(len(last)), key=place)]
