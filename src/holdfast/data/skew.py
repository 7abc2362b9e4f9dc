"""Classes that are rare and images that look different: long tails and synthetic feature skew."""

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
from holdfast.data.dealing import Floats, Ints, draw_per_class

_IMAGES_AT_ONCE = 4096


@dataclass(frozen=True)
class LongTail:
    """Exponentially fewer samples from the first class to the last.

    Class i of C keeps ``floor(n_max * ratio ** (i / (C - 1)))`` samples, n_max being the size of the largest
    class; the surplus is dropped at random, and a class that has fewer already keeps them all.
    ``ratio`` is the rarest class's share of the commonest: 1 changes nothing in a balanced data set.
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
        """Positions of the samples that stay, in rising order."""
        largest = np.bincount(labels, minlength=classes).max()
        profile = largest * self.ratio ** (np.arange(classes) / max(classes - 1, 1))
        # A power may fall short of a whole number by rounding alone.
        return draw_per_class(labels, np.floor(profile + 1e-6).astype(np.int64), rng)


def minority_classes(class_counts: ArrayLike) -> NDArray[np.bool_]:
    """Which classes are rare: the lower half by number of training samples, bool ``[C]``.

    Of equally frequent classes the later one counts as rarer. When all are equally frequent, none is rare.
    """
    counts = np.asarray(class_counts)
    rare = np.zeros(len(counts), np.bool_)
    if len(counts) and counts.min() < counts.max():
        rarest_first = np.lexsort((-np.arange(len(counts)), counts))
        rare[rarest_first[: len(counts) // 2]] = True
    return rare


@dataclass(frozen=True)
class FeatureSkew:
    """Images that look different from client to client: rotated, blurred, coloured, noisy.

    There are ``groups`` domains, and client k belongs to domain ``k % groups``; by default every client is a
    domain of its own. Each property is spread evenly over the domains, and dealt to them at random:

    Attributes:
        rotation: domains are turned by -rotation to +rotation degrees.
        blur: domains are blurred with a Gaussian of 0 to ``blur`` pixels.
        contrast: domains have 1 - contrast to 1 + contrast times their contrast.
        colour: the strength of each channel is 1 - colour to 1 + colour, drawn channel by channel.
        noise: domains get Gaussian noise of deviation 0 to ``noise`` (1 is black to white).
        groups: how many domains.
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
        """The data set with every image changed as its domain says, and a group ``domain``.

        ``owners`` is the client of each training sample, or -1. Samples nobody holds, and the test samples,
        are dealt to the domains evenly, so that accuracy by domain can be told.
        """
        if dataset.x_train.dtype != torch.uint8 or dataset.x_train.ndim != 4:
            raise HoldfastError(f"feature skew needs images (uint8, 4 dimensions); '{dataset.name}' has none")
        if "domain" in dataset.groups:
            raise HoldfastError(f"'{dataset.name}' has domains already; feature skew would hide them")
        domains = clients if self.groups is None else min(self.groups, clients)
        train = np.where(owners >= 0, owners % domains, _evenly(len(owners), domains, seed, "train"))
        test = _evenly(len(dataset.y_test), domains, seed, "test")
        group = Group(tuple(f"skew {domain}" for domain in range(domains)), train, test)
        looks = self._looks(domains, dataset.shape[0], seed)
        return replace(
            dataset,
            x_train=_changed(dataset.x_train, train, looks, seed, "train"),
            x_test=_changed(dataset.x_test, test, looks, seed, "test"),
            groups=MappingProxyType({**dataset.groups, "domain": group}),
        )

    def _looks(self, domains: int, channels: int, seed: int) -> list[_Look]:
        rng = generator(seed, "feature skew")

        def spread(low: float, high: float) -> Floats:
            return rng.permutation(np.linspace(low, high, domains))

        turns, blurs = spread(-self.rotation, self.rotation), spread(0, self.blur)
        contrasts, noises = spread(1 - self.contrast, 1 + self.contrast), spread(0, self.noise)
        colours = np.stack([spread(1 - self.colour, 1 + self.colour) for _ in range(channels)], 1)
        return [_Look(*look) for look in zip(turns, blurs, contrasts, colours, noises, strict=True)]


@dataclass(frozen=True)
class _Look:
    """How the images of one domain look."""

    degrees: float
    blur: float
    contrast: float
    colour: Floats
    noise: float

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Change uint8 images ``[n, channels, height, width]``."""
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


def _evenly(samples: int, domains: int, seed: int, part: str) -> Ints:
    return generator(seed, f"feature skew: domains of {part}").permutation(samples) % domains


def _changed(images: Tensor, domains: Ints, looks: list[_Look], seed: int, part: str) -> Tensor:
    changed = torch.empty_like(images)
    order = torch.from_numpy(np.argsort(domains, kind="stable"))
    sizes = np.bincount(domains, minlength=len(looks)).tolist()
    for domain, (look, members) in enumerate(zip(looks, torch.split(order, sizes), strict=True)):
        rng = generator(seed, f"feature skew: noise of {part}", domain)
        for batch in torch.split(members, _IMAGES_AT_ONCE):
            changed[batch] = look(images[batch], rng)
    return changed


def _rotated(x: Tensor, degrees: float) -> Tensor:
    """Turn images about their centre, keeping the aspect ratio; what comes in from outside is black."""
    height, width = x.shape[-2:]
    angle = np.deg2rad(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    turn = torch.tensor(
        [[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], dtype=torch.float32
    )
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """Blur by a Gaussian of deviation ``sigma`` pixels, rows first, then columns."""
    reach = min(int(np.ceil(3 * sigma)), min(x.shape[-2:]) - 1)
    line = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    channels = x.shape[1]
    kernel = (line / line.sum()).expand(channels, 1, 1, -1)
    x = F.conv2d(F.pad(x, (reach, reach, 0, 0), "reflect"), kernel, groups=channels)
    return F.conv2d(F.pad(x, (0, 0, reach, reach), "reflect"), kernel.transpose(2, 3), groups=channels)
