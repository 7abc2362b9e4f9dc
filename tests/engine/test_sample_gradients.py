"""Single samples' gradients, clipped and added up: Opacus, NumPy, sensitivity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast.data.preprocess import Preprocess
from holdfast.engine import sample_gradients
from holdfast.engine.batching import plan_private_batches
from holdfast.engine.sample_gradients import private_gradient
from holdfast.methods import FedAvg
from holdfast.methods.base import Batch, Local
from holdfast.models.network import Network

ZERO = torch.zeros((), dtype=torch.int64)


def gradient(
    net: nn.Module, x: Tensor, y: Tensor, bound: float, mask: Tensor | None = None, noise: float = 0.0
) -> tuple[dict[str, Tensor], Tensor]:
    network = Network(net)
    quiet = {k: torch.full_like(v, noise) for k, v in network.params.items()}
    return private_gradient(
        FedAvg(), network, Batch(x, y, ZERO, mask), ZERO, Local(network.params, network.params), network.buffers, {},
        bound, quiet, torch.tensor(1.0, dtype=x.dtype),
    )  # fmt: skip


def written(net: nn.Module) -> nn.Module:
    """The network with weights that another program can write down."""
    for i, p in enumerate(net.parameters()):
        with torch.no_grad():
            p.copy_(torch.cos(torch.arange(p.numel(), dtype=torch.float64) + i).view_as(p) * 0.5)
    return net


def test_the_sum_of_clipped_gradients_is_that_of_opacus() -> None:
    """Opacus 1.6.0: ``GradSampleModule`` and Σ_i grad_sample_i min(1, 1 / norm_i), sum and norm of each parameter."""
    layers = [
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.GroupNorm(3, 27),
        nn.Linear(27, 4),
    ]
    x = torch.sin(torch.arange(6 * 64, dtype=torch.float64)).view(6, 1, 8, 8) * 2
    found, _ = gradient(written(nn.Sequential(*layers).double()), x, torch.arange(6) % 4, 1.0)
    sums = [0.021016966908361426, 0.01595039347304119, 0.45642274437500135, -0.5126332958650374, 0.0, 0.0]
    norms = [
        0.33472641312124, 0.029067416246102644, 1.0694417579, 1.1917145280181978, 1.5237267097265013, 0.582628474318,
    ]  # fmt: skip
    np.testing.assert_allclose([float(g.sum()) for g in found.values()], sums, atol=1e-9)
    np.testing.assert_allclose([float(g.norm()) for g in found.values()], norms, rtol=1e-8)


def by_hand(w: np.ndarray, x: np.ndarray, y: np.ndarray, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Σ_i clip((p_i - e_{y_i}) x_iᵀ) of softmax regression, and the losses."""
    logits = x @ w.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    errors = p - np.eye(len(w))[y]
    grads = errors[:, :, None] * x[:, None, :]
    norms = np.sqrt((grads**2).sum((1, 2)))
    return (grads * np.minimum(1, bound / norms)[:, None, None]).sum(0), -np.log(p[np.arange(len(y)), y])


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_softmax_regression_by_hand(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_gradients, "CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(0)
    net = nn.Linear(4, 3, bias=False).double()
    x, y = rng.normal(size=(7, 4)) * 3, rng.integers(0, 3, 7)
    mask = np.array([1.0, 1, 0, 1, 1, 0, 1])
    found, loss = gradient(net, torch.from_numpy(x), torch.from_numpy(y), 0.8, torch.from_numpy(mask), 0.25)
    real = mask > 0
    expected, losses = by_hand(net.weight.detach().numpy(), x[real], y[real], 0.8)
    np.testing.assert_allclose(found["weight"].numpy(), expected + 0.25, rtol=1e-10)
    assert float(loss) == pytest.approx(losses.mean(), rel=1e-10)


def test_a_batch_without_samples_is_noise() -> None:
    net = nn.Linear(4, 3).double()
    empty = torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    found, loss = gradient(net, *empty, 1.0, noise=0.5)
    assert float(loss) == 0
    assert all(torch.equal(g, torch.full_like(g, 0.5)) for g in found.values())


samples = st.lists(
    st.tuples(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), st.integers(0, 1)),
    min_size=2,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(samples, st.floats(0.1, 5))
def test_one_sample_moves_the_sum_by_its_bound_at_most(drawn: list[Any], bound: float) -> None:
    x = torch.tensor([a for a, _ in drawn], dtype=torch.float64)
    y = torch.tensor([b for _, b in drawn])
    net = written(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())

    def total(rows: list[int]) -> Tensor:
        return torch.cat([g.flatten() for g in gradient(net, x[rows], y[rows], bound)[0].values()])

    rows = list(range(len(drawn)))
    assert float((total(rows) - total(rows[1:])).norm()) <= bound * (1 + 1e-9)
    assert float((total(rows[:-1]) - total(rows[1:])).norm()) <= 2 * bound * (1 + 1e-9)


def plan(samples: int, sampling: str, **more: Any) -> Any:
    given: dict[str, Any] = {"seed": 0, "round": 1, "client": 2, "epochs": 2, "batch_size": 20}
    given |= {"preprocess": Preprocess(), "shape": (3,), "samples": samples, "sampling": sampling}
    return plan_private_batches(**given | more)


def test_poisson_batches_have_binomial_sizes_and_each_sample_the_same_chance() -> None:
    drawn = plan(200, "poisson", steps=4000)
    assert drawn.sizes.mean() == pytest.approx(20, abs=0.3)
    assert drawn.sizes.var() == pytest.approx(200 * 0.1 * 0.9, rel=0.1)
    visits = np.bincount(drawn.order, minlength=200)
    assert abs(visits - 400).max() < 5 * np.sqrt(360)
    assert all(len(set(rows)) == len(rows) for rows in drawn.rows)
    again = plan(200, "poisson", steps=4000)
    assert np.array_equal(drawn.order, again.order)
    assert not np.array_equal(drawn.order[:100], plan(200, "poisson", steps=4000, round=2).order[:100])


def test_batches_of_a_fixed_size_are_drawn_anew_in_every_step() -> None:
    drawn = plan(50, "fixed")
    assert drawn.sizes.tolist() == [20] * 6
    assert drawn.epoch.tolist() == [0, 0, 0, 1, 1, 1]
    assert all(len(set(rows)) == 20 for rows in drawn.rows)
    assert len(set(np.concatenate(drawn.rows[:3]))) < 50  # not an epoch
    whole = plan(10, "poisson")
    assert whole.sizes.tolist() == [10, 10]
