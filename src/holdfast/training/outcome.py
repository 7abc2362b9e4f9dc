"""Detection of failed runs: accuracy compared with chance, and the trend of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import bdtrc

SIGNIFICANCE = 0.01
MIN_ROUNDS = 5  # minimum for a significant trend: 1/4! > 0.01 >= 1/5!
EXPLODED = 10.0  # a training loss above this multiple of ln C has diverged


def failure(
    records: Sequence[Mapping[str, Any]], test_counts: np.ndarray, lr: float, judge_accuracy: bool = True
) -> str | None:
    """A sentence on a run that diverged or ended near chance, with advice; None for a run that learned.

    It diverged if its loss is not finite, or if the training loss rises significantly (Kendall's τ) and the test loss
    ends above that of a uniform guess, ln C. It is near chance if a binomial test does not reject that its accuracy is
    at most the share of the largest class; over fewer than `MIN_ROUNDS` rounds, if its loss exploded besides.
    ``test_counts`` [C] are the test samples of each class.
    Without ``judge_accuracy`` only the loss is judged, as for methods whose global model is a by-product.
    """
    tested = [r for r in records if r.get("class_accuracy") is not None and r.get("accuracy") is not None]
    if not tested or not test_counts.sum():
        return None
    done = f"{len(records)} round{'s' * (len(records) != 1)}"
    losses = [math.nan if r["train_loss"] is None else r["train_loss"] for r in records if "train_loss" in r]
    uniform = math.log(max(2, int(np.count_nonzero(test_counts))))
    last_loss = tested[-1].get("loss")
    smaller = f"try a smaller lr than {lr:g}, or clip gradients with max_grad_norm=10"
    if last_loss is None or not math.isfinite(last_loss):
        return f"the loss is not a finite number after {done}; {smaller}"
    if last_loss > uniform and _rises(losses):
        return f"the training loss rose from {losses[0]:.3g} to {losses[-1]:.3g} over {len(losses)} rounds; {smaller}"
    samples, accuracy = int(test_counts.sum()), float(tested[-1]["accuracy"])
    chance = float(test_counts.max()) / samples
    exploded = any(not loss < EXPLODED * uniform for loss in losses)
    too_early = len(records) < MIN_ROUNDS and not exploded
    if not judge_accuracy or too_early or _p_value(round(accuracy * samples), samples, chance) < SIGNIFICANCE:
        return None
    larger = f"try more rounds or local_epochs, or a larger lr than {lr:g}"
    return (
        f"the accuracy after {done}, {accuracy:.1%}, is not significantly better than chance: the most "
        f"frequent class has {chance:.1%} of the test samples; {smaller if exploded else larger}"
    )


def _p_value(correct: int, samples: int, chance: float) -> float:
    """The probability of at least ``correct`` hits in guesses that are right with probability ``chance``."""
    return 1.0 if correct == 0 else float(bdtrc(correct - 1, samples, chance))


def _rises(losses: Sequence[float]) -> bool:
    """Whether the values have a significant upward trend."""
    if len(losses) < MIN_ROUNDS or not np.isfinite(losses).all():
        return False
    from scipy.stats import kendalltau  # slow to import

    trend = kendalltau(range(len(losses)), losses, alternative="greater")
    return bool(trend.pvalue < SIGNIFICANCE and losses[-1] > losses[0])
