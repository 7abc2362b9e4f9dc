"""The kernels of LSTM and GRU layers, against PyTorch's layers in float64."""

import copy

import pytest
import torch
from kernels_world import DEVICE, needs_triton, relative
from torch import nn
from torch.func import functional_call, grad, vmap

from holdfast.models.recurrent import replace_recurrent

pytestmark = [pytest.mark.gpu, needs_triton]


def gradients(layer, params, x):
    def loss(weights, x):
        y, state = functional_call(layer, weights, (x,))
        states = state if isinstance(state, tuple) else (state,)
        return sum((i + 1) * part.square().sum() for i, part in enumerate((y, *states))), (y, *states)

    return vmap(grad(loss, argnums=(0, 1), has_aux=True))(params, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    ("lanes", "batch", "steps", "inputs", "units", "options"),
    [
        (2, 3, 4, 3, 20, {}),
        (1, 17, 3, 2, 16, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (2, 66, 2, 2, 5, {"bias": False}),
        (1, 2, 1, 2, 4, {}),
    ],
)
def test_a_layer_under_vmap_and_grad(kind, lanes, batch, steps, inputs, units, options):
    torch.manual_seed(0)
    layer = kind(inputs, units, **options).to(DEVICE)
    own, exact = (nn.Sequential(copy.deepcopy(layer)) for _ in range(2))
    replace_recurrent(own, own_kernels=True)
    replace_recurrent(exact, own_kernels=False)
    params = {
        k: torch.stack([(lane + 1) * v.detach() for lane in range(lanes)])
        for k, v in layer.named_parameters()
    }
    sides = (batch, steps) if options.get("batch_first") else (steps, batch)
    x = torch.randn(lanes, *sides, inputs, device=DEVICE)
    grads, outputs = gradients(own[0], params, x)
    exact_grads, exact_outputs = gradients(
        exact[0].double(), {k: v.double() for k, v in params.items()}, x.double()
    )
    for value, reference in zip(outputs, exact_outputs, strict=True):
        assert relative(value, reference) < 2e-6
    assert relative(grads[1], exact_grads[1]) < 1e-5
    for name, value in grads[0].items():
        assert relative(value, exact_grads[0][name]) < 1e-5 or steps == 1


def test_a_layer_without_lanes():
    torch.manual_seed(0)
    layer = nn.LSTM(3, 8).to(DEVICE)
    own = nn.Sequential(copy.deepcopy(layer))
    replace_recurrent(own, own_kernels=True)
    x = torch.randn(5, 4, 3, device=DEVICE)
    y, expected = own(x)[0], layer.double()(x.double())[0]
    assert relative(y, expected) < 2e-6
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(own[0].parameters(), layer.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < 1e-5
