"""The description of the sites' data set for a server without data: types, shapes, classes and task, no samples."""

from __future__ import annotations

import json
from typing import Any, TypedDict

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.schema import Mismatch, validate_schema
from holdfast.data.dataset import Dataset
from holdfast.data.preprocess import Preprocess
from holdfast.flower.wire import WireError
from holdfast.tasks.registry import task_from

TYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.int64, torch.float32)}
"""Of samples and targets, by name."""


class Description(TypedDict):
    """The content of a description."""

    name: str
    classes: list[str]
    labels: list[str]
    task: dict[str, Any]
    samples: str
    targets: str
    target_shape: list[int]


def describe_dataset(dataset: Dataset) -> str:
    """A data set as JSON."""
    content = Description(
        name=dataset.name,
        classes=list(dataset.classes),
        labels=list(dataset.labels),
        task=dataset.task.describe(),
        samples=str(dataset.x_train.dtype),
        targets=str(dataset.y_train.dtype),
        target_shape=list(dataset.y_train.shape[1:]),
    )
    return json.dumps(content, sort_keys=True)


def described_dataset(description: str, shape: list[int], preprocess: str) -> Dataset:
    """The data set without samples from a site's description; an invalid one raises a `WireError`."""
    try:
        found = json.loads(description)
        validate_schema(found, Description)
        options: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(preprocess).items()
        }
        samples = torch.empty((0, *shape), dtype=TYPES[found["samples"]])
        targets = torch.empty((0, *found["target_shape"]), dtype=TYPES[found["targets"]])
        return Dataset(
            found["name"],
            samples,
            targets,
            samples,
            targets,
            tuple(found["classes"]),
            Preprocess(**options),
            task=task_from(found["task"]),
            labels=tuple(found["labels"]),
        )
    except (Mismatch, ValueError, KeyError, TypeError, RuntimeError, HoldfastError) as error:
        raise WireError("wrong values", f"its description of the data set is invalid: {error}") from None
