"""A module as a function of its weights: replaced and reordered layers must give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.models.network import Network


def layers(*, norm: bool, pool: nn.MaxPool2d) -> nn.Sequential:
    middle = [nn.BatchNorm2d(6)] if norm else []
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), *middle, nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(4)
    )  # fmt: skip


def gradients(net: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = net(x)
    return out, list(torch.autograd.grad(out.square().sum(), list(net.parameters())))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1)], ids=["halves", "overlaps"]
)
def test_pooling_before_a_relu_gives_the_same_bits(
    norm: bool, pool: nn.MaxPool2d, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = layers(norm=norm, pool=pool)
    x = torch.randn(5, 3, 9, 9).round(decimals=1)  # many values are equal, and windows without any above 0
    net(x)  # makes the last layer
    network = Network(net)
    rectify, rectified = nn.ReLU.forward, []  # the sizes that are rectified
    monkeypatch.setattr(nn.ReLU, "forward", lambda relu, x: rectified.append(x.shape[-1]) or rectify(relu, x))
    out, found = gradients(network.net, x)
    wanted_out, wanted = gradients(net, x)
    assert rectified[0] < rectified[len(rectified) // 2]
    assert torch.equal(out, wanted_out)
    assert all(torch.equal(g, w) for g, w in zip(found, wanted, strict=True))
    assert type(network.module()) is nn.Sequential  # what the user gets back is as it was


def test_layers_that_do_not_commute_keep_their_order() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6, 2),
    )
    assert [type(a) for a in Network(net).net] == [type(a) for a in net]  # type: ignore[attr-defined]


def test_copies_keep_autocast_except_in_another_dtype() -> None:
    network = Network(nn.Linear(5, 4), autocast_dtype=torch.bfloat16)
    device = torch.device("cpu")
    for copied in (network.clone(), network.to(device)):
        assert copied.autocast_dtype == torch.bfloat16
    assert network.to(device, torch.float64).autocast_dtype is None


def test_lanes_use_no_kernels_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.kernels.unavailable", lambda device, dtype: None)
    assert Network(nn.Linear(5, 4)).uses_kernels
    assert not Network(nn.Linear(5, 4), autocast_dtype=torch.float16).uses_kernels


def test_outputs_are_float32_under_autocast() -> None:
    network = Network(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), autocast_dtype=torch.float16
    )
    with network.autocast():
        out = network.apply(network.params, {}, torch.ones(2, 5))
        assert nn.functional.linear(torch.ones(2, 5), network.params["0.weight"]).dtype == torch.float16
    assert out.features.dtype == out.logits.dtype == torch.float32
    exact = network.apply(network.params, {}, torch.ones(2, 5))
    assert not torch.equal(out.logits, exact.logits)
    torch.testing.assert_close(out.logits, exact.logits, rtol=1e-2, atol=1e-2)


def test_a_copy_on_another_device_shares_no_memory() -> None:
    network = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    network.params = {name: p + 1 for name, p in network.params.items()}
    copied = network.to(torch.device("cpu"))
    assert all(torch.equal(copied.params[name], p) for name, p in network.params.items())
    copied.params["1.weight"].zero_()
    assert not torch.equal(copied.params["1.weight"], network.params["1.weight"])


class Doubled(nn.BatchNorm1d):
    """A user's subclass of a batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Kept(nn.Dropout):
    """A user's subclass of dropout, which drops nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def _hooked() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.register_forward_hook(lambda module, inputs, y: y - 3)
    return norm


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4), Doubled(4), _hooked(), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, momentum=0.5),
        Kept(), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5),
    ],
)  # fmt: skip
def test_subclasses_and_hooked_layers_compute_as_in_torch(layer: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))
    network = Network(net)
    batches = torch.randn(3, 6, 3)
    buffers = {k: v.clone() for k, v in network.buffers.items()}
    for x in batches:
        torch.manual_seed(1)
        want = net.train()(x)
        torch.manual_seed(1)
        assert torch.allclose(network.apply(network.params, buffers, x, train=True).logits, want, atol=1e-6)
    for name, value in net.named_buffers():
        assert torch.allclose(buffers[name].float(), value.float(), atol=1e-6), name
    want = net.eval()(batches[0])
    assert torch.allclose(network.apply(network.params, buffers, batches[0]).logits, want, atol=1e-6)


def test_statistics_of_a_users_batch_norm_cannot_be_dropped() -> None:
    with pytest.raises(HoldfastError, match="the layer '1' is a custom BatchNorm"):
        Network(nn.Sequential(nn.Linear(3, 4), Doubled(4), nn.Linear(4, 2)), batchnorm="drop")


def test_largest_activation_and_smallest_batch_norm_map() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.MaxPool2d(4), nn.Conv2d(6, 8, 2), nn.BatchNorm2d(8),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    network, x = Network(net), torch.zeros(2, 3, 8, 8)
    assert network.max_activation_size(x) == 6 * 8 * 8  # before pooling; an image has 3 * 8 * 8
    assert network.min_batchnorm_values(x) == 1  # a 2 x 2 map by a 2 x 2 kernel
    assert not any(module._forward_hooks for module in network.net.modules())
    assert Network(nn.Linear(5, 4)).min_batchnorm_values(torch.zeros(1, 5)) is None
    scripted = nn.Sequential(torch.jit.script(nn.Linear(5, 9)), nn.Linear(9, 4))
    assert Network(scripted).max_activation_size(torch.zeros(1, 5)) == 9
