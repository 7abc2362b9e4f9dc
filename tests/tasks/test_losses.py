"""Each task's loss against arithmetic of its own: NumPy from the equation, or another library."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, mean_poisson_deviance, mean_squared_error
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from holdfast.tasks.classes import Binary, Multiclass, Multilabel
from holdfast.tasks.numbers import Counts, Regression
from holdfast.tasks.positions import IGNORED, Segmentation, Sequence
from holdfast.tasks.registry import parse_task, with_loss
from holdfast.tasks.survival import Survival

RNG = np.random.default_rng(0)
N = 12


def doubles(*shape: int) -> Tensor:
    return torch.from_numpy(RNG.normal(size=shape))


def cox(risk: np.ndarray, time: np.ndarray, event: np.ndarray, ties: str) -> float:
    """The negative logarithm of the partial likelihood, one tied group of events after another."""
    total = 0.0
    for t in np.unique(time[event == 1]):
        tied = np.flatnonzero((time == t) & (event == 1))
        at_risk = np.exp(risk[time >= t]).sum()
        for number in range(len(tied)):
            taken = number / len(tied) * np.exp(risk[tied]).sum() if ties == "efron" else 0.0
            total += np.log(at_risk - taken)
        total -= risk[tied].sum()
    return total / len(risk)


SURVIVAL = np.stack([RNG.integers(0, 5, N), RNG.random(N) < 0.7], 1).astype(float)  # with ties
TOKENS = RNG.integers(0, 5, (N, 7))
TOKENS[2, 3:] = IGNORED
PIXELS = RNG.integers(0, 3, (N, 4, 5))
COUNTS = RNG.integers(0, 4, N)

CASES = {
    "multiclass": (Multiclass(), doubles(N, 4), torch.from_numpy(RNG.integers(0, 4, N))),
    "binary": (Binary(), doubles(N, 1), torch.from_numpy(RNG.integers(0, 2, N))),
    "multilabel": (Multilabel(), doubles(N, 3), torch.from_numpy(RNG.integers(0, 2, (N, 3))).double()),
    "squared": (Regression(), doubles(N, 1), doubles(N)),
    "absolute": (Regression("absolute"), doubles(N, 2), doubles(N, 2)),
    "huber": (Regression("huber"), 3 * doubles(N, 1), doubles(N)),
    "poisson": (Counts(), doubles(N, 1), torch.from_numpy(COUNTS).double()),
    "ordinal": (Counts("ordinal"), doubles(N, 3), torch.from_numpy(COUNTS).double()),
    "breslow": (Survival(), doubles(N, 1), torch.from_numpy(SURVIVAL)),
    "efron": (Survival("efron"), doubles(N, 1), torch.from_numpy(SURVIVAL)),
    "sequence": (Sequence(), doubles(N, 7, 5), torch.from_numpy(TOKENS)),
    "segmentation": (Segmentation(), doubles(N, 3, 4, 5), torch.from_numpy(PIXELS)),
}


def expected(name: str, z: np.ndarray, y: np.ndarray) -> float:
    sigmoid = 1 / (1 + np.exp(-z))
    if name == "multiclass":
        return float(log_loss(y, np.exp(z) / np.exp(z).sum(1, keepdims=True)))
    if name == "binary":
        return float(log_loss(y, sigmoid[:, 0]))
    if name == "multilabel":
        return float(np.mean([log_loss(y[:, k], sigmoid[:, k]) for k in range(3)]))
    if name == "squared":
        return float(mean_squared_error(y, z[:, 0]))
    if name == "absolute":
        return float(np.abs(z - y).mean())
    if name == "huber":
        return float(nn.HuberLoss()(torch.from_numpy(z[:, 0]), torch.from_numpy(y)))
    if name == "poisson":  # the deviance is 2 (y log y - y) + 2 ℓ
        own = np.where(y > 0, y * np.log(np.maximum(y, 1)), 0) - y
        return float(mean_poisson_deviance(y, np.exp(z[:, 0]))) / 2 - float(own.mean())
    if name == "ordinal":
        return float(-np.where(y[:, None] > np.arange(3), np.log(sigmoid), np.log(1 - sigmoid)).sum(1).mean())
    if name in ("breslow", "efron"):
        return cox(z[:, 0], y[:, 0], y[:, 1], name)
    last = z if name == "sequence" else np.moveaxis(z, 1, -1)
    return float(
        F.cross_entropy(torch.from_numpy(last.reshape(-1, last.shape[-1])), torch.from_numpy(y).flatten())
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_other_libraries(name):
    task, outputs, y = CASES[name]
    assert float(task.batch_loss(outputs, y)) == pytest.approx(expected(name, outputs.numpy(), y.numpy()))
    if outputs.shape[1:] == (1,):  # one value may come without its own dimension
        assert task.batch_loss(outputs[:, 0], y) == task.batch_loss(outputs, y)


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_neither_loss_nor_gradient(name):
    task, outputs, y = CASES[name]
    real = torch.arange(N) < 8
    short = [values[:8] for values in (outputs, y)]
    assert torch.allclose(task.batch_loss(outputs, y, real.double()), task.batch_loss(*short))
    whole = grad(lambda z: task.batch_loss(z, y, real.double()))(outputs)
    assert torch.allclose(whole[:8], grad(lambda z: task.batch_loss(z, short[1]))(short[0]))
    assert (whole[8:] == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_losses_of_many_clients_at_once(name):
    task, outputs, y = CASES[name]
    mask = (torch.arange(N) < 9).double().expand(3, N)
    lanes = torch.stack([outputs, 2 * outputs, outputs - 1])
    together = vmap(task.batch_loss, in_dims=(0, None, 0))(lanes, y, mask)
    assert torch.allclose(together, torch.stack([task.batch_loss(lane, y, mask[0]) for lane in lanes]))
    slopes = vmap(grad(task.batch_loss), in_dims=(0, None, 0))(lanes, y, mask)
    assert torch.allclose(slopes[1], grad(task.batch_loss)(lanes[1], y, mask[0]))


def test_the_likelihood_of_large_risks_is_finite():
    y = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]])
    found = Survival().batch_loss(torch.tensor([900.0, 0.0, -900.0]), y)
    assert float(found) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_loss_of_ones_own(reduced):
    task, outputs, y = CASES["binary"]
    own = with_loss(task, (lambda z, y: (z - y) ** 2) if not reduced else lambda z, y: z.sum())
    wanted = outputs.sum() if reduced else ((outputs[:, 0] - y) ** 2).mean()
    assert torch.allclose(own.batch_loss(outputs, y), wanted)
    assert own.describe() == {"name": "binary", "loss": {"name": "<lambda>", "own": True}}


def test_losses_by_name():
    assert with_loss(Regression(), "huber") == parse_task("regression:loss=huber") == Regression("huber")
