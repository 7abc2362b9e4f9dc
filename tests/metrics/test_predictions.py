"""Metrics of predictions against scikit-learn and plain counting."""

import numpy as np
import pytest
from sklearn import metrics as sk

from holdfast import metrics

RNG = np.random.default_rng(0)
TRUTH = RNG.integers(0, 2, 200)
SCORES = np.round(TRUTH + RNG.normal(size=200), 1)  # with equal scores
LABELS = RNG.integers(0, 4, 200)
PREDICTED = np.where(RNG.random(200) < 0.6, LABELS, RNG.integers(0, 4, 200))


def test_auroc_and_average_precision():
    assert metrics.auroc(SCORES, TRUTH) == pytest.approx(sk.roc_auc_score(TRUTH, SCORES))
    assert metrics.average_precision(SCORES, TRUTH) == pytest.approx(
        sk.average_precision_score(TRUTH, SCORES)
    )
    assert metrics.auroc([1, 1], [0, 1]) == 0.5
    assert np.isnan(metrics.auroc([1, 2], [1, 1]))
    assert np.isnan(metrics.average_precision([1, 2], [0, 0]))


def test_f1_and_balanced_accuracy():
    np.testing.assert_allclose(
        metrics.f1_by_class(PREDICTED, LABELS, 4), sk.f1_score(LABELS, PREDICTED, average=None)
    )
    assert np.isnan(metrics.f1_by_class([0, 2], [0, 1], 3)).tolist() == [False, False, True]
    assert metrics.balanced_accuracy(PREDICTED, LABELS) == pytest.approx(
        sk.balanced_accuracy_score(LABELS, PREDICTED)
    )


def test_calibration_error():
    sure, right = RNG.random(300), RNG.random(300) < 0.5
    sure[:3] = 0.0, 1.0, 1 / 15
    expected = 0.0
    for b in range(15):
        inside = (sure > b / 15) & (sure <= (b + 1) / 15) if b else sure <= 1 / 15
        expected += abs(right[inside].mean() - sure[inside].mean()) * inside.mean()
    assert metrics.calibration_error(sure, right) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_r_squared(shape):
    y = RNG.normal(size=shape)
    z = y + RNG.normal(size=shape)
    assert metrics.r_squared(z, y) == pytest.approx(sk.r2_score(y, z))
    assert np.isnan(metrics.r_squared([1.0, 2.0], [3.0, 3.0]))


def test_concordance():
    time, event, risk = RNG.integers(1, 9, 60), RNG.random(60) < 0.6, RNG.integers(0, 5, 60)
    right = pairs = 0.0
    for i in range(60):
        for j in range(60):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    assert metrics.concordance(risk, time, event) == pytest.approx(right / pairs)
    assert np.isnan(metrics.concordance([1, 2], [1, 2], [0, 1]))


def test_the_concordance_index_is_that_of_lifelines():
    from lifelines.utils import concordance_index

    for seed in range(20):
        rng = np.random.default_rng(seed)
        time, event = rng.integers(1, 15, 60), rng.integers(0, 2, 60)  # with ties
        risk = rng.normal(size=60).round(1)
        assert metrics.concordance(risk, time, event) == pytest.approx(
            concordance_index(time, -risk, event), abs=1e-12
        )
