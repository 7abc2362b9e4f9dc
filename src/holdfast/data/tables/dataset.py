"""Data sets from tables of one or several sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.spec import validate
from holdfast.data.dataset import Dataset, Group
from holdfast.data.indexing import check_test_share, stratified_split
from holdfast.data.tables.encoder import fit_encoder, warn_of_unseen
from holdfast.data.tables.federated_fit import Transformer
from holdfast.data.tables.table import Table, TableSource, is_table, read_table
from holdfast.data.tables.targets import are_classes, class_targets, number_targets, strata

CLASS_TASKS = ("multiclass", "binary")
Pair = tuple[Table, Table]


def split_by_column(source: TableSource, site: str) -> dict[str, Table]:
    """The rows of each site, in the order of the site names in the column ``site``."""
    from holdfast.data.tables.table import as_texts

    table = read_table(source)
    names = as_texts(table, site)
    for row, name in enumerate(names):
        if name is None:
            raise HoldfastError(f"the site, column '{site}', is missing in {table.at(row)}")
    without = Table(
        {c: v for c, v in table.columns.items() if c != site}, table.name, table.row, table.numbers
    )
    return {name: without.rows(np.flatnonzero(names == name)) for name in sorted(set(names))}


def dataset_from_tables(
    sites: Mapping[str, TableSource | tuple[TableSource, TableSource]],
    *,
    target: str | Sequence[str] | None,
    test: float | str = 0.2,
    seed: int = 0,
    categorical: Collection[str] = (),
    drop: Collection[str] = (),
    transformer: Transformer | None = None,
    classes: Sequence[str] | None = None,
    task: Any = None,
    name: str = "custom",
) -> Dataset:
    """A data set with the rows of all sites and a group ``site``.

    Rows without a site have an empty site name. A site's table may be a pair: its training rows and its test rows. The
    other arguments are those of `Dataset.from_frame`.
    """
    given = {
        site: _tables(source, f"site '{site}'" if site else "the table") for site, source in sites.items()
    }
    seed, test = validate("seed", seed, int), validate("test", test, float | str)
    targets = _target_columns(target)
    for option, value in (("categorical", categorical), ("drop", drop)):
        if isinstance(value, str):
            raise HoldfastError(f"{option} must be a list of columns, such as ['{value}'], not '{value}'")
    everything = [table for tables in given.values() for table in tables]
    columns = _common_columns(everything)
    _check_names(columns, everything[0], targets, categorical, drop)
    fold = test if isinstance(test, str) else None
    kind = _task_name(task)
    with_classes = len(targets) == 1 and (
        kind in CLASS_TASKS if kind else are_classes(everything, targets[0])
    )
    pairs: dict[str, Pair] = {}
    for site, tables in given.items():
        if len(tables) == 2:
            pairs[site] = tables[0], tables[1]
        elif fold is not None:
            pairs[site] = _split_by_fold(tables[0], fold)
        else:
            pairs[site] = _split(tables[0], targets, with_classes, float(test), seed, site)
    train, test_tables = ({site: pair[part] for site, pair in pairs.items()} for part in (0, 1))
    for table in train.values():
        if not len(table):
            raise HoldfastError(f"{table.name} has no training row")
    if test and not any(map(len, test_tables.values())):
        hint = " (where the target is a number, task='regression')" if with_classes else ""
        raise HoldfastError(
            "no site has a test row, as no class has two rows at a site: take a larger test share, or give test rows"
            + hint
        )
    inputs = [c for c in columns if c not in (*targets, *drop, fold)]
    if not inputs:
        raise HoldfastError(
            f"{everything[0].name} has no columns other than the target and the dropped columns"
        )
    encoder = fit_encoder(train, inputs, categorical, transformer)
    warn_of_unseen(encoder, list(train.values()), list(test_tables.values()))
    options: dict[str, Any] = {} if task is None else {"task": task}
    if with_classes:
        y_train, y_test, names = class_targets(
            list(train.values()), list(test_tables.values()), targets[0], classes
        )
        options["classes"] = names
    else:
        y_train, y_test = (number_targets(list(part.values()), targets) for part in (train, test_tables))
        if classes is not None or kind == "multilabel":
            options["classes"] = targets if classes is None else classes
    groups = {}
    if any(sites):  # a table without sites has an empty name
        groups["site"] = Group(tuple(sites), *(_owners(part.values()) for part in (train, test_tables)))
    dataset = Dataset.from_arrays(
        _rows([encoder(table) for table in train.values()]),
        np.concatenate(y_train),
        _rows([encoder(table) for table in test_tables.values() if len(table)]),
        np.concatenate(y_test),
        name=name,
        groups=groups,
        **options,
    )
    return replace(dataset, encoder=encoder)


def _tables(source: TableSource | tuple[TableSource, TableSource], name: str) -> tuple[Table, ...]:
    """A site's table, or its training and its test table."""
    parts = source if isinstance(source, tuple) else (source,)
    tables = tuple(read_table(part, name) for part in parts)
    if not len(tables[0]):
        raise HoldfastError(f"{tables[0].name} has no rows; leave the site out")
    return tables


def _target_columns(target: object) -> list[str]:
    """The names of the target columns; none for None."""
    names = [target] if target is None or isinstance(target, str) else target
    if not isinstance(names, Sequence) or not all(name is None or isinstance(name, str) for name in names):
        raise HoldfastError(f"target is {target!r}; it must be the name of a column, or a list of names")
    return [name for name in names if name]


def _common_columns(tables: Sequence[Table]) -> list[str]:
    """The columns of all tables; raises an error that names the difference if they are not the same."""
    first = tables[0]
    for table in tables[1:]:
        lacks = [c for c in first.columns if c not in table.columns]
        adds = [c for c in table.columns if c not in first.columns]
        if lacks or adds:
            parts = [f"has no column {_quoted(lacks)}"] * bool(lacks) + [
                f"has the columns {_quoted(adds)}"
            ] * bool(adds)
            raise HoldfastError(
                f"{table.name} {' and '.join(parts)}, unlike {first.name}; the columns of all sites must be the same"
            )
    return list(first.columns)


def _check_names(
    columns: Sequence[str],
    table: Table,
    targets: Sequence[str],
    categorical: Collection[str],
    drop: Collection[str],
) -> None:
    if not targets:
        raise HoldfastError(f"name the target column of {table.name}, such as target='{columns[-1]}'")
    for column in (*targets, *categorical, *drop):
        table[column]
    if both := sorted(set(targets) & {*categorical, *drop}):
        raise HoldfastError(f"'{both[0]}' is the target; it cannot be in categorical or drop")


def _split_by_fold(table: Table, fold: str) -> Pair:
    """Training and test rows by a column that marks the test rows by 1, true or test."""
    from holdfast.data.tables.table import as_texts

    marks = {"1": True, "true": True, "test": True, "0": False, "false": False, "train": False}
    chosen = np.empty(len(table), np.bool_)
    for row, text in enumerate(as_texts(table, fold)):
        mark = marks.get(str(text).lower())
        if mark is None:
            raise HoldfastError(
                f"column '{fold}' holds '{text}' in {table.at(row)}; it must mark test rows by 1, true or test "
                "and others by 0, false or train"
            )
        chosen[row] = mark
    return table.rows(np.flatnonzero(~chosen)), table.rows(np.flatnonzero(chosen))


def _split(
    table: Table, targets: Sequence[str], with_classes: bool, share: float, seed: int, site: str
) -> Pair:
    """Draw a share of the rows of each class, or of each quarter of the numbers, as test rows."""
    check_test_share(share)
    if with_classes:
        (values,), _, _ = class_targets([table], [], targets[0], None)
    else:
        (values,) = number_targets([table], targets)
    train, test = stratified_split(strata(values), generator(seed, f"test rows of {site}"), share)
    return table.rows(train), table.rows(test)


def _owners(tables: Collection[Table]) -> np.ndarray:
    return np.repeat(np.arange(len(tables)), [len(table) for table in tables])


def _rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)


def _task_name(task: Any) -> str | None:
    if isinstance(task, str):
        return task.partition(":")[0]
    return None if task is None else str(task["name"] if isinstance(task, Mapping) else task.name)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def is_site_table(source: object) -> bool:
    """Whether a site's data is a table, or a pair of training and test tables."""
    if isinstance(source, tuple):
        return len(source) == 2 and all(map(is_table, source))
    return is_table(source)


def table_name(source: object) -> str:
    """The name of a data set from a table: that of its file, if it is one."""
    return Path(source).stem if isinstance(source, (str, Path)) else "custom"
