"""Samples and targets from indexable collections, such as torch's and Hugging Face's data sets, and test shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.random import generator
from holdfast.core.spec import named, validate
from holdfast.data.arrays import LABELS_HINT, as_tensor
from holdfast.data.indexing import check_test_share, stratified_split
from holdfast.data.tables.targets import strata

Samples = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_test_share(
    x: ArrayLike | Tensor, y: ArrayLike | Tensor, share: float, seed: int, site: str = ""
) -> Samples:
    """``x_train, y_train, x_test, y_test``, with a share of each class, or of each quarter of numbers, for testing."""
    check_test_share(share)
    seed = validate("seed", seed, int)
    samples, targets = as_tensor(x, "x_train"), as_tensor(y, "y_train", LABELS_HINT)
    if not samples.ndim or not targets.ndim or not len(samples):
        raise HoldfastError("there are no samples to draw a test share from")
    if len(samples) != len(targets):
        raise HoldfastError(f"x has {len(samples)} samples, but y has {len(targets)} targets")
    train, test = stratified_split(strata(targets.numpy()), generator(seed, f"test rows of {site}"), share)
    if share and not len(test):
        raise HoldfastError(
            f"samples are too few ({len(samples)}) to draw a test share from; give test samples"
        )
    return samples[train], targets[train], samples[test], targets[test]


def read_items(data: Any, what: str = "the data set") -> tuple[np.ndarray, np.ndarray]:
    """The samples and the targets of a map-style data set, whose items are pairs (sample, target)."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise HoldfastError(
            f"{what} is {named(data)}; it must be a map-style data set, with a length and items (sample, target)"
        )
    xs, ys = [], []
    for index in range(len(data)):
        try:
            item = data[index]
        except Exception as error:
            raise HoldfastError(
                f"item {index} of {what} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise HoldfastError(
                f"item {index} of {what} is {named(item)}; it must be a pair (sample, target)"
            )
        xs.append(_array(item[0], f"the sample of item {index} of {what}"))
        ys.append(_array(item[1], f"the target of item {index} of {what}"))
    return stack(xs, what, "samples"), stack(ys, what, "targets")


def read_columns(
    data: Any, inputs: str, target: str, what: str = "the data set"
) -> tuple[np.ndarray, np.ndarray]:
    """The samples and the targets of a Hugging Face data set, by the names of their columns."""
    known = list(getattr(data, "column_names", None) or ())
    if not known:
        raise HoldfastError(
            f"{what} is {named(data)}; it must be one of Hugging Face's data sets, with columns"
        )
    for column in (inputs, target):
        if column not in known:
            raise unknown(f"column of {what}", column, known)
    x, y = (
        stack(
            [_array(value, f"item {i} of column '{name}'") for i, value in enumerate(data[name])], what, which
        )
        for name, which in ((inputs, "samples"), (target, "targets"))
    )
    return x, y


def stack(arrays: Sequence[np.ndarray], what: str, which: str) -> np.ndarray:
    """The arrays as one, if they have the same shape."""
    if not arrays:
        raise HoldfastError(f"{what} is empty; it must hold at least one sample")
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise HoldfastError(
                f"the {which} of {what} differ in shape: {arrays[0].shape} in item 0, {array.shape} in item {index}; "
                "make them equal, for instance by cropping or padding"
            )
    return np.stack(arrays)


def class_names(data: Any, column: str) -> tuple[str, ...] | None:
    """The class names that a Hugging Face data set has for a column; None if it has none."""
    feature = (getattr(data, "features", None) or {}).get(column)
    names = getattr(feature, "names", None)
    return None if names is None else tuple(names)


def _array(value: Any, what: str) -> np.ndarray:
    """A tensor, an array, an image or a number as an array."""
    array = as_tensor(value, what).numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind in "OUST":
        raise HoldfastError(f"{what} is {named(value)}; it must be a tensor, an array, an image or a number")
    return array
