"""Every task is trained on both engines, tested by stratum and site, and refused to methods that need classes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import holdfast as hf

RNG = np.random.default_rng(1)
N, TEST = 120, 30
X = RNG.normal(size=(N, 6)).astype(np.float32)
Z = X @ RNG.normal(size=6)
SITE = hf.Group(("a", "b", "c"), np.arange(N) % 3, np.arange(TEST) % 3)
TOKENS = RNG.integers(0, 5, (N, 7))
IMAGES = RNG.random((N, 2, 6, 6)).astype(np.float32)


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.embedding(x.long()))


TASKS = {
    "binary": (X, (Z > 0).astype(int), "linear"),
    "multilabel": (X, np.stack([Z > 0, X[:, 0] > 0, X[:, 1] > 1], 1), "linear"),
    "regression": (X, Z, "mlp:8"),
    "regression:loss=huber": (X, np.stack([Z, X[:, 0]], 1), "linear"),
    "counts": (X, RNG.poisson(np.exp(Z / 2)).clip(0, 7), "linear"),
    "counts:loss=ordinal": (X, RNG.poisson(np.exp(Z / 2)).clip(0, 7), "linear"),
    "survival": (X, np.stack([np.ceil(3 * RNG.exponential(np.exp(-Z))), RNG.random(N) < 0.7], 1), "linear"),
    "sequence": (TOKENS, (TOKENS + 1) % 5, NextToken()),
    "segmentation": (IMAGES, (IMAGES[:, 0] > IMAGES[:, 1]).astype(int), nn.Conv2d(2, 2, 1)),
}


def federation(task, x=None, y=None):
    x, y = (TASKS[task][0], TASKS[task][1]) if x is None else (x, y)
    data = hf.Dataset.from_arrays(x, y, x[:TEST], y[:TEST], task=task, groups={"site": SITE})
    return hf.federate(data, "dirichlet:1.0", clients=4)


def train(task, method="fedavg", **changes):
    settings = {"rounds": 3, "batch_size": 16, "lr": 0.1, "precision": "float64"} | changes
    return hf.train(method, TASKS[task][2], federation(task), **settings)


@pytest.mark.parametrize("task", TASKS)
def test_engines_agree_on_every_task(task):
    first, second = (train(task, engine=name) for name in ("sequential", "vectorized"))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    losses = [record["loss"] for record in first.records]
    assert losses[-1] < losses[0]
    assert first.records[-1]["forgetting"] >= 0


def test_sequences_without_sites_are_of_one_stratum(tmp_path):
    data = hf.Dataset.from_arrays(
        TOKENS, (TOKENS + 1) % 5, TOKENS[:TEST], (TOKENS[:TEST] + 1) % 5, task="sequence"
    )
    among = hf.federate(data, hf.IID(), clients=4, seed=0)
    run = hf.train("fedavg", NextToken(), among, rounds=2, out=tmp_path / "run")
    record = run.records[-1]
    assert record["local_in"] == [accuracy[0] for accuracy in record["locals"]["class_accuracy"]]
    assert np.isnan(record["local_out"]).all()  # no client lacks the stratum
    assert hf.RunDirectory.open(tmp_path / "run").records()[-1]["local_out"] == [None] * 4


def test_methods_that_need_classes_are_refused():
    with pytest.raises(hf.HoldfastError, match=r"fedntd needs classes, .* the task is 'regression'; use"):
        train("regression", "fedntd")
    with pytest.raises(hf.HoldfastError, match="moon reads the features of the model"):
        train("segmentation", "moon")
    assert train("regression", "moon", rounds=1).records[-1]["loss"] > 0


def test_a_binary_run_records_auroc_and_accuracy_by_site(tmp_path):
    run = train("binary", out=tmp_path / "run", metrics=["auroc", "f1"], rounds=2)
    record = run.records[-1]
    scores = run.model(torch.tensor(X[:TEST], dtype=torch.float64)).detach().numpy()[:, 0]
    y = TASKS["binary"][1][:TEST]
    assert record["auroc"] == pytest.approx(roc_auc_score(y, scores))
    assert record["accuracy"] == pytest.approx(((scores > 0) == y).mean())
    for name, code in (("a", 0), ("b", 1), ("c", 2)):
        there = SITE.test == code
        assert record["site_auroc"][name] == pytest.approx(roc_auc_score(y[there], scores[there]))
        assert record["site_accuracy"][name] == pytest.approx(((scores[there] > 0) == y[there]).mean())
    assert run.experiment["task"] == {"name": "binary"}
    assert run.experiment["metrics"] == ["auroc", "f1"]
    stored = hf.Run.open(tmp_path / "run")
    assert stored.records[-1]["site_auroc"] == record["site_auroc"]
    with pytest.raises(hf.HoldfastError, match="cannot be resumed with another metrics"):
        train("binary", out=tmp_path / "run", resume=True, rounds=2)


def test_forgetting_of_numbers_is_the_error_gained_by_bin():
    records = train("regression", lr=0.5, max_grad_norm=5.0, rounds=4).records
    assert all(len(record["class_mae"]) == 5 for record in records)
    for before, after in pairwise(records):
        lost = np.maximum(0, np.subtract(after["class_mae"], before["class_mae"])).mean()
        assert after["forgetting"] == pytest.approx(lost)
    last = records[-1]
    assert last["locals"]["global_before"] == pytest.approx(records[-2]["class_mae"])
    lost = np.maximum(0, np.subtract(last["locals"]["class_mae"], records[-2]["class_mae"])).mean(1)
    assert last["local_forgetting"] == pytest.approx(lost.tolist())


def test_the_task_is_inferred_where_it_is_plain():
    def found(y):
        return hf.Dataset.from_arrays(X[:4], y, X[:4], y).task.name

    assert found([0, 1, 1, 2]) == found([0.0, 1.0, 1.0, 2.0]) == "multiclass"
    assert found([0.5, 1.0, 2.0, 3.0]) == "regression"


def test_a_task_given_to_train_replaces_that_of_the_data():
    labels = federation(None, X, TASKS["binary"][1])
    run = hf.train("fedavg", "linear", labels, rounds=1, task="binary", lr=0.1)
    assert run.experiment["task"] == {"name": "binary"}
    assert run.model(torch.tensor(X)).shape == (N, 1)
    again = hf.train("fedavg", "linear", labels, rounds=1, task="regression", loss="huber", lr=0.1)
    assert again.experiment["task"] == {"name": "regression", "loss": "huber", "bins": 5}


def squared(outputs, targets):
    return (outputs - targets) ** 2


def test_a_loss_of_ones_own_is_recorded_as_such(tmp_path):
    runs = [
        train("regression", loss=loss, rounds=2, out=tmp_path / str(at))
        for at, loss in enumerate((squared, None))
    ]
    one, other = (torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs)
    torch.testing.assert_close(one, other)
    assert runs[0].experiment["task"]["loss"] == {"name": "squared", "own": True}
    with pytest.raises(hf.HoldfastError, match="loss of this run is a Python function"):
        hf.Experiment(task=runs[0].experiment["task"])
    with pytest.raises(hf.HoldfastError, match="metric mine of this run is a Python function"):
        hf.Experiment(metrics=[{"name": "mine", "own": True}])


BAD = {
    "binary": ([0, 1, 2, 1], "holds 2; the targets of task 'binary' must be 0 or 1"),
    "multilabel": ([0, 1, 1, 0], "a column of 0 and 1 for each label"),
    "multiclass": ([0.5, 1, 0, 1], "must hold whole numbers"),
    "regression": (
        [0.5, np.nan, 0, 1],
        "y_train holds NaN or infinite values in 1 of 4 targets, .* sample 1",
    ),
    "counts": ([1, -2, 0, 1], "holds -2; the targets of task 'counts' must be 0 or more"),
    "survival": (
        [[1, 1], [-3, 0], [2, 1], [1, 0]],
        "holds the time -3 in sample 1; survival times must be 0 or more",
    ),
    "survival:ties=efron": ([[1, 1], [3, 2], [2, 1], [1, 0]], "holds the event 2; it must be 1"),
    "sequence": ([0, 1, 1, 0], "must hold a label for each position"),
    "segmentation": ([0, 1, 1, 0], "must hold a class for each pixel"),
}


@pytest.mark.parametrize("task", BAD)
def test_targets_of_the_wrong_kind_are_refused(task):
    y, sentence = BAD[task]
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.Dataset.from_arrays(X[:4], y, X[:4], y, task=task)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"task": "surviving"}, "unknown task 'surviving'"),
        ({"task": "regression:loss=cubed"}, "loss is 'cubed'; it must be squared, absolute or huber"),
        ({"task": "binary", "loss": "huber"}, "task 'binary' has one loss, so loss='huber' cannot be chosen"),
        ({"task": "binary", "metrics": "rmse"}, "unknown metric of task 'binary'"),
        (
            {"task": "binary", "loss": 3},
            "loss is 3; it must be the name of a loss of the task, or a function",
        ),
        ({"task": "multilabel"}, "a column of 0 and 1 for each label"),
        (
            {"task": "binary", "model": nn.Linear(6, 2)},
            "has 2 outputs, but custom has task 'binary', which needs 1",
        ),
    ],
)
def test_bad_settings_are_refused_before_training(settings, sentence):
    model = settings.pop("model", "linear")
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.train("fedavg", model, federation(None, X, TASKS["binary"][1]), rounds=1, **settings)
