"""Long tails, minority classes, synthetic feature skew and mixed domains."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.dataset import Dataset, Group
from holdfast.data.federation import Federation, federate
from holdfast.data.mixed import mix_domains, mixed_digits
from holdfast.data.partitions import IID, ClassesPerClient, Dirichlet
from holdfast.data.skew import FeatureSkew, LongTail, _blurred, minority_classes


def images(n=40, channels=3, size=12, classes=4, name="toy", seed=0) -> Dataset:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.integers(60, 180, (n, channels, size, size), dtype=np.uint8))
    y = torch.arange(n) % classes
    return Dataset(name, x, y, x[: n // 2].clone(), y[: n // 2].clone(), tuple(map(str, range(classes))))


def test_the_long_tail_of_cifar10_is_that_of_the_papers():
    labels = np.repeat(np.arange(10), 5000)
    kept = LongTail(0.5).keep(labels, 10, generator(0, "test"))
    counts = np.bincount(labels[kept])
    assert counts[0] == 5000
    assert counts[-1] == 2500
    np.testing.assert_array_equal(counts, [int(5000 * 2 ** (-i / 9) + 1e-9) for i in range(10)])
    assert len(np.unique(kept)) == len(kept)


def test_a_long_tail_is_not_shortened_by_rounding():
    # 180 * 0.7 is 125.99999999999999 in floating point.
    labels = np.repeat([0, 1], 180)
    assert np.bincount(labels[LongTail(0.7).keep(labels, 2, generator(0, "test"))]).tolist() == [180, 126]


@settings(deadline=None)
@given(ratio=st.floats(0.01, 1), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_long_tail_never_takes_more_than_there_is(ratio, sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.bincount(
        labels[LongTail(ratio).keep(labels, len(sizes), generator(1, "test"))], minlength=len(sizes)
    )
    for i, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        profile = max(sizes) * ratio ** (i / max(len(sizes) - 1, 1))
        assert count <= size
        assert count == size or abs(count - np.floor(profile)) <= 1


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, float("nan")])
def test_a_ratio_outside_0_to_1_is_refused(ratio):
    with pytest.raises(HoldfastError, match=r"ratio is .*; it must be (above 0 and at most 1|a number)"):
        LongTail(ratio)


@pytest.mark.parametrize(
    ("counts", "rare"),
    [
        ([50, 40, 30, 20], [0, 0, 1, 1]),
        ([20, 50, 10, 40, 30], [1, 0, 1, 0, 0]),
        ([7, 7, 7, 7], [0, 0, 0, 0]),
        ([7, 7, 7, 8], [0, 1, 1, 0]),
        ([9, 0, 5], [0, 1, 0]),
        ([3], [0]),
    ],
)
def test_minority_classes_are_the_lower_half(counts, rare):
    assert minority_classes(counts).tolist() == [bool(r) for r in rare]


def domains_of(federation) -> np.ndarray:
    return federation.dataset.groups["domain"].train


def test_clients_of_a_group_share_a_domain_and_test_samples_are_divided_equally():
    federation = federate(images(), IID(), clients=6, skew=FeatureSkew(rotation=30, groups=3), public=[0, 1])
    for k in range(6):
        assert set(domains_of(federation)[federation.client(k)]) == {k % 3}
    group = federation.dataset.groups["domain"]
    assert len(group.names) == 3
    assert np.bincount(group.test).tolist() == [7, 7, 6]
    assert (
        len(federate(images(), IID(), clients=6, skew=FeatureSkew(noise=0.1)).dataset.groups["domain"].names)
        == 6
    )


def by_domain(skew: FeatureSkew, plain: Dataset, clients: int = 3):
    """For each domain: its training images before and after, as floats from 0 to 1."""
    federation = federate(plain, IID(), clients=clients, skew=skew)
    for domain in range(clients):
        members = torch.from_numpy(np.flatnonzero(domains_of(federation) == domain))
        yield plain.x_train[members].double() / 255, federation.dataset.x_train[members].double() / 255


def test_noise_levels_are_spread_over_the_domains():
    # Grey images, so that no noise is clipped.
    plain = images(90)
    plain.x_train.fill_(128)
    deviations = sorted(
        float((after - before).std()) for before, after in by_domain(FeatureSkew(noise=0.1), plain)
    )
    assert deviations == pytest.approx([0, 0.05, 0.1], abs=0.003)


def test_contrast_scales_the_distance_from_the_mean():
    factors = []
    for before, after in by_domain(FeatureSkew(contrast=0.4), images()):
        centred, changed = (x - x.mean((1, 2, 3), keepdim=True) for x in (before, after))
        factors.append(float((centred * changed).sum() / (centred**2).sum()))
        torch.testing.assert_close(before.mean((1, 2, 3)), after.mean((1, 2, 3)), atol=2e-3, rtol=0)
    assert sorted(factors) == pytest.approx([0.6, 1.0, 1.4], abs=0.01)


def test_colour_scales_each_channel():
    factors = np.array(
        [
            (after.sum((0, 2, 3)) / before.sum((0, 2, 3))).numpy()
            for before, after in by_domain(FeatureSkew(colour=0.3), images())
        ]
    )
    for channel in factors.T:
        assert sorted(channel) == pytest.approx([0.7, 1.0, 1.3], abs=0.01)


def test_a_quarter_turn_is_a_quarter_turn():
    for x, after in by_domain(FeatureSkew(rotation=90), images()):
        turns = [torch.rot90(x, k, (2, 3)) for k in (-1, 0, 1)]
        assert min(float((after - turn).abs().max()) for turn in turns) < 0.01


def test_blur_spreads_a_point_as_a_gaussian_does():
    plain = images(30, channels=1, size=21)
    plain.x_train.zero_()
    plain.x_train[:, :, 10, 10] = 255
    spreads = []
    place = torch.arange(21) - 10
    for _, after in by_domain(FeatureSkew(blur=1.5), plain):
        row = after[0, 0].sum(1)
        spreads.append(float((row * place**2).sum() / row.sum()) ** 0.5)
    assert sorted(spreads) == pytest.approx([0, 0.75, 1.5], abs=0.1)


def test_blur_reaches_no_farther_than_a_narrow_image():
    grey = torch.full((1, 1, 3, 40), 100.0)
    torch.testing.assert_close(_blurred(grey, 3.0), grey)


def test_blur_keeps_brightness():
    for before, after in by_domain(FeatureSkew(blur=2), images()):
        assert float(after.mean()) == pytest.approx(float(before.mean()), abs=0.01)


def test_feature_skew_is_seeded():
    plain, skew = images(), FeatureSkew(rotation=20, blur=0.5, noise=0.1, contrast=0.2, colour=0.2, groups=2)
    one, again, other = (federate(plain, IID(), clients=4, seed=s, skew=skew).dataset for s in (0, 0, 1))
    assert torch.equal(one.x_train, again.x_train)
    assert torch.equal(one.x_test, again.x_test)
    assert not torch.equal(one.x_train, other.x_train)
    assert one.x_train.dtype == torch.uint8


def test_feature_skew_combines_with_label_skew():
    federation = federate(images(200), Dirichlet(0.2, min_size=1), clients=4, skew=FeatureSkew(noise=0.2))
    plain = federate(images(200), Dirichlet(0.2, min_size=1), clients=4)
    assert np.array_equal(federation.indices, plain.indices)
    assert federation.partition["skew"]["noise"] == 0.2


def test_the_hash_depends_on_the_skew():
    def with_noise(noise):
        return federate(images(), IID(), clients=4, skew=FeatureSkew(noise=noise)).hash

    assert with_noise(0.1) == with_noise(0.1)
    assert len({federate(images(), IID(), clients=4).hash, with_noise(0.1), with_noise(0.2)}) == 3


def test_a_file_whose_skew_was_changed_is_refused(tmp_path):
    file = tmp_path / "federation.json"
    federate(images(), IID(), clients=4, skew=FeatureSkew(rotation=30)).save(file)
    file.write_text(file.read_text().replace('"rotation": 30', '"rotation": 90'))
    with pytest.raises(HoldfastError, match="hash"):
        Federation.load(file, images())


@pytest.mark.parametrize(
    "values", [{}, {"groups": 3}, {"noise": -1}, {"noise": 1, "groups": 0}, {"contrast": 2}, {"blur": "much"}]
)
def test_invalid_feature_skews_raise_errors(values):
    with pytest.raises(HoldfastError):
        FeatureSkew(**values)


def test_feature_skew_needs_images_without_domains():
    flat = Dataset(
        "flat",
        torch.zeros(8, 3),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(2, 3),
        torch.zeros(2),
        ("a",),
    )
    with pytest.raises(HoldfastError, match="needs images"):
        federate(flat, IID(), clients=2, skew=FeatureSkew(noise=1))
    mixed = mix_domains([images(name="a"), images(name="b")])
    with pytest.raises(HoldfastError, match="has domains already"):
        federate(mixed, IID(), clients=2, skew=FeatureSkew(noise=1))


def test_mixed_domains_are_resized_and_capped():
    grey, colour = images(100, channels=1, size=16, name="grey"), images(60, size=32, name="colour", seed=1)
    mixed = mix_domains([grey, colour], size=28, per_class=20)
    assert mixed.x_train.shape == (80 + 60, 3, 28, 28)
    assert mixed.x_train.dtype == torch.uint8
    assert mixed.x_test.shape == (50 + 30, 3, 28, 28)
    domain = mixed.groups["domain"]
    assert domain.names == ("grey", "colour")
    assert np.bincount(domain.train).tolist() == [80, 60]
    assert np.bincount(domain.test).tolist() == [50, 30]
    assert np.bincount(mixed.y_train[domain.train == 0]).tolist() == [20] * 4
    assert torch.equal(mixed.x_train[0, 0], mixed.x_train[0, 2])
    assert mixed.preprocess.mean == (0.5,)
    # Resizing keeps brightness, and constant images as they are.
    assert float(mixed.x_test[:50].float().mean()) == pytest.approx(float(grey.x_test.float().mean()), abs=1)
    assert len(mix_domains([grey, colour], per_class=None).y_train) == 160


def test_resizing_is_antialiased():
    stripes = images(8, channels=1, size=84, name="stripes")
    stripes.x_train.zero_()
    stripes.x_train[..., 1::3] = 255
    resized = mix_domains([stripes]).x_train[..., 2:-2].float()
    assert float(resized.min()) > 50
    assert float(resized.max()) < 130


def test_mixed_digits_gives_every_domain_clients_of_its_own():
    parts = [images(200, size=10, name=name, seed=i) for i, name in enumerate("abc")]
    federation = mixed_digits(parts, ClassesPerClient(2), clients_per_domain=4, per_class=30)
    assert federation.clients == 12
    assert len(federation.indices) == 3 * 4 * 30
    for k in range(12):
        assert set(domains_of(federation)[federation.client(k)]) == {k // 4}
    assert ((federation.label_counts() > 0).sum(1) == 2).all()
    assert mixed_digits(parts, clients_per_domain=4).label_counts().min() > 0


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        (["mnist", "svnh"], "unknown digit domain 'svnh'; did you mean svhn"),
        ([], "one or more data sets"),
        ([images(name="a"), images(name="a")], "different names"),
        ([images(name="a"), images(name="b", classes=5)], "have different classes"),
        ([images(name="a", channels=2)], "does not consist of grey or three-channel images"),
    ],
)
def test_incompatible_domains_raise_errors(domains, message):
    with pytest.raises(HoldfastError, match=message):
        mixed_digits(domains)


@pytest.mark.realdata
@pytest.mark.skipif("HOLDFAST_DATA" not in os.environ, reason="needs HOLDFAST_DATA")
def test_mixed_digits_of_real_domains():
    federation = mixed_digits(("mnist", "usps", "svhn", "mnist-m"))
    assert federation.clients == 80
    group: Group = federation.dataset.groups["domain"]
    per_class = np.bincount(group.train * 10 + federation.dataset.y_train.numpy()).reshape(4, 10)
    assert per_class.max() == 743
    assert (per_class[[0, 2, 3]] == 743).all()
