"""Quality of predictions: of classes, of numbers, of risks. NaN where a metric is not defined for the given targets."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from holdfast.metrics.arrays import FloatArray, as_array, as_labels, divide

CALIBRATION_BINS = 15


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """Probability that a positive sample has a higher score than a negative one; equal scores count half.

    Args:
        scores: [N].
        positive: [N], true or 1 for positive samples.

    Returns:
        In [0, 1]; NaN unless there are samples of both classes.

    Source: Hanley and McNeil, Radiology 1982.
    """
    values, truth = as_array(scores, "scores", "N"), as_array(positive, "positive", "N") > 0
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return float("nan")
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1; the mean rank of equal scores
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def average_precision(scores: ArrayLike, positive: ArrayLike) -> float:
    """Area under the precision-recall curve: Σ_n (R_n - R_{n-1}) P_n over falling thresholds.

    Args:
        scores: [N].
        positive: [N], true or 1 for positive samples.

    Returns:
        In [0, 1]; NaN without positive samples.

    Source: as ``sklearn.metrics.average_precision_score``.
    """
    values, truth = as_array(scores, "scores", "N"), as_array(positive, "positive", "N") > 0
    if not truth.any():
        return float("nan")
    order = np.argsort(-values, kind="stable")
    last = np.append(np.diff(values[order]) != 0, True)  # the last of equal scores
    right = np.cumsum(truth[order])[last]
    precision = right / (np.flatnonzero(last) + 1)
    return float((np.diff(right, prepend=0) * precision).sum() / truth.sum())


def f1_by_class(predicted: ArrayLike, labels: ArrayLike, classes: int) -> FloatArray:
    """2 · correct / (predicted + true) of each class.

    Args:
        predicted: [N], the predicted classes.
        labels: [N], the true ones.
        classes: C.

    Returns:
        [C], in [0, 1]; NaN for classes without samples.

    Source: van Rijsbergen, Information Retrieval, 1979.
    """
    guess, truth = as_labels(predicted, "predicted"), as_labels(labels, "labels")
    right = np.bincount(truth[guess == truth], minlength=classes)
    total = np.bincount(truth, minlength=classes)
    return np.where(total > 0, divide(2.0 * right, np.bincount(guess, minlength=classes) + total), np.nan)


def balanced_accuracy(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Mean accuracy over the classes that have samples.

    Args:
        predicted: [N], the predicted classes.
        labels: [N], the true ones.

    Returns:
        In [0, 1].

    Source: Brodersen et al., ICPR 2010.
    """
    guess, truth = as_labels(predicted, "predicted"), as_labels(labels, "labels")
    total = np.bincount(truth)
    right = np.bincount(truth[guess == truth], minlength=len(total))
    return float((right[total > 0] / total[total > 0]).mean())


def calibration_error(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Expected calibration error: Σ_b (n_b / N) |accuracy of bin b - its mean confidence|, 15 equal bins of [0, 1].

    Args:
        confidence: [N], the probability of the predicted class.
        correct: [N], whether the prediction is right.

    Returns:
        In [0, 1].

    Source: Guo et al., ICML 2017.
    """
    sure, right = as_array(confidence, "confidence", "N"), as_array(correct, "correct", "N")
    place = np.clip(np.ceil(sure * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    gaps = np.bincount(place, weights=right - sure, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(sure))


def r_squared(predicted: ArrayLike, targets: ArrayLike) -> float:
    """Coefficient of determination: 1 - Σ (y - z)² / Σ (y - mean y)²; for several numbers a sample, their mean.

    Args:
        predicted: [N] or [N, D].
        targets: of the same shape.

    Returns:
        At most 1; NaN where the targets are all equal.

    Source: as ``sklearn.metrics.r2_score``, averaged over numbers.
    """
    z, y = (np.asarray(values, float).reshape(len(np.asarray(values)), -1) for values in (predicted, targets))
    spread = ((y - y.mean(0)) ** 2).sum(0)
    ratio = divide(((y - z) ** 2).sum(0), np.where(spread > 0, spread, np.nan))
    return float((1 - ratio).mean())


def concordance(risk: ArrayLike, time: ArrayLike, event: ArrayLike) -> float:
    """Concordance index of Harrell: the share of comparable pairs in which the earlier event has the higher risk.

    A pair is comparable if the sample with the earlier time had its event; at equal times, an event came before a
    censored time. Equal risks count half.

    Args:
        risk: [N], the predicted risks; higher means earlier.
        time: [N], of the event or of censoring.
        event: [N], 1 for an event, 0 for censoring.

    Returns:
        In [0, 1]; NaN without a comparable pair.

    Source: Harrell et al., JAMA 1982.
    """
    scores, when = as_array(risk, "risk", "N"), as_array(time, "time", "N")
    happened = as_array(event, "event", "N") > 0
    right = pairs = 0.0
    for i in np.flatnonzero(happened):
        later = (when > when[i]) | ((when == when[i]) & ~happened)
        right += (scores[later] < scores[i]).sum() + 0.5 * (scores[later] == scores[i]).sum()
        pairs += later.sum()
    return float(right / pairs) if pairs else float("nan")
