"""Federations of data from several sites: each site is a client with its own training and test samples."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import named
from holdfast.data.dataset import Dataset, Group, warn_of_first_label
from holdfast.data.federation import Federation, federate
from holdfast.data.partitions import BySite
from holdfast.data.samples import draw_test_share, read_items
from holdfast.data.sources.formats import read_npz
from holdfast.data.tables.dataset import CLASS_TASKS, dataset_from_tables, is_site_table
from holdfast.data.tables.table import SUFFIXES
from holdfast.tasks.base import numbered

TABLE_OPTIONS = ("categorical", "drop", "transformer", "classes", "task")


def federation_from_sites(
    sites: Mapping[str, Any] | str | Path,
    *,
    target: str | Sequence[str] | None = None,
    test: float | str = 0.2,
    seed: int = 0,
    name: str | None = None,
    **options: Any,
) -> Federation:
    """A federation with one client per site.

    ``sites`` maps the name of each site to its data, which is one of

    - a table: a pandas or polars frame, a mapping of columns, or the path of a CSV or Parquet file; or a pair of these,
      with the training and the test rows;
    - arrays: ``(x, y)`` or ``(x_train, y_train, x_test, y_test)``;
    - a `Dataset`, a map-style torch ``Dataset``, or the path of a ``.npz`` file or of a folder of images.

    ``sites`` may also be a folder with one of these per site, such as ``paris.csv`` and ``lyon.csv``, or with one
    folder of images per site.

    Every site has its own test samples: the given ones, or a share ``test`` of each class drawn by ``seed``. The
    site of each sample is the group ``site`` of the data set, by which results are shown.

    For tables, ``target`` names the target column; ``test`` may name a column that marks the test rows. All
    sites must have the same columns. Numbers are standardised and categories encoded by transformers that are fitted
    on sums, counts and categories of the sites' training rows. Further options for tables are those of
    `Dataset.from_frame`: ``categorical``, ``drop``, ``transformer``, ``classes`` and ``task``.
    """
    if isinstance(sites, (str, Path)):
        folder = Path(sites).expanduser()
        name, sites = name or folder.name, list_sites(folder)
    for option in options:
        if option not in TABLE_OPTIONS:
            raise unknown("option of tables", option, TABLE_OPTIONS)
    sites = _checked(sites)
    tables = [is_site_table(source) for source in sites.values()]
    if all(tables):
        dataset = dataset_from_tables(
            sites, target=target, test=test, seed=seed, name=name or "custom", **options
        )
        return federate(dataset, BySite(), seed=seed)
    if any(tables):
        table, other = (list(sites)[tables.index(kind)] for kind in (True, False))
        raise HoldfastError(
            f"site '{table}' is a table, site '{other}' is not; the data of all sites must be of one kind"
        )
    if target is not None or options:
        given = "target" if target is not None else next(iter(options))
        raise HoldfastError(f"{given} is an option for tables, but the sites' data are not tables")
    if isinstance(test, str):
        raise HoldfastError(f"test is '{test}'; for data other than tables it must be a share, such as 0.2")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the labels begin at")  # other sites may have the classes before
        parts = {site: _dataset(source, site, test, seed) for site, source in sites.items()}
    dataset = concatenate(parts, name or "custom")
    if dataset.classes == numbered(dataset.num_classes):
        warn_of_first_label(dataset)
    return federate(dataset, BySite(), seed=seed)


def list_sites(folder: Path) -> dict[str, Path]:
    """The files and folders in a folder by site; the site's name is the file's name without the suffix."""
    if not folder.is_dir():
        raise HoldfastError(f"there is no folder '{folder}' of sites")
    sites: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not (path.is_dir() or path.suffix in (*SUFFIXES, ".npz")):
            continue
        site = path.name if path.is_dir() else path.stem
        if site in sites:
            raise HoldfastError(
                f"'{sites[site].name}' and '{path.name}' in {folder} both belong to the site '{site}'"
            )
        sites[site] = path
    if not sites:
        raise HoldfastError(
            f"{folder} contains no sites; each site must be a {', '.join(SUFFIXES)} or .npz file, or a folder "
            "of images"
        )
    return sites


def concatenate(datasets: Mapping[str, Dataset], name: str = "custom") -> Dataset:
    """One data set with the samples of all sites, whose group ``site`` holds the site of each sample.

    Classes are matched by name.
    """
    first_site, first = next(iter(datasets.items()))
    for site, dataset in datasets.items():
        for what, one, other in (
            ("samples of shape", first.shape, dataset.shape),
            ("samples of type", first.x_train.dtype, dataset.x_train.dtype),
            ("the preprocessing", first.preprocess, dataset.preprocess),
            ("the task", first.task.name, dataset.task.name),
        ):
            if one != other:
                raise HoldfastError(
                    f"site '{first_site}' has {what} {one}, site '{site}' {other}; they must be equal"
                )
    if any(dataset.task != first.task for dataset in datasets.values()):
        tasks = ", ".join(f"{site}: {dataset.task.name}" for site, dataset in datasets.items())
        raise HoldfastError(f"the sites have different tasks or task options ({tasks}); they must be equal")
    x_train, x_test, y_train, y_test = (
        torch.cat([getattr(dataset, part) for dataset in datasets.values()])
        for part in ("x_train", "x_test", "y_train", "y_test")
    )
    whole = replace(
        first,
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        groups=_site_group(datasets),
    )
    if first.task.name not in ("multiclass", "binary"):
        return whole.with_task(first.task)  # strata are quartiles of all sites' targets together
    names = _label_names(datasets.values())
    x_train, x_test = (
        torch.cat([getattr(d, part) for d in datasets.values()]) for part in ("x_train", "x_test")
    )
    y_train, y_test = (
        torch.cat([_renamed(getattr(d, part), d, names) for d in datasets.values()])
        for part in ("y_train", "y_test")
    )
    merged = replace(
        first,
        name=name,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        labels=names,
        groups=_site_group(datasets),
        encoder=None,
    )
    return merged.with_task(first.task)


def _own_names(dataset: Dataset) -> tuple[str, ...]:
    """The names of a data set's labels; empty if they have none."""
    return dataset.labels or (dataset.classes if dataset.task.name in CLASS_TASKS else ())


def _label_names(datasets: Collection[Dataset]) -> tuple[str, ...]:
    """The label names of all data sets: those of the first, or the sorted union if they differ."""
    each = [_own_names(dataset) for dataset in datasets]
    same = all(names == each[0] for names in each)
    return each[0] if same else tuple(sorted({name for names in each for name in names}))


def _renamed(y: torch.Tensor, dataset: Dataset, names: tuple[str, ...]) -> torch.Tensor:
    """Labels of a data set as those of the merged one; other targets are returned unchanged."""
    own = _own_names(dataset)
    if dataset.task.name not in CLASS_TASKS or own == names:
        return y
    return torch.tensor([names.index(name) for name in own])[y]


def _site_group(datasets: Mapping[str, Dataset]) -> Mapping[str, Group]:
    train, test = (
        np.repeat(
            np.arange(len(datasets)), [len(getattr(dataset, f"y_{part}")) for dataset in datasets.values()]
        )
        for part in ("train", "test")
    )
    return MappingProxyType({"site": Group(tuple(datasets), train, test)})


def _dataset(source: Any, site: str, test: float, seed: int) -> Dataset:
    """One site's data, with test samples of its own."""
    try:
        if isinstance(source, Dataset):
            return source
        if isinstance(source, (str, Path)):
            path = Path(source).expanduser()
            if not path.is_dir() and path.suffix != ".npz":
                raise HoldfastError(
                    f"'{source}' is neither a {', '.join(SUFFIXES)} or .npz file nor a folder of images"
                )
            return (
                Dataset.from_folder(path, test=test, seed=seed)
                if path.is_dir()
                else Dataset.from_arrays(*read_npz(path))
            )
        if isinstance(source, (tuple, list)) and len(source) in (2, 4):
            given = source
            if len(source) == 2:
                x, y = source
                given = draw_test_share(x, y, test, seed, site)
            return Dataset.from_arrays(*given)
        if (
            hasattr(source, "__getitem__")
            and hasattr(source, "__len__")
            and not isinstance(source, np.ndarray)
        ):
            return Dataset.from_arrays(*draw_test_share(*read_items(source), test, seed, site))
        raise HoldfastError(
            f"its data is {named(source)}; it must be a table, (x, y), (x_train, y_train, x_test, y_test), a data "
            "set or a path"
        )
    except HoldfastError as error:
        raise HoldfastError(f"site '{site}': {error}") from None


def _checked(sites: Any) -> dict[str, Any]:
    """The sites by name as text."""
    if not isinstance(sites, Mapping):
        raise HoldfastError(
            f"sites is {named(sites)}; it must map the names of sites to their data, such as {{'paris': 'paris.csv'}}, "
            "or be the path of a folder"
        )
    names = [str(site) for site in sites]
    if len(set(names)) < len(names):
        twice = next(site for site in names if names.count(site) > 1)
        raise HoldfastError(f"two sites are called '{twice}'; their names must differ")
    if not names:
        raise HoldfastError("there are no sites; a federation needs at least one")
    return dict(zip(names, sites.values(), strict=True))
