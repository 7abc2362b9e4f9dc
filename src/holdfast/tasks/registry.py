"""Tasks by name, and the task of targets for which none is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import Description, build, field_hints, parse_text, validate
from holdfast.tasks.base import Loss, Task
from holdfast.tasks.classes import Binary, Multiclass, Multilabel
from holdfast.tasks.numbers import Counts, Regression
from holdfast.tasks.positions import Segmentation, Sequence
from holdfast.tasks.survival import Survival

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Multiclass, Binary, Multilabel, Regression, Counts, Survival, Sequence, Segmentation)
}


def parse_task(text: str) -> Task:
    """The task written as ``name`` or ``name:option=value``: ``binary``, ``regression:loss=huber``."""
    return task_from(parse_text(text, "task"))


def task_from(described: Mapping[str, Any]) -> Task:
    """The task that ``describe`` described."""
    loss = described.get("loss")
    if isinstance(loss, Mapping):
        raise HoldfastError(
            "the loss of this run is a Python function, which is not stored in its file; continue the run with "
            "holdfast.train(..., resume=True)"
        )
    return build(TASKS, described, "task", "task='regression:loss=huber'")


def as_task(given: Task | str | Mapping[str, Any]) -> Task:
    """A task, or its text or description, as a task."""
    if isinstance(given, Task):
        return given
    validate("task", given, str | Description)
    return parse_task(given) if isinstance(given, str) else task_from(given)


def with_loss(task: Task, loss: str | Loss | None) -> Task:
    """The task with one of its losses, by name, or with a loss of the user's own."""
    if loss is None:
        return task
    if not isinstance(loss, str):
        if not callable(loss):
            raise HoldfastError(f"loss is {loss!r}; it must be the name of a loss of the task, or a function")
        return replace(task, own_loss=loss)
    if "loss" not in field_hints(type(task)):
        raise HoldfastError(f"task '{task.name}' has one loss, so loss='{loss}' cannot be chosen")
    return task_from(task.describe() | {"loss": loss})


def inferred_task(y_train: Tensor, y_test: Tensor) -> Task:
    """The task of targets where it is plain: fractional numbers are a regression, whole ones are classes.

    Whole numbers stored as floats are classes, too.
    """
    numbers = y_train.is_floating_point() and y_test.is_floating_point()
    one_each = y_train.numel() == len(y_train)
    return (
        Regression()
        if numbers and one_each and not bool((y_train == y_train.floor()).all())
        else Multiclass()
    )
