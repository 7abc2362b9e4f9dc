"""LSTM and GRU layers for lanes, against PyTorch's."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from holdfast.models.recurrent import LaneGRU, LaneLSTM, replace_recurrent

KINDS = [nn.LSTM, nn.GRU]
OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bias": False},
]


def lanes_of(layer):
    copied = nn.Sequential(copy.deepcopy(layer))
    replace_recurrent(copied, own_kernels=False)
    return copied[0]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_states_and_gradients_are_those_of_torch(kind, with_state, options):
    torch.manual_seed(0)
    layer = kind(3, 5, **options).double()
    x = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    first = torch.randn(layer.num_layers * (1 + layer.bidirectional), 4, 5, dtype=torch.float64)
    first = first.requires_grad_()
    results = []
    for one in (layer, lanes_of(layer)):
        hx = ((first, first.square()) if kind is nn.LSTM else first) if with_state else None
        y, state = one(x, hx)
        states = state if kind is nn.LSTM else (state,)
        loss = sum((i + 1) * part.square().sum() for i, part in enumerate((y, *states)))
        grads = torch.autograd.grad(loss, [x, *one.parameters(), *([first] if with_state else [])])
        results.append([y, *states, *grads])
    for expected, own in zip(*results, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_have_their_own_gradients(kind):
    torch.manual_seed(0)
    layer = lanes_of(kind(3, 5, num_layers=2).double())
    assert type(layer) in (LaneLSTM, LaneGRU)
    params = {k: torch.stack([v.detach(), 2 * v.detach()]) for k, v in layer.named_parameters()}
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64)

    def loss(weights, x):
        return functional_call(layer, weights, (x,))[0].square().sum()

    together = vmap(grad(loss))(params, x)
    for lane in range(2):
        alone = grad(loss)({k: v[lane] for k, v in params.items()}, x[lane])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][lane], value)


def test_layers_that_draw_or_project_stay_as_they_are():
    net = nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.5), nn.LSTM(4, 4, proj_size=2), nn.RNN(2, 2))
    kinds = [type(layer) for layer in net]
    replace_recurrent(net, own_kernels=False)
    assert [type(layer) for layer in net] == kinds
