"""The metrics of each task, whole and by site, against scikit-learn and counting by hand."""

import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.metrics.by_task import Predictions, Scorer, metrics_of
from holdfast.tasks.classes import Binary, Multiclass, Multilabel
from holdfast.tasks.numbers import Counts, Regression
from holdfast.tasks.positions import IGNORED, Segmentation, Sequence
from holdfast.tasks.survival import Survival

RNG = np.random.default_rng(0)
N = 90
SITES = {"site": (("a", "b", "c"), np.arange(N) % 3)}


def measured(task, outputs, y, names=None, strata=None, classes=1):
    """The record of these metrics, all of the task's by default."""
    kept = task.reduce(torch.from_numpy(outputs), torch.from_numpy(y)).numpy()
    chosen = metrics_of(task, names or list(task.metrics))
    strata = np.zeros(N, int) if strata is None else strata
    return Scorer(task, chosen, y, strata, classes, SITES).record(kept)


def softmax(z):
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


def test_multiclass():
    y = RNG.integers(0, 4, N)
    z = RNG.normal(size=(N, 4)) + 2 * np.eye(4)[y]
    record, p, said = measured(Multiclass(), z, y), softmax(z), z.argmax(1)
    assert record["accuracy"] == pytest.approx(sk.accuracy_score(y, said))
    assert record["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, said))
    assert record["f1"] == pytest.approx(sk.f1_score(y, said, average="macro"))
    assert record["f1_weighted"] == pytest.approx(sk.f1_score(y, said, average="weighted"))
    assert record["auroc"] == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"))
    assert record["auroc_weighted"] == pytest.approx(
        sk.roc_auc_score(y, p, multi_class="ovr", average="weighted")
    )
    assert record["auprc"] == pytest.approx(sk.average_precision_score(np.eye(4)[y], p))
    assert record["perplexity"] == pytest.approx(np.exp(sk.log_loss(y, p)))
    assert record["class_auroc"][2] == pytest.approx(sk.roc_auc_score(y == 2, p[:, 2]))
    at_b = SITES["site"][1] == 1
    assert record["site_f1"]["b"] == pytest.approx(sk.f1_score(y[at_b], said[at_b], average="macro"))
    confidence, right = p.max(1), said == y
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((right[bins == b] - confidence[bins == b]).sum()) / N for b in range(15)]
    assert record["ece"] == pytest.approx(sum(gaps))


def test_binary():
    y = RNG.integers(0, 2, N)
    z = RNG.normal(size=(N, 1)) + y[:, None]
    record, said = measured(Binary(), z, y), (z[:, 0] > 0).astype(int)
    assert record["auroc"] == pytest.approx(sk.roc_auc_score(y, z[:, 0]))
    assert record["auprc"] == pytest.approx(sk.average_precision_score(y, z[:, 0]))
    assert record["f1"] == pytest.approx(sk.f1_score(y, said))
    assert record["accuracy"] == pytest.approx(sk.accuracy_score(y, said))
    assert record["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, said))
    at_c = SITES["site"][1] == 2
    assert record["site_auroc"]["c"] == pytest.approx(sk.roc_auc_score(y[at_c], z[at_c, 0]))
    assert 0 < record["ece"] < 1


def test_multilabel():
    y = RNG.integers(0, 2, (N, 3)).astype(np.float32)
    z = RNG.normal(size=(N, 3)) + y
    record, said = measured(Multilabel(), z, y), (z > 0).astype(int)
    assert record["auroc"] == pytest.approx(sk.roc_auc_score(y, z, average="macro"))
    assert record["auprc"] == pytest.approx(sk.average_precision_score(y, z))
    assert record["f1"] == pytest.approx(sk.f1_score(y, said, average="macro"))
    assert record["f1_weighted"] == pytest.approx(sk.f1_score(y, said, average="weighted"))
    assert record["accuracy"] == pytest.approx((said == y).mean())
    assert record["label_f1"] == pytest.approx(sk.f1_score(y, said, average=None).tolist())


def test_numbers():
    y = RNG.normal(size=N)
    z = y[:, None] + RNG.normal(size=(N, 1))
    strata = (y > 0).astype(int)
    record = measured(Regression(), z, y, strata=strata, classes=2)
    assert record["rmse"] == pytest.approx(sk.root_mean_squared_error(y, z[:, 0]))
    assert record["mae"] == pytest.approx(sk.mean_absolute_error(y, z[:, 0]))
    assert record["r2"] == pytest.approx(sk.r2_score(y, z[:, 0]))
    assert record["class_rmse"][1] == pytest.approx(sk.root_mean_squared_error(y[y > 0], z[y > 0, 0]))
    counts = RNG.poisson(2, N).astype(float)
    assert measured(Counts(), z, counts)["mae"] == pytest.approx(
        sk.mean_absolute_error(counts, np.exp(z[:, 0]))
    )
    steps = RNG.normal(size=(N, 3))
    expected = sk.mean_absolute_error(counts, (1 / (1 + np.exp(-steps))).sum(1))
    assert measured(Counts("ordinal"), steps, counts)["mae"] == pytest.approx(expected)


def test_survival_by_site_compares_within_a_site():
    y = np.stack([RNG.integers(1, 30, N), RNG.random(N) < 0.6], 1).astype(float)
    risk = RNG.normal(size=(N, 1))
    record, chosen = measured(Survival(), risk, y), SITES["site"][1] == 0
    pairs = [
        (i, j)
        for i in np.flatnonzero(chosen & (y[:, 1] == 1))
        for j in np.flatnonzero(chosen)
        if y[i, 0] < y[j, 0] or (y[i, 0] == y[j, 0] and y[j, 1] == 0)
    ]
    assert record["site_concordance"]["a"] == pytest.approx(
        np.mean([risk[i, 0] > risk[j, 0] for i, j in pairs])
    )


def test_sequences_count_positions():
    y, z = RNG.integers(0, 5, (N, 6)), RNG.normal(size=(N, 6, 5))
    y[0, 2:] = IGNORED
    record, real = measured(Sequence(), z, y), y != IGNORED
    assert record["accuracy"] == pytest.approx(sk.accuracy_score(y[real], z.argmax(-1)[real]))
    assert record["perplexity"] == pytest.approx(
        np.exp(sk.log_loss(y[real], softmax(z[real]), labels=range(5)))
    )


def test_segmentation_counts_pixels():
    y, z = RNG.integers(0, 3, (N, 4, 5)), RNG.normal(size=(N, 3, 4, 5))
    y[3, 1] = IGNORED
    record, real, said = measured(Segmentation(), z, y), y != IGNORED, z.argmax(1)
    assert record["label_dice"] == pytest.approx(sk.f1_score(y[real], said[real], average=None).tolist())
    assert record["dice"] == pytest.approx(sk.f1_score(y[real], said[real], average="macro"))
    assert record["iou"] == pytest.approx(sk.jaccard_score(y[real], said[real], average="macro"))


def spread(outputs, targets):
    return float(np.abs(outputs).max() - targets.mean())


spread.less_is_better = True


def test_metrics_of_ones_own():
    y, z = RNG.normal(size=N), RNG.normal(size=(N, 1))
    own = metrics_of(Regression(), [spread, "mae"])
    assert [metric.describe() for metric in own] == [
        {"name": "spread", "own": True, "less_is_better": True},
        "mae",
    ]
    assert measured(Regression(), z, y, [spread])["spread"] == pytest.approx(np.abs(z).max() - y.mean())
    with pytest.raises(HoldfastError, match="a custom metric is called"):
        metrics_of(Regression(), [lambda outputs, targets: 0])
    with pytest.raises(HoldfastError, match="task 'sequence' does not support custom metrics"):
        metrics_of(Sequence(), [spread])


def broken(outputs, targets):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("task", "chosen", "sentence"),
    [
        (
            Regression(),
            ["auroc"],
            "unknown metric of task 'regression'",
        ),
        (Regression(), [], "metrics is empty; the first metric of task 'regression' is rmse"),
        (Binary(), "auroc,auroc", "metrics names auroc twice"),
        (Binary(), [3], "a metric is 3"),
        (Binary(), 3, "metrics is 3; it must be a list of names"),
    ],
)
def test_metrics_that_a_task_does_not_have(task, chosen, sentence):
    with pytest.raises(HoldfastError, match=sentence):
        metrics_of(task, chosen)


def test_what_cannot_be_measured_is_said():
    y = np.where(SITES["site"][1] == 1, 1, RNG.integers(0, 2, N))  # site b has one class
    scorer = Scorer(Binary(), metrics_of(Binary(), None), y, y, 2, SITES)
    with pytest.warns(
        HoldfastWarning, match="auroc cannot be measured for site b: it needs samples of two classes"
    ):
        assert scorer.check((), required=True) == []
    assert np.isnan(scorer.record(RNG.normal(size=N))["site_auroc"]["b"])
    ones = Scorer(Binary(), metrics_of(Binary(), None), np.ones(N, int), y, 2, {})
    with pytest.raises(
        HoldfastError, match="auroc cannot be measured on this test set: it needs samples of two"
    ):
        ones.check((), required=True)
    with pytest.warns(HoldfastWarning, match="it is left out"):
        assert ones.check((), required=False) == ["auroc"]
    failing = Scorer(Binary(), metrics_of(Binary(), [broken]), y, y, 2, {})
    with pytest.raises(
        HoldfastError, match=r"the metric broken fails on outputs of shape .*: ValueError: no"
    ):
        failing.check((), required=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scorer(Binary(), metrics_of(Binary(), None), np.arange(N) % 2, y, 2, SITES).check((), required=True)


def test_predictions_of_large_logits_are_finite():
    z = np.array([900.0, -900.0])
    p = Predictions(Binary(), z, np.array([1, 0])).probabilities
    np.testing.assert_allclose(p, [[0, 1], [1, 0]])
