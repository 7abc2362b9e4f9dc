import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.preprocess import PRESETS, Preprocess, preprocess_for

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def images(n=7, channels=3, height=9, width=11):
    return generator(0, "images").integers(0, 256, (n, channels, height, width), dtype=np.uint8)


def by_hand(x, draws, p):
    """The expected result, sample by sample, in the order of the papers' code: PIL, tensor, normalise, cutout."""
    out = []
    mean, std = (np.array(v)[:, None, None] for v in (p.mean, p.std))
    for image, (dy, dx, flip, cy, cx) in zip(x, draws, strict=True):
        height, width = image.shape[1:]
        around = ((0, 0), (p.crop, p.crop), (p.crop, p.crop))
        padded = np.pad(image, around, mode="constant" if p.crop_mode == "zeros" else "reflect")
        image = padded[:, dy : dy + height, dx : dx + width]
        if flip:
            image = image[:, :, ::-1]
        image = (image / 255 - mean) / std
        if p.cutout:
            half = p.cutout // 2
            top, bottom = np.clip([cy - half, cy + half], 0, height)
            left, right = np.clip([cx - half, cx + half], 0, width)
            image[:, top:bottom, left:right] = 0
        out.append(image)
    return np.stack(out)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize(
    ("crop", "flip", "cutout"), [(4, True, 6), (2, False, 0), (0, True, 0), (0, False, 5)]
)
def test_augmentation_is_that_of_the_papers(mode, crop, flip, cutout):
    p = Preprocess(MEAN, STD, crop, mode, flip, cutout)
    x = images(n=40)
    draws = p.draw(generator(1, "augment"), 40, x.shape[1:])
    got = p(torch.from_numpy(x), torch.from_numpy(draws), dtype=torch.float64).numpy()
    np.testing.assert_allclose(got, by_hand(x, draws, p), atol=1e-12)


def test_without_draws_nothing_is_random():
    p = Preprocess(MEAN, STD, crop=4, flip=True, cutout=4)
    x = images()
    kept = x.copy()
    got = p(torch.from_numpy(x))
    assert got.dtype == torch.float32
    expected = (x / 255 - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-6)
    np.testing.assert_array_equal(x, kept)


def test_draws_cover_exactly_their_range():
    p = Preprocess(crop=2, flip=True, cutout=4)
    draws = p.draw(generator(0, "augment"), 4000, (1, 5, 7))
    assert draws.dtype == np.int16
    assert draws.shape == (4000, 5)
    for column, size in enumerate((5, 5, 2, 5, 7)):
        counts = np.bincount(draws[:, column])
        assert len(counts) == size
        assert counts.min() > 0.8 * 4000 / size
    assert not Preprocess(MEAN, STD).draw(generator(0, "augment"), 3, (3, 5, 5)).any()


@pytest.mark.parametrize(
    ("p", "columns"),
    [(Preprocess(crop=1), {0, 1}), (Preprocess(flip=True), {2}), (Preprocess(cutout=2), {3, 4})],
)
def test_steps_that_are_off_draw_zeros(p, columns):
    drawn = p.draw(generator(0, "augment"), 200, (3, 8, 8)).any(axis=0)
    assert set(np.flatnonzero(drawn)) == columns
    assert p.augments


def test_floats_pass_unchanged_or_are_normalised_as_they_are():
    x = torch.from_numpy(generator(0, "floats").normal(size=(4, 6)).astype(np.float32))
    assert Preprocess()(x) is x
    kept = x.clone()
    torch.testing.assert_close(Preprocess((0.5,), (2.0,))(x), (x - 0.5) / 2)
    assert torch.equal(x, kept)


def test_without_constants_images_are_scaled_and_one_constant_applies_to_all_channels():
    x = torch.from_numpy(images())
    torch.testing.assert_close(Preprocess()(x), x / 255)
    torch.testing.assert_close(Preprocess((0.5,), (0.5,))(x), x / 127.5 - 1)


def test_runs_under_vmap_and_keeps_no_inference_tensors():
    p = Preprocess((0.31, 0.32, 0.33), STD, crop=2, flip=True, cutout=4)
    x = images(n=6).reshape(2, 3, 3, 9, 11)
    draws = torch.from_numpy(p.draw(generator(0, "augment"), 6, x.shape[2:]).reshape(2, 3, 5))
    with torch.inference_mode():
        lanes = torch.func.vmap(p)(torch.from_numpy(x), draws)
    for lane in range(2):
        torch.testing.assert_close(lanes[lane].clone(), p(torch.from_numpy(x[lane]), draws[lane]))
    p(torch.zeros(1, 3, 9, 11, requires_grad=True)).sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_can_be_captured_in_a_cuda_graph():
    p = Preprocess(MEAN, STD, crop=2, flip=True, cutout=4)
    x = torch.from_numpy(images())
    draws = torch.from_numpy(p.draw(generator(0, "augment"), len(x), tuple(x.shape[1:])))
    x_device, draws_device = x.cuda(), draws.cuda()
    p(x_device, draws_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = p(x_device, draws_device)
    graph.replay()
    torch.testing.assert_close(out.cpu(), p(x, draws))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Preprocess((0.5,), ()), "one entry per channel"),
        (lambda: Preprocess((0.5,), (0.0,)), "std above 0"),
        (lambda: Preprocess(crop=-1), "crop is -1; it must be at least 0"),
        (
            lambda: Preprocess(crop=1, crop_mode="reflct"),
            "crop_mode is 'reflct'; it must be zeros or reflect",
        ),
        (lambda: Preprocess(flip=True).check((6,)), "need images"),
        (lambda: Preprocess(MEAN, STD).check((1, 8, 8)), "3 channels"),
        (lambda: Preprocess(crop=8, crop_mode="reflect").check((1, 8, 8)), "larger"),
        (lambda: preprocess_for("cifar10", "fednt"), "did you mean fedntd"),
        (lambda: preprocess_for("svhn", "fedka"), "does not include 'svhn'"),
    ],
)
def test_invalid_arguments_raise_errors(make, words):
    with pytest.raises(HoldfastError, match=words):
        make()


def test_presets_are_those_of_the_papers():
    cifar = preprocess_for("cifar10", "fedntd")
    assert (cifar.crop, cifar.crop_mode, cifar.flip, cifar.cutout) == (4, "zeros", True, 16)
    assert cifar.mean == (0.49139968, 0.48215827, 0.44653124)
    cinic = preprocess_for("cinic10", "fedntd")
    assert (cinic.crop, cinic.crop_mode, cinic.flip, cinic.cutout) == (4, "reflect", True, 0)
    assert preprocess_for("mnist", "fedntd").flip
    assert preprocess_for("emnist", "fedfa") == Preprocess()
    assert not any(p.augments for name in ("plain", "fedfa", "fedka") for p in PRESETS[name].values())
    assert preprocess_for("my-own") == Preprocess()


@pytest.mark.parametrize(
    "p", [Preprocess(), Preprocess(MEAN, STD), Preprocess((0.9,), (0.1,)), PRESETS["plain"]["cifar10"]]
)
def test_largest_bounds_every_byte(p):
    every = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    assert float(p(every).abs().max()) == pytest.approx(p.largest())
