"""The Triton kernels against PyTorch in float64: fresh random inputs, odd sizes, every gradient.

On a GPU, or with TRITON_INTERPRET=1 on a CPU, where Triton runs them with NumPy (`make test-kernels`).
"""

import copy

import numpy as np
import pytest
import torch
from kernels_world import DEVICE, INTERPRETED, needs_triton, relative
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.data.preprocess import Preprocess
from holdfast.engine.state_cache import StateCache
from holdfast.training.session import Training

pytestmark = [pytest.mark.gpu, needs_triton]

takes_minutes = pytest.mark.skipif(INTERPRETED, reason="takes the interpreter minutes")

SHAPES = [  # lanes, batch, channels, height, width, outputs, kernel, stride, padding
    pytest.param((3, 7, 3, 32, 32, 32, 5, 1, 2), marks=takes_minutes),
    pytest.param((3, 7, 32, 16, 16, 64, 5, 1, 2), marks=takes_minutes),
    (1, 2, 3, 9, 8, 32, 5, 1, 2),
    (2, 3, 32, 5, 4, 64, 5, 1, 2),
    (2, 5, 6, 14, 14, 16, 5, 1, 0),
    (2, 3, 64, 9, 9, 64, 3, 2, 1),
    (2, 3, 64, 8, 8, 128, 1, 2, 0),
    (2, 3, 1, 28, 28, 32, 5, 1, 0),
    (2, 3, 48, 11, 7, 40, 3, 1, 1),
    (1, 1, 512, 4, 4, 200, 3, 1, 1),
    (2, 5, 16, 1, 1, 24, 3, 1, 1),
    (2, 5, 16, 2, 2, 24, 3, 2, 1),
    (2, 3, 8, 1, 6, 16, 5, 1, 2),
    (2, 5, 20, 1, 1, 24, 3, 1, 1),
    (2, 5, 64, 2, 2, 128, 3, 1, 1),
    (2, 3, 128, 5, 4, 192, 3, 1, 1),
    (2, 5, 128, 2, 2, 128, 3, 2, 1),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tf32", [False, True])
def test_convolution_and_its_gradients(shape, tf32, monkeypatch):
    from holdfast.kernels import conv, layers
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    lanes, batch, channels, height, width, outputs, kernel, stride, pad = shape
    x = torch.randn(lanes, batch, channels, height, width, device=DEVICE)
    w = torch.randn(lanes, outputs, channels, kernel, kernel, device=DEVICE) / kernel
    b = torch.randn(lanes, outputs, device=DEVICE)
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    reference = torch.stack(
        [F.conv2d(*(t[i] for t in exact), stride=stride, padding=pad) for i in range(lanes)]
    )
    dy = torch.randn_like(reference).float()
    want = torch.autograd.grad(reference, exact, dy.double())
    tolerance, geometry = 5e-4 if tf32 else 3e-6, Geometry((height, width), kernel, stride, pad)
    for weights in (
        w,
        conv.empty_filters(tuple(w.shape), w.device).copy_(w),
    ):  # channels first, and last as in the vectorized engine
        y, padded, packed = conv.forward(x, weights, b, geometry)
        assert relative(y, reference) < tolerance
        for needs_dx in (True, False):
            got = layers._backward(geometry, needs_dx, dy, weights, padded.values, padded.amax, packed)
            for value, truth in zip(got, want if needs_dx else want[1:], strict=True):
                assert relative(value, truth) < tolerance


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs programs one after another")
@pytest.mark.parametrize("shape", [(64, 8, 64, 1), (256, 2, 512, 2), (512, 1, 512, 1)])
def test_a_gradient_is_the_same_every_time(shape, monkeypatch):
    from holdfast.kernels import conv, layers
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    channels, size, outputs, stride = shape
    geometry = Geometry((size, size), 3, stride, 1)
    w = torch.randn(10, outputs, channels, 3, 3, device=DEVICE)
    y, x, packed = conv.forward(torch.randn(10, 32, channels, size, size, device=DEVICE), w, None, geometry)
    dy = torch.randn_like(y)
    first, *others = (layers._backward(geometry, True, dy, w, x.values, x.amax, packed)[1] for _ in range(50))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e6])
def test_half_precision_takes_any_magnitude(size, monkeypatch):
    from holdfast.kernels import conv, layers
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x = torch.randn(2, 3, 16, 8, 8, device=DEVICE) * torch.tensor([size, 1.0], device=DEVICE).view(
        2, 1, 1, 1, 1
    )
    w, dy = torch.randn(2, 8, 16, 3, 3, device=DEVICE), torch.randn(2, 3, 8, 8, 8, device=DEVICE) * size
    geometry = Geometry((8, 8), 3, 1, 1)
    y, padded, packed = conv.forward(x, w, torch.zeros(2, 8, device=DEVICE), geometry)
    got = layers._backward(geometry, True, dy, w, padded.values, padded.amax, packed)
    for i in range(2):
        exact = [x[i].double().requires_grad_(), w[i].double().requires_grad_()]
        reference = F.conv2d(*exact, padding=1)
        want = torch.autograd.grad(reference, exact, dy[i].double())
        assert relative(y[i], reference) < 5e-4
        assert relative(got[0][i], want[0]) < 5e-4
        assert relative(got[1][i], want[1]) < 5e-4


def test_infinities_are_kept():
    from holdfast.kernels import conv
    from holdfast.kernels.conv_geometry import Geometry

    x = torch.randn(1, 2, 4, 8, 8, device=DEVICE)
    x[0, 0, 0, 4, 4] = float("inf")
    y, *_ = conv.forward(x, torch.ones(1, 8, 4, 3, 3, device=DEVICE), None, Geometry((8, 8), 3, 1, 1))
    assert not torch.isfinite(y).all()


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(("channels", "size", "kernel"), [(6, 14, 5), (20, 4, 1), (48, 3, 1)])
def test_infinities_do_not_spread_to_other_lanes(channels, size, kernel, tf32, monkeypatch):
    from holdfast.kernels import conv, layers
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    geometry = Geometry((size, size), kernel, 1, 0)
    x = torch.rand(2, 1, channels, size, size, device=DEVICE)
    w = torch.randn(2, 20, channels, kernel, kernel, device=DEVICE)
    x[1] = float("inf")
    y, padded, packed = conv.forward(x, w, None, geometry)
    dy = torch.rand_like(y)
    dy[1] = float("inf")
    got = layers._backward(geometry, True, dy, w, padded.values, padded.amax, packed)
    for value in (y, *got):
        assert torch.isfinite(value[0]).all()
        assert not torch.isfinite(value[1]).any()


def test_pooling_keeps_nan():
    from holdfast.kernels import relu_maxpool

    x = torch.randn(2, 4, 4, 4, device=DEVICE)
    x[1, 2, 3, 0] = float("nan")
    want = F.max_pool2d(F.relu(x), 2)
    y, argmax = relu_maxpool.forward(x[None])
    assert torch.equal(y[0].isnan(), want.isnan())
    assert int(argmax[0, 1, 2, 1, 0]) == 2


@takes_minutes
def test_more_images_than_the_second_grid_dimension_allows(monkeypatch):
    from holdfast.kernels import padded_images

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(64, 1040, 4, 2, 4, device=DEVICE)
    padded = padded_images.pad(x, padded_images.PaddedLayout(0, (2, 4)))
    assert torch.equal(padded.values.permute(0, 1, 4, 2, 3), x)


@pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 60 << 30,
    reason="needs a GPU of 60 GiB",
)
def test_more_values_than_32_bits_can_index(monkeypatch):
    from holdfast.kernels import conv
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x = torch.zeros(1, 46_000, 64, 28, 28, device=DEVICE)  # 2.3e9; padded 2.6e9
    last = x[:, -4:].normal_()
    w = torch.randn(1, 64, 64, 3, 3, device=DEVICE)
    y, padded, _ = conv.forward(x, w, None, Geometry((28, 28), 3, 1, 1))
    assert float(padded.amax) == float(last.abs().max())
    assert relative(y[0, -4:], F.conv2d(last[0].double(), w[0].double(), padding=1)) < 5e-4


@pytest.mark.parametrize("shape", [(3, 5, 8, 6), (2, 32, 32, 32), (7, 1, 2, 2)])
@pytest.mark.parametrize("channels_first", [False, True])
def test_relu_and_pooling(shape, channels_first, monkeypatch):
    from holdfast.kernels import padded_images, relu_maxpool

    x = torch.randn(shape, device=DEVICE)
    exact = x.double().requires_grad_()
    reference = F.max_pool2d(F.relu(exact), 2)
    dy = torch.randn_like(reference).float()
    y, argmax = relu_maxpool.forward(x[None], channels_first)
    assert torch.equal(y[0], reference.float())
    assert y[0].is_contiguous() or not channels_first
    (want,) = torch.autograd.grad(reference, exact, dy.double())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layout = padded_images.PaddedLayout(0, (shape[2], shape[3]))
    padded = padded_images.relu_maxpool_backward(dy[None], argmax, layout)
    got = padded.values[0].permute(0, 3, 1, 2)[:, : shape[1], : shape[2], : shape[3]]  # sizes are rounded up
    assert torch.equal(got, want.float())


@pytest.mark.parametrize(
    "shape",  # lanes with images, with weights; batch, channels, height, width, outputs; kernel, stride, padding
    [
        (2, 2, 3, 3, 32, 32, 32, 5, 1, 2),
        (3, 3, 2, 32, 16, 16, 64, 5, 1, 2),
        (2, 1, 5, 4, 8, 12, 16, 3, 1, 1),
        (1, 1, 3, 2, 8, 12, 5, 3, 1, 2),
        (1, 3, 4, 1, 12, 12, 64, 5, 1, 0),
    ],
)
@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_convolution_relu_and_pooling_in_one_kernel(shape, channels_first, biased, monkeypatch):
    from holdfast.kernels import conv_relu_maxpool
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    lanes, own, batch, channels, height, width, outputs, kernel, stride, padding = shape
    x = torch.randn(lanes, batch, channels, height, width, device=DEVICE)
    w = torch.randn(own, outputs, channels, kernel, kernel, device=DEVICE) / kernel
    bias = torch.randn(own, outputs, device=DEVICE) if biased else None
    x[-1] *= 1000
    geometry = Geometry((height, width), kernel, stride, padding)
    assert conv_relu_maxpool.supported(outputs, geometry)

    def exact(x, w, b):
        return F.max_pool2d(F.relu(F.conv2d(x, w, b, stride, padding)), 2)

    def ours(x, w, b):
        return conv_relu_maxpool.conv_relu_maxpool(x, w, b, geometry, channels_first)

    with torch.no_grad():
        dims = [None if len(t) < max(lanes, own) else 0 for t in (x, w)]
        dims.append(dims[1] if biased else None)
        given = [
            t[0] if dim is None and t is not None else t for t, dim in zip((x, w, bias), dims, strict=True)
        ]
        got = vmap(ours, tuple(dims))(*given)
        assert got.stride(-1) == (1 if channels_first else outputs)
        for lane, y in enumerate(got):
            x1, w1, b1 = (None if t is None else t[lane % len(t)].double() for t in (x, w, bias))
            assert relative(y, exact(x1, w1, b1)) < 5e-4
        single = [None if t is None else t[0] for t in (x, w, bias)]
        assert torch.equal(ours(*single), got[0])
        single[0] = torch.full_like(single[0], float("nan"))
        assert ours(*single).isnan().all()


@pytest.mark.parametrize(
    ("shape", "window"),  # of images; kernel, stride, padding
    [
        ((2, 3, 8, 16, 16), (3, 2, 1)),
        ((1, 2, 5, 9, 7), (3, 2, 1)),
        ((2, 2, 3, 8, 8), (2, 2, 0)),
        ((1, 3, 4, 7, 10), (3, 1, 1)),
        ((2, 1, 6, 11, 11), (5, 3, 2)),
        ((1, 2, 3, 9, 9), (2, 3, 0)),
        ((1, 1, 2, 1, 2), (3, 2, 1)),
    ],
)
def test_pooling_with_overlapping_windows(shape, window):
    from holdfast.kernels.maxpool import LaneMaxPool2d

    layer = LaneMaxPool2d(nn.MaxPool2d(*window))
    x = torch.randint(-3, 4, shape, device=DEVICE).float()  # many ties: the first value of a window counts

    def loss(pool, x, dy):
        return (pool(x) * dy).sum()

    plain = vmap(lambda v: F.max_pool2d(v, *window))(x)
    dy = torch.randn_like(plain)
    for images in (x, x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)):  # in either memory order
        assert torch.equal(vmap(layer)(images), plain)
        got = vmap(grad(lambda v, g: loss(layer, v, g)))(images, dy)
        want = vmap(grad(lambda v, g: loss(lambda i: F.max_pool2d(i, *window), v, g)))(x, dy)
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)  # sums of up to nine, in another order
    assert torch.equal(layer(x[0]), plain[0])  # and without lanes


def test_pooling_with_overlapping_windows_keeps_nan():
    from holdfast.kernels.maxpool import LaneMaxPool2d

    layer, nan, inf = LaneMaxPool2d(nn.MaxPool2d(3, 2, 1)), float("nan"), float("inf")
    x = torch.randn(1, 2, 6, 6, device=DEVICE)
    x[0, 0, 1, 1], x[0, 0, 3, 3], x[0, 1] = nan, inf, -inf
    dy = torch.randn(1, 2, 3, 3, device=DEVICE)
    for given in (x, torch.full_like(x, nan)):
        images = given.requires_grad_()
        got, want = layer(images), F.max_pool2d(images, 3, 2, 1)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        gradients = (torch.autograd.grad(y, images, dy)[0] for y in (got, want))
        assert torch.allclose(*gradients, rtol=1e-6, atol=1e-6)


def test_which_pooling_the_kernels_support():
    from holdfast.kernels.maxpool import LaneMaxPool2d

    assert LaneMaxPool2d.supports(nn.MaxPool2d((3, 3), (2, 2), (1, 1)))
    for other in (
        nn.MaxPool2d((3, 2)), nn.MaxPool2d(3, (1, 2)), nn.MaxPool2d(3, padding=(1, 0)), nn.MaxPool2d(3, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(17),
    ):  # fmt: skip
        assert not LaneMaxPool2d.supports(other)


class Doubled(nn.Conv2d):
    """A user's subclass of a convolution."""

    def forward(self, x):
        return super().forward(2 * x)


class Shifted(nn.MaxPool2d):
    """A user's subclass of pooling."""

    def forward(self, x):
        return super().forward(x) + 1


def test_subclasses_and_hooked_layers_are_not_replaced():
    from holdfast import kernels

    hooked = nn.MaxPool2d(2, 1)
    hooked.register_forward_hook(lambda module, inputs, y: y - 3)
    net = nn.Sequential(
        Doubled(1, 2, 3), nn.ReLU(), Shifted(2), torch.nn.utils.spectral_norm(nn.Conv2d(2, 2, 1)), hooked,
        torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 1)), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(12, 2),
    ).to(DEVICE).eval()  # fmt: skip
    x = torch.randn(2, 1, 11, 11, device=DEVICE)[..., :10, :10]
    fast = copy.deepcopy(net)
    kernels.install(fast)
    assert [type(a) is type(b) for a, b in zip(net, fast, strict=True)] == [*[True] * 6, False, True, False]
    assert torch.allclose(fast(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess(),
        Preprocess((0.5,), (0.3,)),
        Preprocess((0.5, 0.4, 0.3), (0.3, 0.2, 0.1), 4, flip=True, cutout=6),
        Preprocess((0.5,), (0.2,), 3, "reflect", flip=True),
    ],
)
def test_samples_are_loaded_as_by_preprocessing(preprocess, stored):
    from holdfast.kernels.load_batch import load_batch

    rng = np.random.default_rng()
    x = torch.from_numpy(rng.integers(0, 256, (20, 3, 12, 10))).to(DEVICE, stored)
    y = torch.from_numpy(rng.integers(0, 10, 20)).to(DEVICE)
    # Sample ids, table rows, epoch and dropout key.
    indices = torch.from_numpy(rng.integers(0, 20, (4, 3, 16))).to(DEVICE)
    mask = torch.from_numpy(rng.integers(0, 2, (4, 3, 7))).to(DEVICE, torch.float32)
    drawn = preprocess.draw(rng, 4 * 3 * 7, (3, 12, 10)) if preprocess.augments else None
    draws = None if drawn is None else torch.from_numpy(drawn.reshape(4, 3, 7, 5)).to(DEVICE)
    cursor = torch.tensor([2], device=DEVICE)
    ids = indices[2, :2, :7]
    used = None if draws is None else draws[2, :2].reshape(-1, 5)
    want = preprocess(x.index_select(0, ids.reshape(-1)), used).view(2, 7, 3, 12, 10)
    samples, labels, rows, out_mask, epoch, key = load_batch(
        x, y, cursor, indices, mask, draws, 2, preprocess
    )
    assert torch.allclose(samples, want, rtol=1e-6, atol=1e-4)
    assert torch.equal(labels, y[ids])
    assert torch.equal(rows, indices[2, :2, 7:14])
    assert torch.equal(out_mask, mask[2, :2])
    assert torch.equal(torch.stack([epoch, key], 1), indices[2, :2, 14:])
    assert load_batch(x, y, cursor, indices, None, draws, 2, preprocess)[3].shape == (2, 0)


@pytest.mark.parametrize("lanes", [1, 5])
def test_losses_and_steps_are_counted(lanes):
    from holdfast.kernels.step_counter import count_step_

    total, loss, cursor = (
        torch.randn(7, device=DEVICE),
        torch.randn(lanes, device=DEVICE),
        torch.tensor([3]).to(DEVICE),
    )
    want = total.clone()
    want[:lanes] += loss
    count_step_(total, loss, cursor)
    assert torch.equal(total, want)
    assert cursor.item() == 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_sgd_step(momentum, mu):
    from holdfast.engine.optim import sgd_
    from holdfast.kernels.conv import empty_filters

    shapes = [(2, 20_000), (2, 5, 7), (2, 64, 32, 3, 3), *((2, 3 + i) for i in range(20))]
    w, g, v, sent = ([torch.randn(shape, device=DEVICE) for shape in shapes] for _ in range(4))
    # The gradient of these filters keeps other strides.
    w[2], v[2], sent[2] = (empty_filters(shapes[2], t.device).copy_(t) for t in (w[2], v[2], sent[2]))
    sent = [stacked[0] for stacked in sent]
    expected = []
    for weight, gradient, velocity, centre in zip(w, g, v, sent, strict=True):
        step = gradient.double() + 0.01 * weight.double() + momentum * velocity.double()
        step += mu * (weight.double() - centre)
        expected.append((weight.double() - 0.1 * step, step))
    lr = torch.tensor(0.1, device=DEVICE)
    sgd_(
        w, g, v if momentum else [], lr=lr, momentum=momentum, weight_decay=0.01, kernels=True, proximal_mu=mu,
        global_params=sent,
    )  # fmt: skip
    for i, (weight, step) in enumerate(expected):
        assert relative(w[i], weight) < 1e-6
        assert relative(v[i], step) < 1e-6 or not momentum


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_step_with_learning_rates_per_tensor(momentum):
    from holdfast.engine.optim import sgd_

    shapes = [(3, 5000), (3, 4, 7), *((3, 3 + i) for i in range(20))]
    w, g, v = ([torch.randn(shape, device=DEVICE) for shape in shapes] for _ in range(3))
    lr = torch.rand(3, len(shapes), device=DEVICE) * (torch.rand(3, len(shapes), device=DEVICE) > 0.4)
    expected = []
    for i, (weight, gradient, velocity) in enumerate(zip(w, g, v, strict=True)):
        rate = lr[:, i].double().view(-1, *[1] * (weight.dim() - 1))
        step = gradient.double() + 0.01 * weight.double() + momentum * velocity.double()
        expected.append((weight.double() - rate * step, torch.where(rate == 0, velocity.double(), step)))
    sgd_(w, g, v if momentum else [], lr=lr, momentum=momentum, weight_decay=0.01, kernels=True)
    for i, (weight, step) in enumerate(expected):
        assert relative(w[i], weight) < 1e-6
        assert relative(v[i], step) < 1e-6 or not momentum


def adam_by_torch(w, g, m, v, t, lr, decoupled):
    """One step of ``torch.optim`` in float64, from the state m and v after t - 1 steps."""
    w, g, m, v = (tensor.double() for tensor in (w, g, m, v))
    param = torch.nn.Parameter(w.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([param], lr=float(lr), betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01)
    optimizer.state[param] = {
        "step": torch.tensor(float(t) - 1),
        "exp_avg": m.clone(),
        "exp_avg_sq": v.clone(),
    }
    param.grad = g
    optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_adam_step(decoupled, by_tensor):
    from holdfast.engine.optim import adam_
    from holdfast.kernels.conv import copy_to_fp16_, empty_filters

    shapes = [(2, 3000), (2, 5, 7), (2, 16, 8, 3, 3), *((2, 3 + i) for i in range(15))]
    w, g, m, v = ([torch.randn(shape, device=DEVICE) for shape in shapes] for _ in range(4))
    w[2], m[2], v[2] = (empty_filters(shapes[2], t.device).copy_(t) for t in (w[2], m[2], v[2]))
    v = [square.abs_() for square in v]
    done = torch.tensor([0.0, 6.0], device=DEVICE)
    t = [done.clone() for _ in shapes]
    lr = torch.tensor(0.1, device=DEVICE)
    if by_tensor:
        lr = torch.rand(2, len(shapes), device=DEVICE)
        lr[1, 2] = lr[0, 4] = 0  # these keep everything
    expected = {}
    for i in range(len(shapes)):
        for lane in range(2):
            rate = lr[lane, i] if by_tensor else lr
            old = tuple(tensors[i][lane] for tensors in (w, g, m, v))
            kept = tuple(tensor.double() for tensor in (old[0], *old[2:]))
            expected[i, lane] = adam_by_torch(*old, done[lane] + 1, rate, decoupled) if rate else kept
    copy = torch.zeros(2, 16, 3, 24, device=DEVICE).half()
    copies = None if by_tensor else [copy if i == 2 else None for i in range(len(shapes))]
    adam_(
        w, g, m, v, t, lr=lr, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01, decoupled=decoupled, kernels=True,
        fp16_copies=copies,
    )  # fmt: skip
    for (i, lane), want in expected.items():
        for tensors, one in zip((w, m, v), want, strict=True):
            assert relative(tensors[i][lane], one) < 2e-6
        skipped = by_tensor and lr[lane, i] == 0
        assert t[i][lane] == done[lane] + (0 if skipped else 1)
    if not by_tensor:
        cast = torch.empty_like(copy)
        copy_to_fp16_(cast, w[2], range(3))
        assert torch.equal(copy, cast)


def test_block_amax():
    from holdfast.kernels import padded_images

    dense = torch.randn(3, 2, 5, 70, 60, device=DEVICE)
    for x in (dense, dense.transpose(2, 4), dense.permute(0, 1, 4, 2, 3), dense[::2], dense * 0):
        assert torch.equal(
            padded_images.block_amax(x).amax(1).view(torch.float32), x.abs().amax((1, 2, 3, 4))
        )


@pytest.mark.parametrize("shape", [(2, 3, 5, 3, 2), (3, 4, 70, 1, 1), (2, 40, 6, 8, 8)])
@pytest.mark.parametrize("epilogue", [None, "relu", "residual"])
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_norms_record_the_amax_of_what_they_write(shape, epilogue, kind):
    from holdfast.kernels import batchnorm, groupnorm
    from holdfast.kernels.amax import recorded_amax, recording_amax

    lanes, channels, relu = shape[0], shape[2], epilogue is not None
    x, dy, other = (torch.randn(shape, device=DEVICE) for _ in range(3))
    x[0] *= 100
    w, b = (torch.randn(lanes, channels, device=DEVICE) for _ in range(2))
    residual = other if epilogue == "residual" else None
    with recording_amax():
        if kind == "batch":
            y, mean, rstd, *_ = batchnorm._forward(x, w, b, residual, (None,) * 3, None, 1e-5, 0.1, relu)
            output = None if residual is None else y
            dx, *_ = batchnorm._backward(relu, dy, x, w, b, None, mean, rstd, output)
        else:
            y, mean, rstd = groupnorm._forward(x, w, b, residual, 1 if channels == 5 else 2, 1e-5, relu)
            dx, *_ = groupnorm._backward(relu, dy, x, w, b, mean, rstd, None if residual is None else y)
        for images in (y, dx):
            found = recorded_amax(images)
            assert torch.equal(found.amax(1).view(torch.float32), images.abs().amax((1, 2, 3, 4)))


def test_pooling_and_convolutions_record_the_amax_of_what_they_write(monkeypatch):
    from holdfast.kernels import conv_relu_maxpool, layers
    from holdfast.kernels.amax import record_amax, record_amax_bound, recorded_amax, recording_amax
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x = torch.randn(2, 3, 4, 12, 12, device=DEVICE)
    x[1] *= 100
    w = torch.randn(2, 6, 4, 3, 3, device=DEVICE)
    geometry = Geometry((12, 12), 3, 1, 1)
    with recording_amax():
        y, *saved = layers._forward(x, w, None, geometry, True, False)
        dx, *_ = layers._backward(geometry, True, torch.randn_like(y), w, *saved)
        for images in (y, dx):
            found = recorded_amax(images)
            assert torch.equal(found.amax(1).view(torch.float32), images.abs().amax((1, 2, 3, 4)))
    with recording_amax():
        flat, *_ = layers._forward(x, w, None, geometry, True, True)
        assert recorded_amax(flat) is None  # it is not read by a convolution
        assert torch.equal(flat, y)
        fused = conv_relu_maxpool._forward(x, w, None, geometry, False)
        found = recorded_amax(fused)
        assert torch.equal(found.amax(1).view(torch.float32), fused.amax((1, 2, 3, 4)))
    with recording_amax():
        record_amax_bound(x, 12.5)
        assert recorded_amax(x).view(torch.float32).tolist() == [[12.5]] * 2
        record_amax(y, torch.zeros(2, 5000, dtype=torch.int32, device=DEVICE))
        assert recorded_amax(y) is None  # too many blocks to be read repeatedly


@pytest.mark.parametrize("shape", [(3, 50, 10), (2, 7, 100), (1, 1, 2), (4, 300, 62), (2, 3, 1000)])
@pytest.mark.parametrize("masked", [False, True])
def test_mean_cross_entropy(shape, masked):
    from holdfast.kernels.cross_entropy import mean_cross_entropy

    logits = 5 * torch.randn(shape, device=DEVICE)
    labels = torch.randint(shape[2], shape[:2], device=DEVICE)
    mask = (torch.rand(shape[:2], device=DEVICE) < 0.7).float()
    mask[0] = 0  # a lane that is all padding
    weight = mask if masked else torch.ones_like(mask)

    def exact(z, y, m):
        losses = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        return ((losses * m).sum(1) / m.sum(1).clamp(min=1)).sum()

    truth = logits.double().requires_grad_()
    want = exact(truth, labels, weight.double())
    (dlogits,) = torch.autograd.grad(want, truth)
    dims = (0, 0, 0 if masked else None)
    ours = vmap(grad_and_value(mean_cross_entropy), in_dims=dims)(logits, labels, mask if masked else None)
    # A loss near 0 is a difference of logits, and inherits their absolute rounding error.
    assert float(ours[1].sum()) == pytest.approx(float(want), rel=1e-5, abs=1e-6)
    assert torch.allclose(ours[0].double(), dlogits, rtol=1e-4, atol=1e-7)


def test_cross_entropy_as_a_term_of_a_sum():
    from holdfast.kernels.cross_entropy import mean_cross_entropy

    logits, labels = torch.randn(2, 3, 4, device=DEVICE), torch.tensor([[0, 3, 1], [2, 2, 0]], device=DEVICE)

    def objective(z, y, unit_grad):
        return mean_cross_entropy(z, y, None, unit_grad) + (z * z).sum()

    multiplied, unit = (
        vmap(grad_and_value(objective), (0, 0, None))(logits, labels, unit_grad)
        for unit_grad in (False, True)
    )
    assert all(map(torch.equal, multiplied, unit))


def test_cross_entropy_of_nan():
    from holdfast.kernels.cross_entropy import mean_cross_entropy

    logits = torch.zeros(3, 4, device=DEVICE)
    logits[1, 2] = float("nan")
    assert torch.isnan(mean_cross_entropy(logits, torch.zeros(3, dtype=torch.long, device=DEVICE), None))


@pytest.mark.parametrize("tf32", [False, True])
# The lane dimension of images and filters; None if all lanes share them.
@pytest.mark.parametrize(("images", "filters"), [(0, 0), (None, 0), (0, None)])
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "stride", "size", "bias", "pooled"),
    [
        (16, 16, 3, 1, (4, 2), True, True),
        (32, 16, 3, 1, (2, 2), False, False),
        (3, 8, 3, 1, (4, 4), False, True),
        (64, 64, 1, 1, (2, 2), False, False),
        (32, 32, 3, 2, (2, 3), True, False),
    ],
)
def test_a_layer_under_vmap_and_grad(
    channels, outputs, kernel, stride, size, bias, pooled, images, filters, tf32, monkeypatch
):
    from holdfast.kernels.layers import LaneConv2d

    if pooled and tf32:
        pytest.skip("of two nearly equal pixels fp16 may pool the other")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    layer = LaneConv2d(nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=bias)).to(DEVICE)
    x, w, b = (
        torch.randn(3, *shape, device=DEVICE)
        for shape in ((2, channels, *size), (outputs, channels, kernel, kernel), (outputs,))
    )

    def ours(w, b, x):
        y = functional_call(layer, {"weight": w} | ({"bias": b} if bias else {}), (x, pooled))
        return (y * y).sum()

    def exact(w, b, x):
        y = F.conv2d(x, w, b if bias else None, stride, kernel // 2)
        y = F.max_pool2d(F.relu(y), 2) if pooled else y
        return (y * y).sum()

    given = [t if dim == 0 else t[0] for t, dim in ((w, filters), (b, 0), (x, images))]
    # With the gradient in the images, and without.
    for argnums in [(0, 1, 2), (0, 1)] if bias else [(0, 2), (0,)]:
        got = vmap(grad(ours, argnums), in_dims=(filters, 0, images))(*given)
        truth = vmap(grad(exact, argnums), in_dims=(filters, 0, images))(*(t.double() for t in given))
        for value, reference in zip(got, truth, strict=True):
            assert relative(value, reference) < (2e-3 if tf32 else 1e-5)


def test_padding_as_wide_as_the_kernel_is_not_supported():
    from holdfast.kernels.layers import LaneConv2d

    assert LaneConv2d.supports(nn.Conv2d(1, 1, 3, padding=2))
    assert not LaneConv2d.supports(nn.Conv2d(1, 1, 3, padding=3))


@takes_minutes
def test_layers_under_vmap_and_grad(monkeypatch):
    from holdfast import kernels

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 14 * 14, 33), nn.ReLU(), nn.Linear(33, 10),
    ).to(DEVICE)  # fmt: skip
    fast = copy.deepcopy(plain)
    kernels.install(fast)
    params = {k: torch.randn(4, *v.shape, device=DEVICE) * 0.1 for k, v in plain.named_parameters()}
    x = torch.randn(4, 5, 3, 32, 32, device=DEVICE)

    def gradients(net):
        return vmap(grad(lambda p, v: functional_call(net, p, (v,)).square().mean()))(params, x)

    want, got = gradients(plain), gradients(fast)
    for name in want:
        assert relative(got[name], want[name].double()) < 1e-4


@pytest.mark.parametrize("size", [(33, 10, 5), (512, 10, 50), (1000, 62, 70)])  # inputs, outputs, samples
def test_small_linear_layers_with_shared_weights_or_samples(size):
    from holdfast.kernels.small_linear import linear

    inputs, outputs, samples = size
    x, w, b = (torch.randn(3, *s, device=DEVICE) for s in ((samples, inputs), (outputs, inputs), (outputs,)))

    def squares(of):
        return lambda *tensors: of(*tensors).square().sum()

    for dims in ((0, 0, 0), (None, 0, 0), (0, None, None), (0, None, 0)):
        given = [t if dim == 0 else t[0] for t, dim in zip((x, w, b), dims, strict=True)]
        exact = [t.double() for t in given]
        want = vmap(grad(squares(F.linear), argnums=(0, 1, 2)), in_dims=dims)(*exact)
        got = vmap(grad(squares(linear), argnums=(0, 1, 2)), in_dims=dims)(*given)
        for value, truth in zip(got, want, strict=True):
            assert relative(value, truth) < 1e-5


@pytest.mark.parametrize(
    "shape", [(3, 5, 64, 32, 32, 2), (2, 3, 512, 4, 4, 2), (1, 2, 6, 5, 7, 3), (2, 2, 4, 9, 3, 1)]
)
@pytest.mark.parametrize("epilogue", ["none", "relu", "residual"])
def test_group_norm_and_its_gradients(shape, epilogue):
    from holdfast.kernels.groupnorm import group_norm

    lanes, batch, channels, height, width, groups = shape
    x = 3 * torch.randn(lanes, batch, channels, height, width, device=DEVICE) + 20
    w, b = (torch.randn(lanes, channels, device=DEVICE) for _ in range(2))
    residual, dy = (torch.randn_like(x) for _ in range(2))

    def ours(x, w, b, residual, dy):
        y = group_norm(
            x, w, b, groups, 1e-5, epilogue == "relu", residual if epilogue == "residual" else None
        )
        return (y.square() * dy).sum(), y  # where ReLU may round either way the gradient is small

    def exact(x, w, b, residual, dy):
        y = F.group_norm(x, groups, w, b)
        y = F.relu(y + residual) if epilogue == "residual" else F.relu(y) if epilogue == "relu" else y
        return (y.square() * dy).sum(), y

    wrt = (0, 1, 2, 3) if epilogue == "residual" else (0, 1, 2)
    wanted, truth = vmap(grad(exact, wrt, has_aux=True))(*(t.double() for t in (x, w, b, residual, dy)))
    for images in (
        x,
        x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
    ):  # channels first, and last
        found, y = vmap(grad(ours, wrt, has_aux=True))(images, w, b, residual, dy)
        for value, reference in zip((*found, y), (*wanted, truth), strict=True):
            assert relative(value, reference) < 1e-5


class Inspected(nn.Module):
    """Returns the values between the layers of a Sequential too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 5), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        values = [self.body(x), self.body[:2](x).flatten(1)]
        for layer in self.body:
            x = layer(x)
            values.append(x.flatten(1))
        return torch.cat(values, 1)


def test_a_sequential_can_be_sliced_and_iterated(monkeypatch):
    from holdfast import kernels

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if not INTERPRETED:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    plain, x = Inspected().to(DEVICE), torch.randn(2, 3, 2, 8, 8, device=DEVICE)
    fast = copy.deepcopy(plain)
    kernels.install(fast)
    want, got = vmap(plain)(x), vmap(fast)(x)
    assert relative(got, want.double()) < 1e-5


def test_a_residual_network_with_batch_norms_and_its_stem(monkeypatch):
    from holdfast import kernels
    from holdfast.models.network import Network
    from holdfast.models.resnet import ResNet

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if not INTERPRETED:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    net = ResNet((1,), (3, 3), 1, norm="batch", stem="7x7").build((3, 12, 12), 5).to(DEVICE)
    plain, x = Network(net), torch.randn(2, 3, 3, 12, 12, device=DEVICE)
    plain.own_kernels = False
    monkeypatch.setattr(kernels, "unavailable", lambda device, dtype: None)
    fast = Network(net)
    params = {k: v + 0.05 * torch.randn(2, *v.shape, device=DEVICE) for k, v in plain.params.items()}
    buffers = {k: v.expand(2, *v.shape).clone() for k, v in plain.buffers.items()}

    def gradients(network):
        def objective(p, b, v):
            out, after = network.pure(p, b, v)
            return out.logits.square().mean(), after

        return vmap(grad(objective, has_aux=True))(params, buffers, x)

    for want, got in zip(gradients(plain), gradients(fast), strict=True):  # of the weights; the statistics
        for name, value in want.items():
            assert relative(got[name], value.double()) < 1e-4, name


def residual_blocks(norm):
    """A block of the vectorized engine without kernels, and one that may use them."""
    from holdfast.models.layers import BatchNorm
    from holdfast.models.resnet import _Residual

    layer = BatchNorm(nn.BatchNorm2d(6), tracks=True) if norm == "batch" else nn.GroupNorm(2, 6)
    layer.pure = True
    for tensor in (*layer.parameters(), *list(layer.buffers())[:1]):
        nn.init.normal_(tensor)
    plain = _Residual(nn.Sequential(nn.Tanh(), layer), nn.Sigmoid()).to(DEVICE)
    fast = copy.deepcopy(plain)
    fast.branch[1].own_kernels = True
    return plain, fast


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_residual_block_ends_in_one_kernel(norm, monkeypatch):
    from holdfast import kernels

    (plain, fast), x = residual_blocks(norm), torch.randn(5, 6, 3, 4, device=DEVICE)
    kernels.install(fast)
    assert plain.state_dict().keys() == fast.state_dict().keys()
    monkeypatch.setattr(fast.relu, "forward", None)  # it is not called
    assert relative(fast(x).detach(), plain(x)) < 1e-6
    plain.eval()
    fast.eval()
    assert relative(fast(x).detach(), plain(x)) < 1e-6  # with running statistics, if there are any


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("hooked", ["branch", "branch.1", "relu", "shortcut"])
def test_hooks_see_each_step_of_a_residual_block(hooked, norm):
    from holdfast import kernels

    blocks, x, seen = residual_blocks(norm), torch.randn(5, 6, 3, 4, device=DEVICE), []
    for block in blocks:
        block.get_submodule(hooked).register_forward_hook(lambda module, inputs, y: seen.append(y) or 2 * y)
    plain, fast = blocks
    kernels.install(fast)
    assert relative(fast(x).detach(), plain(x)) < 1e-6
    assert relative(seen[1].detach(), seen[0]) < 1e-6


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_residual_networks_train_as_with_the_sequential_engine(norm, monkeypatch):
    from holdfast import kernels
    from holdfast.models.resnet import ResNet

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (14, 3, 8, 8), dtype=np.uint8), rng.integers(0, 4, 14)
    dataset = hf.Dataset.from_arrays(x, y, x, y, preprocess=Preprocess((0.5,) * 3, (0.5,) * 3))
    federation = Federation(dataset, np.arange(14), np.array([0, 7, 14]))
    settings = Settings(rounds=1, batch_size=4, lr=0.002, momentum=0.9)
    torch.manual_seed(0)
    model = ResNet((1, 1), (3, 3), 1, norm=norm).build((3, 8, 8), 4)
    ended = []
    for engine in ("sequential", "vectorized"):
        if engine == "vectorized":
            monkeypatch.setattr(kernels, "unavailable", lambda device, dtype: None)
        training = Training(
            hf.FedAvg(), model, federation, settings, engine=engine, device=DEVICE, precision="float32",
            own_kernels=engine == "vectorized",
        )  # fmt: skip
        loop = training.loop(StateCache(None, None))
        loop.round(1)
        ended.append({**loop.server.params, **loop.server.buffers})
    for name, want in ended[0].items():
        assert relative(ended[1][name], want.double()) < 1e-4, name


@takes_minutes
def test_residual_networks_under_vmap_and_grad(monkeypatch):
    from holdfast import kernels
    from holdfast.models.resnet import ResNet

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    plain = ResNet((1, 1), (3, 3), 1, norm="group", stem="3x3").build((3, 16, 16), 5).to(DEVICE)
    fast = copy.deepcopy(plain)
    kernels.install(fast)
    params = {
        k: v.detach() + 0.1 * torch.randn(3, *v.shape, device=DEVICE) for k, v in plain.named_parameters()
    }
    x = torch.randn(3, 7, 3, 16, 16, device=DEVICE)

    def gradients(net):
        return vmap(grad(lambda p, v: functional_call(net, p, (v,)).square().mean()))(params, x)

    def outputs(net):
        return vmap(lambda p, v: functional_call(net, p, (v,)))(params, x)

    assert relative(outputs(fast), outputs(plain).double()) < 1e-5
    want, got = gradients(plain), gradients(fast)
    # If a ReLU's input is nearly 0, rounding decides; PyTorch's own results in float32 then differ as much.
    for name in want:
        assert relative(got[name], want[name].double()) < 1e-2


@pytest.mark.parametrize(
    ("shape", "passes"),
    [
        ((3, 50, 64, 16, 16), 2),
        ((2, 17, 70, 9, 7), 2),
        ((1, 3, 6, 37, 11), 2),
        ((2, 32, 128, 4, 4), 1),
        ((2, 32, 96, 2, 2), 1),
        ((2, 32, 512, 1, 1), 1),
        ((2, 7, 70, 5, 3), 1),
        ((1, 3, 6, 33, 9), 1),
        ((2, 5, 3, 1, 1), 1),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("epilogue", ["none", "relu", "residual"])
def test_batch_norm_its_statistics_and_gradients(shape, passes, masked, epilogue):
    from holdfast.kernels.batchnorm import _Tiling, batch_norm
    from holdfast.kernels.epilogue import channels_last

    lanes, batch, channels, *_ = shape
    x = 3 * torch.randn(shape, device=DEVICE) + 20
    assert _Tiling.of(channels_last(x)).single_pass == (passes == 1)
    w, b, mean, var = (torch.rand(lanes, channels, device=DEVICE) for _ in range(4))
    mask = (
        torch.arange(batch, device=DEVICE) < torch.tensor([[batch], [batch - 1], [2]], device=DEVICE)[:lanes]
    )
    mask, dy, residual = mask.float(), torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
    batches = torch.arange(7, 7 + lanes, device=DEVICE)

    def normalised(x, w, b, residual, running, mask):
        mask, residual = mask if masked else None, residual if epilogue == "residual" else None
        return batch_norm(x, w, b, running, mask, 1e-5, 0.1, epilogue == "relu", residual)

    def ours(x, w, b, residual, mean, var, batches, mask, dy):
        y, *updated = normalised(x, w, b, residual, (mean, var, batches), mask)
        return (y.square() * dy).sum(), (y, *updated)  # where ReLU may round either way the gradient is small

    def untracked(x, w, b, residual, mask):
        return normalised(x, w, b, residual, (None,) * 3, mask)[0]

    def exact(x, w, b, residual, mean, var, batches, mask, dy):
        weight = (mask if masked else torch.ones_like(mask)).view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        count = weight.sum()
        batch_mean = (x * weight).sum((0, 2, 3)) / count
        batch_var = ((x - batch_mean.view(-1, 1, 1)).square() * weight).sum((0, 2, 3)) / count
        y = (x - batch_mean.view(-1, 1, 1)) / (batch_var + 1e-5).sqrt().view(-1, 1, 1)
        y = y * w.view(-1, 1, 1) + b.view(-1, 1, 1)
        y = F.relu(y + residual) if epilogue == "residual" else F.relu(y) if epilogue == "relu" else y
        unbiased = batch_var * count / (count - 1)
        updated = 0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * unbiased, batches + 1
        return (y.square() * dy).sum(), (y, *updated)

    given = (x, w, b, residual, mean, var, batches, mask, dy)
    wrt = (0, 1, 2, 3) if epilogue == "residual" else (0, 1, 2)
    found, kept = vmap(grad(ours, wrt, has_aux=True))(*given)
    wanted, truth = vmap(grad(exact, wrt, has_aux=True))(*(t.double() for t in given))
    for value, reference in zip((*found, *kept), (*wanted, *truth), strict=True):
        assert relative(value, reference) < 1e-5
    assert relative(vmap(untracked)(x, w, b, residual, mask), kept[0].double()) < 1e-6
