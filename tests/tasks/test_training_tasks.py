"""Every task is trained on both engines, tested by stratum and site, and refused to methods that need classes."""

import numpy as np
import pytest
import torch
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


def test_methods_that_need_classes_are_refused():
    with pytest.raises(hf.HoldfastError, match=r"fedntd needs classes, .* the task is 'regression': use"):
        train("regression", "fedntd")
    with pytest.raises(hf.HoldfastError, match="moon reads the features of the model"):
        train("segmentation", "moon")
    assert train("regression", "moon", rounds=1).records[-1]["loss"] > 0
