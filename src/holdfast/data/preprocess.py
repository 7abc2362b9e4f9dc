"""Preprocessing of stored samples into model inputs: scaling, augmentation and normalisation, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import Count, validate_fields


@dataclass(frozen=True)
class Preprocess:
    """The transformation of a stored sample into a model's input.

    In this order: scale uint8 to 0..1, pad by ``crop`` pixels and crop at a random position, flip
    left-right with probability 1/2, normalise to ``(x - mean) / std`` by channel, set a random ``cutout`` x
    ``cutout`` square to 0. `draw` makes the random choices in advance, so that the transformation is a pure function.

    ``mean`` and ``std`` have one entry per channel, or one for all; empty means no normalisation.
    ``crop_mode`` is the padding: ``"zeros"`` (black, before normalisation) or ``"reflect"``.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: Count = 0
    crop_mode: Literal["zeros", "reflect"] = "zeros"
    flip: bool = False
    cutout: Count = 0

    def __post_init__(self) -> None:
        validate_fields(self, "preprocess")
        if len(self.mean) != len(self.std) or any(not deviation > 0 for deviation in self.std):
            raise HoldfastError(
                f"mean {self.mean} and std {self.std} must have one entry per channel each, std above 0"
            )

    @property
    def augments(self) -> bool:
        """Whether any step is random."""
        return bool(self.crop or self.flip or self.cutout)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error if this preprocessing cannot be applied to samples of ``shape``."""
        if len(self.mean) > 1 and (not shape or shape[0] != len(self.mean)):
            raise HoldfastError(f"mean has {len(self.mean)} channels, but a sample has shape {shape}")
        if self.augments and len(shape) != 3:
            raise HoldfastError(f"crop, flip and cutout need images [C, H, W], not samples of shape {shape}")
        if self.crop_mode == "reflect" and self.crop and self.crop >= min(shape[1:]):
            raise HoldfastError(f"reflecting {self.crop} pixels needs images larger than that, not {shape}")

    def draw(self, rng: np.random.Generator, n: int, shape: tuple[int, ...]) -> np.ndarray:
        """Random choices for ``n`` samples of ``shape``: int16 ``[n, 5]``.

        The columns are (dy, dx, flip, cut_y, cut_x): the start of the crop in the padded image, 0 to 2 crop;
        0 or 1; the centre of the cutout square. Columns of steps that are off are zeros.
        """
        if not self.augments:
            return np.zeros((n, 5), np.int16)
        self.check(shape)
        height, width = shape[1:] if self.cutout else (1, 1)
        ends = (2 * self.crop + 1, 2 * self.crop + 1, 1 + self.flip, height, width)
        return rng.integers(0, ends, size=(n, 5), dtype=np.int16)

    def __call__(
        self, x: Tensor, draws: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Convert a batch ``[n, C, H, W]`` to floats of ``dtype``, augmented by ``draws`` ``[n, 5]`` if given.

        Floats are not scaled, and int64 samples, such as tokens, are returned unchanged. Without ``draws``, as in
        evaluation, there is no augmentation.
        """
        if x.dtype == torch.int64:
            return x
        moves = None if draws is None else draws.long()
        if moves is not None and (self.crop or self.flip):
            x = self._move(x, moves)
        if self.mean:
            scale, shift = self.constants(x, dtype)
            # A copy may be changed in place; x itself, if it already has this dtype, may not.
            x = (x * scale if x.dtype == dtype else x.to(dtype).mul_(scale)).add_(shift)
        else:
            x = x.to(dtype) if x.is_floating_point() else x.to(dtype).div_(255)
        if moves is not None and self.cutout:
            x = x * self._cutout_mask(x, moves)
        return x

    def constants(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scale and shift, by channel or for all, that normalise stored samples like ``x``."""
        full = 1.0 if x.is_floating_point() else 255.0
        return _constants(self.mean or (0.0,), self.std or (1.0,), full, x.ndim - 2, x.device, dtype)

    def largest(self) -> float:
        """The largest absolute value that a stored byte, 0 to 255, is normalised to."""
        ends = [
            (end - m) / s
            for m, s in zip(self.mean or (0.0,), self.std or (1.0,), strict=True)
            for end in (0, 1)
        ]
        return max(map(abs, ends))

    def _move(self, x: Tensor, draws: Tensor) -> Tensor:
        """Crop and flip, by gathering the input pixel of every output pixel."""
        height, width = x.shape[-2:]
        dy, dx, flip = (draws[:, part, None] for part in range(3))
        rows = torch.arange(height, device=x.device) + dy
        columns = torch.arange(width, device=x.device)
        columns = columns + flip * (width - 1 - 2 * columns) + dx
        if self.crop_mode == "zeros":
            x = pad(x, (self.crop,) * 4)
        else:
            rows, columns = _mirror(rows - self.crop, height), _mirror(columns - self.crop, width)
        pixels = (rows[:, :, None] * x.shape[-1] + columns[:, None, :]).flatten(1)
        moved = x.flatten(2).gather(2, pixels[:, None].expand(-1, x.shape[1], -1))
        return moved.view(*x.shape[:2], height, width)

    def _cutout_mask(self, x: Tensor, draws: Tensor) -> Tensor:
        """0 inside the cutout square, else 1: ``[n, 1, H, W]``; squares are clipped at the border."""
        half = self.cutout // 2
        below = torch.arange(x.shape[-2], device=x.device) - draws[:, 3, None]
        right = torch.arange(x.shape[-1], device=x.device) - draws[:, 4, None]
        cut_rows, cut_columns = (
            ((-half <= offset) & (offset < half)).to(x.dtype) for offset in (below, right)
        )
        return torch.sub(1, cut_rows[:, None, :, None] * cut_columns[:, None, None, :])


def _mirror(index: Tensor, size: int) -> Tensor:
    """Indices reflected into the image: |i| at the first pixel, last - |last - i| at the last."""
    return size - 1 - (size - 1 - index.abs()).abs()


@lru_cache(maxsize=256)
def _constants(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    full: float,
    trailing: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Scale and shift by channel, cached by device: a CUDA graph cannot copy them from the host."""
    shape = (-1, *[1] * trailing)
    with torch.inference_mode(False):
        scale = torch.tensor([1 / (full * s) for s in std], dtype=dtype, device=device)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=dtype, device=device)
        return scale.view(shape), shift.view(shape)


_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_CINIC10 = ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))
_MNIST = ((0.1307,), (0.3081,))
_HALF = ((0.5,), (0.5,))
_DIGIT_DOMAINS = ("mixed-digits", "mnist", "svhn", "usps", "synth-digits", "mnist-m")

_FEDNTD = {
    "cifar10": Preprocess(
        (0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768), 4, flip=True, cutout=16
    ),
    "cifar100": Preprocess(*_CIFAR100, 4, flip=True, cutout=16),
    "cinic10": Preprocess(*_CINIC10, 4, "reflect", flip=True),
    "mnist": Preprocess(*_MNIST, 4, flip=True, cutout=16),
    "tiny-imagenet": Preprocess(*_IMAGENET, 8, "reflect", flip=True),
}

PRESETS: dict[str, dict[str, Preprocess]] = {
    # Normalisation by the data set's usual constants, without augmentation.
    "plain": {
        "digits": Preprocess((0.3053,), (0.3760,)),
        "mnist": Preprocess(*_MNIST),
        "fashion-mnist": Preprocess((0.2860,), (0.3530,)),
        "cifar10": Preprocess(*_CIFAR10),
        "cifar100": Preprocess(*_CIFAR100),
        "cinic10": Preprocess(*_CINIC10),
        "emnist": Preprocess(*_MNIST),
        "emnist-letters": Preprocess(*_MNIST),
        "emnist-byclass": Preprocess(*_MNIST),
        "femnist": Preprocess(*_MNIST),
        "usps": Preprocess((0.2545,), (0.3846,)),
        "svhn": Preprocess((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        "mnist-m": Preprocess(*_HALF),
        "synth-digits": Preprocess(*_HALF),
        "mixed-digits": Preprocess(*_HALF),
        "tiny-imagenet": Preprocess(*_IMAGENET),
    },
    "fedntd": _FEDNTD,
    # Flashback describes no transforms; it builds on FedNTD.
    "flashback": {**_FEDNTD, "femnist": Preprocess(*_MNIST)},
    "fedfa": {
        "cifar10": Preprocess((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        "cifar100": Preprocess((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        "fashion-mnist": Preprocess(*_MNIST),
        "emnist": Preprocess(),
        "femnist": Preprocess(),
        **dict.fromkeys(_DIGIT_DOMAINS, Preprocess(*_HALF)),
    },
    "fedka": {
        "cifar10": Preprocess(*_CIFAR10),
        "cifar100": Preprocess(*_CIFAR100),
        "tiny-imagenet": Preprocess(*_IMAGENET),
    },
    "pfllib": dict.fromkeys(("cifar10", "cifar100", "tiny-imagenet"), Preprocess(*_HALF)),
    # MOON also rotates CIFAR-100 by up to 15 degrees; that is left out.
    "moon": {
        "cifar10": Preprocess(
            (125.3 / 255, 123.0 / 255, 113.9 / 255),
            (63.0 / 255, 62.1 / 255, 66.7 / 255),
            4,
            "reflect",
            flip=True,
        ),
        "cifar100": Preprocess((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615), 4, flip=True),
        "tiny-imagenet": Preprocess(*_HALF),
    },
    "fedmlp": {
        "cifar10": Preprocess(*_IMAGENET, 4, flip=True),
        "cifar100": Preprocess((0.507, 0.487, 0.441), (0.267, 0.256, 0.276), 4, flip=True),
        "mnist": Preprocess(*_MNIST),
        "femnist": Preprocess(*_MNIST),
    },
}
"""Preprocessing by preset (a paper's name, or ``plain``), then by data set."""


def preprocess_for(dataset_name: str, preset: str = "plain") -> Preprocess:
    """The preprocessing of a data set in a preset: ``preprocess_for("cifar10", "fedntd")``.

    The presets are `PRESETS`. ``plain`` is defined for every data set: one without constants is scaled to 0..1. A
    paper's preset is defined for the data sets of its experiments. MOON's rotation of CIFAR-100 is left out.
    """
    if preset not in PRESETS:
        raise unknown("preprocessing preset", preset, PRESETS)
    known = PRESETS[preset]
    if preset != "plain" and dataset_name not in known:
        raise HoldfastError(
            f"preset '{preset}' does not include '{dataset_name}'; it includes {', '.join(known)}"
        )
    return known.get(dataset_name, Preprocess())
