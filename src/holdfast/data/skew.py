"""Long-tailed class frequencies and synthetic feature skew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.spec import (
    Fraction,
    NonNegative,
    PositiveCount,
    PositiveFraction,
    validate_fields,
    validated_fields,
)
from holdfast.data.dataset import Dataset, Group
from holdfast.data.indexing import Floats, Ints, draw_per_class

_IMAGES_AT_ONCE = 4096


@dataclass(frozen=True)
class LongTail:
    """Class sizes that decrease exponentially from the first class to the last.

    Class i of C keeps ``floor(n_max * ratio ** (i / (C - 1)))`` random samples, where n_max is the size of the
    largest class; a class with fewer samples keeps all. ``ratio`` is the size of the last class over that of the
    first: 1 changes nothing in a balanced data set.
    ::

        class 0  ##########
        class 1  #####
        class 2  ##
        class 3  #
    """

    ratio: PositiveFraction

    def __post_init__(self) -> None:
        validate_fields(self, "long tail")

    def keep(self, labels: Ints, classes: int, rng: np.random.Generator) -> Ints:
        """Positions of the samples to keep, in ascending order."""
        largest = np.bincount(labels, minlength=classes).max()
        profile = largest * self.ratio ** (np.arange(classes) / max(classes - 1, 1))
        # Without the margin, rounding errors of the power could lose a sample.
        return draw_per_class(labels, np.floor(profile + 1e-6).astype(np.int64), rng)


def minority_classes(class_counts: ArrayLike) -> NDArray[np.bool_]:
    """The rare classes, the lower half by number of training samples: bool ``[C]``.

    Among equally frequent classes the later one counts as rarer. If all are equally frequent, none is rare.
    """
    counts = np.asarray(class_counts)
    rare = np.zeros(len(counts), np.bool_)
    if len(counts) and counts.min() < counts.max():
        rarest_first = np.lexsort((-np.arange(len(counts)), counts))
        rare[rarest_first[: len(counts) // 2]] = True
    return rare


@dataclass(frozen=True)
class FeatureSkew:
    """Image transformations that differ between clients: rotation, blur, contrast, colour, noise.

    There are ``groups`` domains, and client k belongs to domain ``k % groups``; by default every client is a
    domain of its own. The values of each transformation are evenly spaced over its range and assigned to the domains
    in random order.

    Attributes:
        rotation: rotation by -rotation to +rotation degrees.
        blur: Gaussian blur with a standard deviation of 0 to ``blur`` pixels.
        contrast: contrast is multiplied by 1 - contrast to 1 + contrast.
        colour: each channel is multiplied by 1 - colour to 1 + colour, drawn separately by channel.
        noise: Gaussian noise with a standard deviation of 0 to ``noise`` (1 is the range from black to white).
        groups: the number of domains.
    """

    rotation: NonNegative = 0.0
    blur: NonNegative = 0.0
    contrast: Fraction = 0.0
    colour: Fraction = 0.0
    noise: NonNegative = 0.0
    groups: PositiveCount | None = None

    def __post_init__(self) -> None:
        values = validated_fields(self, "feature skew")
        if not any(value for key, value in values.items() if key != "groups"):
            raise HoldfastError(
                "feature skew needs at least one of rotation, blur, contrast, colour and noise"
            )

    def apply(self, dataset: Dataset, owners: Ints, clients: int, seed: int) -> Dataset:
        """The data set with the transformation of its domain applied to every image, and a group ``domain``.

        ``owners`` is the client of each training sample, or -1 for none. Samples without an owner, and the test
        samples, are divided equally among the domains, so that accuracy can be measured by domain.
        """
        if dataset.x_train.dtype != torch.uint8 or dataset.x_train.ndim != 4:
            raise HoldfastError(f"feature skew needs images (uint8, 4 dimensions); '{dataset.name}' has none")
        if "domain" in dataset.groups:
            raise HoldfastError(f"'{dataset.name}' has domains already; feature skew would hide them")
        domains = clients if self.groups is None else min(self.groups, clients)
        train = np.where(owners >= 0, owners % domains, _even_domains(len(owners), domains, seed, "train"))
        test = _even_domains(len(dataset.y_test), domains, seed, "test")
        group = Group(tuple(f"skew {domain}" for domain in range(domains)), train, test)
        transforms = self._transforms(domains, dataset.shape[0], seed)
        return replace(
            dataset,
            x_train=_transformed(dataset.x_train, train, transforms, seed, "train"),
            x_test=_transformed(dataset.x_test, test, transforms, seed, "test"),
            groups=MappingProxyType({**dataset.groups, "domain": group}),
        )

    def _transforms(self, domains: int, channels: int, seed: int) -> list[_Transform]:
        rng = generator(seed, "feature skew")

        def spread(low: float, high: float) -> Floats:
            return rng.permutation(np.linspace(low, high, domains))

        rotations, blurs = spread(-self.rotation, self.rotation), spread(0, self.blur)
        contrasts, noises = spread(1 - self.contrast, 1 + self.contrast), spread(0, self.noise)
        colours = np.stack([spread(1 - self.colour, 1 + self.colour) for _ in range(channels)], 1)
        values = zip(rotations, blurs, contrasts, colours, noises, strict=True)
        return [_Transform(*value) for value in values]


@dataclass(frozen=True)
class _Transform:
    """The image transformation of one domain."""

    degrees: float
    blur: float
    contrast: float
    colour: Floats
    noise: float

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Transform uint8 images ``[n, channels, height, width]``."""
        x = images.float() / 255
        if self.degrees:
            x = _rotated(x, self.degrees)
        if self.blur:
            x = _blurred(x, self.blur)
        mean = x.mean((1, 2, 3), keepdim=True)
        x = (x - mean) * self.contrast + mean
        x = x * torch.from_numpy(self.colour).float()[:, None, None]
        if self.noise:
            x = x + self.noise * torch.from_numpy(rng.standard_normal(x.shape, np.float32))
        return (x * 255).round_().clamp_(0, 255).byte()


def _even_domains(samples: int, domains: int, seed: int, part: str) -> Ints:
    return generator(seed, f"feature skew: domains of {part}").permutation(samples) % domains


def _transformed(images: Tensor, domains: Ints, transforms: list[_Transform], seed: int, part: str) -> Tensor:
    transformed = torch.empty_like(images)
    order = torch.from_numpy(np.argsort(domains, kind="stable"))
    sizes = np.bincount(domains, minlength=len(transforms)).tolist()
    for domain, (transform, members) in enumerate(zip(transforms, torch.split(order, sizes), strict=True)):
        rng = generator(seed, f"feature skew: noise of {part}", domain)
        for batch in torch.split(members, _IMAGES_AT_ONCE):
            transformed[batch] = transform(images[batch], rng)
    return transformed


def _rotated(x: Tensor, degrees: float) -> Tensor:
    """Rotate images about their centre, keeping the aspect ratio; pixels from outside the image are black."""
    if not len(x):
        return x
    height, width = x.shape[-2:]
    angle = np.deg2rad(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    matrix = torch.tensor(
        [[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], dtype=torch.float32
    )
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian of standard deviation ``sigma`` pixels, rows first, then columns."""
    radius = min(int(np.ceil(3 * sigma)), min(x.shape[-2:]) - 1)
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma) ** 2)
    channels = x.shape[1]
    kernel = (weights / weights.sum()).expand(channels, 1, 1, -1)
    x = F.conv2d(F.pad(x, (radius, radius, 0, 0), "reflect"), kernel, groups=channels)
    return F.conv2d(F.pad(x, (0, 0, radius, radius), "reflect"), kernel.transpose(2, 3), groups=channels)
