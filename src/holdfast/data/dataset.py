"""A data set in memory: arrays, class names, and how a sample becomes a model's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from torch import Tensor

from holdfast.data.preprocess import Preprocess


@dataclass(frozen=True)
class Group:
    """A property every sample has besides its class: which writer, which domain.

    ``train`` and ``test`` are int64 arrays, one entry per sample, indexing ``names``.
    """

    names: tuple[str, ...]
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples with their labels.

    Images are uint8 ``[N, channels, height, width]`` and stay so in memory; ``preprocess`` turns a batch of
    them into float32 on whatever device it lies. Anything else is float32 ``[N, ...]`` and is used as it is.
    Labels are int64 ``[N]``, from 0 to ``len(classes) - 1``.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess = Preprocess()
    groups: Mapping[str, Group] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def num_classes(self) -> int:
        """How many classes there are (C)."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch dimension."""
        return tuple(self.x_train.shape[1:])
