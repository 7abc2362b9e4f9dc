"""The target columns of tables as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.data.tables.table import Table, as_numbers, as_texts, holds_numbers, refuse_decimal_commas

MOST_CLASSES = 100  # limit on the number of distinct whole numbers that are treated as classes


def class_targets(
    train: Sequence[Table], test: Sequence[Table], target: str, classes: Sequence[str] | None
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
    """The labels of each table's rows, from 0, and the class names: by default those of the training rows, sorted.

    ``classes`` gives the names and their order.
    """
    texts = [
        [_target_text(table, target, row, text) for row, text in enumerate(as_texts(table, target))]
        for table in train
    ]
    tested = [
        [_target_text(table, target, row, text) for row, text in enumerate(as_texts(table, target))]
        for table in test
    ]
    if classes is None:
        found = {text for part in texts for text in part}
        numbers = all(
            holds_numbers(table[target]) == (True, False) for table in (*train, *test) if len(table)
        )
        names = tuple(sorted(found, key=float) if numbers else sorted(found))
    else:
        names = tuple(map(str, classes))
    index = {name: label for label, name in enumerate(names)}
    for parts, tables in ((texts, train), (tested, test)):
        for part, table in zip(parts, tables, strict=True):
            for row, text in enumerate(part):
                if text not in index:
                    reason = (
                        "no training row has"
                        if classes is None
                        else f"is none of the classes {', '.join(names)}"
                    )
                    raise HoldfastError(
                        f"the target '{target}' is '{text}' in {table.at(row)}, which {reason}"
                    )
    labels = [
        [np.array([index[text] for text in part], np.int64) for part in parts] for parts in (texts, tested)
    ]
    return labels[0], labels[1], names


def number_targets(tables: Sequence[Table], targets: Sequence[str]) -> list[np.ndarray]:
    """The targets of each table's rows as float64: ``[rows]``, or ``[rows, columns]`` of several columns."""
    arrays = []
    for table in tables:
        columns = [as_numbers(table, target) for target in targets]
        for target, values in zip(targets, columns, strict=True):
            if np.isnan(values).any():
                _refuse_missing(table, target, int(np.isnan(values).argmax()))
        arrays.append(columns[0] if len(columns) == 1 else np.stack(columns, 1))
    return arrays


def are_classes(tables: Sequence[Table], target: str) -> bool:
    """Whether a target column holds classes: texts, or few whole numbers."""
    if not all(holds_numbers(table[target]) == (True, False) for table in tables if len(table)):
        refuse_decimal_commas(tables, target)
        return True
    values = np.concatenate(number_targets(tables, [target]))
    if not (values == np.rint(values)).all():
        return False
    if len(different := np.unique(values)) > MOST_CLASSES:
        raise HoldfastError(
            f"the target '{target}' has {len(different)} different whole numbers; name the task, such as "
            "task='regression', 'counts' or 'multiclass'"
        )
    return True


def strata(values: np.ndarray) -> np.ndarray:
    """The stratum of each target, for a stratified test split: its class, or its quartile of all numbers."""
    first = values if values.ndim == 1 else values.reshape(len(values), -1)[:, 0]
    if len(different := np.unique(first)) <= MOST_CLASSES and (first == np.rint(first)).all():
        return np.searchsorted(different, first)
    return np.asarray(np.digitize(first, np.quantile(first, [0.25, 0.5, 0.75])))


def _target_text(table: Table, target: str, row: int, text: str | None) -> str:
    if text is None:
        _refuse_missing(table, target, row)
    return str(text)


def _refuse_missing(table: Table, target: str, row: int) -> None:
    raise HoldfastError(
        f"the target '{target}' is missing in {table.at(row)}; leave out rows without a target"
    )
