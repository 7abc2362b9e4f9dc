"""SGD steps, whatever the strides of the gradients."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.engine.optim import sgd_


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_with_other_strides_than_their_parameters(momentum):
    w, v, g = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 4).T
    filters = torch.randn(5, 3, 2, 2)
    filter_grad = torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last)
    weights, grads, buffers = [w, filters], [g, filter_grad], [v, torch.randn(5, 3, 2, 2)]
    steps = [d + 0.01 * p + momentum * m for p, d, m in zip(weights, grads, buffers, strict=True)]
    expected = [p - 0.1 * step for p, step in zip(weights, steps, strict=True)]
    sgd_(weights, grads, buffers if momentum else [], lr=0.1, momentum=momentum, weight_decay=0.01)
    for found, truth in zip(weights, expected, strict=True):
        assert torch.allclose(found, truth, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_with_learning_rates_of_their_own_are_skipped_at_0(momentum, dtype):
    weights = [torch.randn(3, 4, 5, dtype=dtype), torch.randn(3, 6, dtype=dtype)]
    grads, buffers = ([torch.randn_like(w) for w in weights] for _ in range(2))
    lr = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.3, 0.1]], dtype=dtype)
    expected = []
    for i, (w, g, v) in enumerate(zip(weights, grads, buffers, strict=True)):
        for lane, rate in enumerate(lr[:, i].tolist()):
            step = g[lane] + 0.01 * w[lane] + momentum * v[lane]
            expected.append((w[lane] - rate * step, step if rate and momentum else v[lane].clone()))
    sgd_(weights, grads, buffers if momentum else [], lr=lr, momentum=momentum, weight_decay=0.01)
    found = [pair for w, v in zip(weights, buffers, strict=True) for pair in zip(w, v, strict=True)]
    for (w, v), (weight, velocity) in zip(found, expected, strict=True):
        assert torch.allclose(w, weight, atol=1e-6)
        assert torch.allclose(v, velocity, atol=1e-6)


class Contracted(nn.Module):
    """The gradient of its first layer is transposed in memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(16, 64) / 8)
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        return self.last(torch.einsum("bi,oi->bo", x.flatten(1), self.first).relu())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_model_of_ones_own_learns_the_same_on_any_engine(engine):
    federation = hf.federate(hf.load("digits"), "iid", clients=4)

    def weights(engine, precision):
        run = hf.train(
            hf.FedAvg(), Contracted(), federation, rounds=2, local_epochs=1, batch_size=64, lr=0.05, momentum=0.9,
            engine=engine, precision=precision, evaluate_locals=False,
        )  # fmt: skip
        return torch.cat([p.flatten().double() for p in run.model.state_dict().values()])

    exact = weights("vectorized", "float64")  # without torch's fused step
    found = weights(engine, "float32")
    assert float((found - exact).norm() / exact.norm()) < 1e-4
