"""A data set in memory: arrays, targets, class names and preprocessing."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.spec import named
from holdfast.data.arrays import LABELS_HINT, as_tensor
from holdfast.data.preprocess import Preprocess
from holdfast.tasks.base import Loss, Task
from holdfast.tasks.classes import Multiclass
from holdfast.tasks.registry import as_task, inferred_task, with_loss

if TYPE_CHECKING:
    from holdfast.data.tables.encoder import TableEncoder


@dataclass(frozen=True)
class Group:
    """A property of every sample besides its class, such as its writer or its domain.

    ``train`` and ``test`` are int64 arrays with one index into ``names`` per sample.
    """

    names: tuple[str, ...]
    train: np.ndarray
    test: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _names(self.names, "the names of a group"))
        for part in ("train", "test"):
            codes = np.asarray(getattr(self, part))
            if codes.dtype.kind not in "iu" and codes.size:
                raise HoldfastError(
                    f"a group's {part} entries must be whole numbers: for each sample, the index of its name, "
                    f"from 0 for '{self.names[0]}'"
                )
            object.__setattr__(self, part, codes.astype(np.int64, copy=False))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples with their targets.

    Images are stored as uint8 ``[N, channels, height, width]``; ``preprocess`` converts a batch of them to float32
    on its device. Other samples are ``[N, ...]``: float32, or int64 for whole numbers, such as tokens and other ids.
    Targets have the task's format: int64 labels ``[N]`` from 0 for a multiclass task, float32 ``[N]`` for a
    regression, and so on. ``classes`` are the names of the strata (`strata_train`): the classes, if the task has
    any. ``labels`` are the names of what is predicted where these differ: tokens, classes of pixels.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess = field(default_factory=Preprocess)
    groups: Mapping[str, Group] = field(default_factory=lambda: MappingProxyType({}))
    task: Task = field(default_factory=Multiclass)
    labels: tuple[str, ...] = ()
    given_strata: np.ndarray | None = None  # of training samples that have no targets here
    encoder: TableEncoder | None = field(
        default=None, kw_only=True
    )  # of the table that the samples come from
    _on_device: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        sizes = f"{len(self.y_train)} + {len(self.y_test)} samples of shape {self.shape}"
        what = f"{self.num_classes} classes" if self.task.name == "multiclass" else f"task {self.task.name}"
        return f"Dataset('{self.name}', {sizes}, {what})"

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """``x_train, y_train, x_test, y_test`` on a device, copied once for all runs that use this data set."""
        if device not in self._on_device:
            tensors = (self.x_train, self.y_train, self.x_test, self.y_test)
            self._on_device[device] = tuple(tensor.to(device) for tensor in tensors)
        return self._on_device[device]

    @property
    def num_classes(self) -> int:
        """The number of strata (C), which are the classes if the task has any."""
        return len(self.classes)

    @cached_property
    def with_float_samples(self) -> Dataset:
        """The same data with integer samples as float32, for models that do not accept integers."""
        rounded = torch.cat([x[x.abs() > 2**24].flatten()[:1] for x in (self.x_train, self.x_test)])
        if len(rounded):
            warnings.warn(
                f"{self.name} contains integers above 2^24, such as {int(rounded[0])}, which are rounded in "
                "float32, the input of this model; a model that begins with torch.nn.Embedding receives them "
                "unchanged",
                HoldfastWarning,
                stacklevel=2,
            )
        return replace(self, x_train=self.x_train.float(), x_test=self.x_test.float())

    @property
    def num_outputs(self) -> int:
        """The number of values in the last layer of a model."""
        return self.task.outputs(self.y_test, len(self.labels or self.classes))

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """The shapes that a model's outputs for one sample may have."""
        return self.task.output_shapes(self.y_test, len(self.labels or self.classes))

    @cached_property
    def strata_train(self) -> np.ndarray:
        """The stratum of each training sample, an index into ``classes``: int64 ``[N]``."""
        return self._strata("train")

    @cached_property
    def strata_test(self) -> np.ndarray:
        """The stratum of each test sample."""
        return self._strata("test")

    def _strata(self, part: str) -> np.ndarray:
        if part == "train" and self.given_strata is not None:
            return self.given_strata
        name = _stratum_group(self.task, self.groups)
        if name is not None:
            codes: np.ndarray = getattr(self.groups[name], part)
            return codes
        return np.asarray(self.task.strata(getattr(self, f"y_{part}")).numpy(), np.int64)

    def with_task(self, task: Task | str | Mapping[str, Any]) -> Dataset:
        """The data set for another task; raises an error if that task does not accept its targets."""
        names = self.labels or (self.classes if self.task.name in ("multiclass", "binary") else None)
        targets = _targets(self.y_train, self.y_test, as_task(task), names, self.groups)
        return replace(self, **targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch dimension."""
        return tuple(self.x_train.shape[1:])

    def for_task(
        self, task: Task | str | Mapping[str, Any] | None = None, loss: str | Loss | None = None
    ) -> Dataset:
        """The data set with another task (default: its own) and loss; the same object if neither changes."""
        wanted = with_loss(self.task if task is None else as_task(task), loss)
        return self if wanted == self.task else self.with_task(wanted)

    @classmethod
    def from_arrays(
        cls,
        x_train: ArrayLike | Tensor,
        y_train: ArrayLike | Tensor,
        x_test: ArrayLike | Tensor | None = None,
        y_test: ArrayLike | Tensor | None = None,
        *,
        test: float = 0.2,
        seed: int = 0,
        classes: Sequence[str] | np.ndarray | None = None,
        name: str = "custom",
        preprocess: Preprocess | None = None,
        groups: Mapping[str, Group] | None = None,
        task: Task | str | None = None,
    ) -> Dataset:
        """A data set from NumPy arrays, torch tensors, or objects that NumPy converts, such as a pandas table.

        Samples: integers from 0 to 255 with three or four dimensions are images and become uint8
        ``[N, channels, height, width]``; the input may also be ``[N, height, width]`` (grey) or channels-last.
        Other integers become int64; a model that takes no integers gets them as floats. Floats of any width become
        float32, true and false 1 and 0. The shape is kept, except that samples with four dimensions, of which the
        last is 1 or 3 and the second is not, are channels-last images too.

        Targets: in the format of ``task`` (`holdfast.tasks`). Without a task, fractional numbers imply a regression and
        whole numbers from 0 are classes, one per sample. ``classes`` are the names of what is predicted; by default
        the numbers from 0 to the largest label. ``preprocess`` defaults to scaling images to 0..1.

        Without ``x_test`` and ``y_test``, a share ``test`` of each class, or of each quarter of the numbers, becomes
        the test set, drawn by ``seed``. An empty test set is allowed (``test=0``); runs then need validation samples.
        """
        if x_test is None and y_test is None:
            from holdfast.data.samples import draw_test_share

            if groups:
                raise HoldfastError(
                    "groups have an entry for each training and test sample; give test samples too"
                )
            x_train, y_train, x_test, y_test = draw_test_share(x_train, y_train, test, seed)
        if x_test is None or y_test is None:
            raise HoldfastError("x_test and y_test must be given together, or both be left out")
        untested = _is_empty(x_test) and _is_empty(y_test)
        x = as_samples(x_train, "x_train")
        samples = {"x_train": x, "x_test": x[:0] if untested else as_samples(x_test, "x_test")}
        if {x.dtype for x in samples.values()} == {torch.int64, torch.float32}:
            samples = {part: x.to(torch.float32) for part, x in samples.items()}
        y = _tensor(y_train, "y_train", LABELS_HINT)
        raw = {"y_train": y, "y_test": y[:0] if untested else _tensor(y_test, "y_test", LABELS_HINT)}
        if samples["x_train"].dtype != samples["x_test"].dtype:
            raise HoldfastError("x_train and x_test must both be images from 0 to 255, or both be floats")
        if samples["x_train"].shape[1:] != samples["x_test"].shape[1:]:
            shapes = [tuple(x.shape[1:]) for x in samples.values()]
            raise HoldfastError(f"training samples have shape {shapes[0]}, test samples {shapes[1]}")
        for part in ("train", "test"):
            x, y = samples[f"x_{part}"], raw[f"y_{part}"]
            if len(x) != len(y):
                raise HoldfastError(f"x_{part} has {len(x)} samples, but y_{part} has {len(y)} labels")
        chosen = inferred_task(**raw) if task is None else as_task(task)
        names = None if classes is None else _names(classes, "classes")
        known = MappingProxyType(dict(groups or {}))
        for group_name, group in known.items():
            _check_group(group_name, group, raw)
        fields: dict[str, Any] = samples | _targets(**raw, task=chosen, names=names, groups=known)
        dataset = cls(name, **fields, preprocess=preprocess or Preprocess(), groups=known)
        dataset.preprocess.check(dataset.shape)
        if names is None:
            warn_of_first_label(dataset)
        return dataset

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        size: tuple[int, int] | None = None,
        preprocess: Preprocess | None = None,
        test: float = 0.2,
        seed: int = 0,
    ) -> Dataset:
        """A data set from images, one folder per class.

        Either ``path/train/CLASS/*.png`` and ``path/test/CLASS/*.png``, or ``path/CLASS/*.png``, of which a share
        ``test`` of each class, drawn by ``seed``, becomes the test set. Images must have the same size unless they are
        resized to ``size`` (height, width); they are grey if all of them are, else RGB.
        """
        from holdfast.data.sources.formats import read_folder  # which imports this module

        folder = Path(path).expanduser()
        arrays = read_folder(folder, size, seed, test)
        return cls.from_arrays(**vars(arrays), name=folder.name, preprocess=preprocess)

    @classmethod
    def from_frame(
        cls,
        table: Any,
        *,
        target: str | Sequence[str],
        test: Any = 0.2,
        seed: int = 0,
        site: str | None = None,
        categorical: Collection[str] = (),
        drop: Collection[str] = (),
        transformer: Any = None,
        classes: Sequence[str] | None = None,
        task: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """A data set from a table.

        ``table`` is a pandas or polars frame, a mapping of columns, or the path of a CSV or Parquet file.

        Args:
            table: the rows.
            target: the column that is predicted; several for tasks with such targets, as ``["event", "time"]``.
            test: the share of the rows that becomes the test set, drawn by ``seed`` from each class (of numbers: from
                each quarter); the name of a column that marks test rows by 1, true or test; or a table of test rows.
            seed: of the draw.
            site: the column with the site of each row, which becomes the group ``site``; ``hf.federate(data,
                "by-site")`` then makes every site a client. Test rows are drawn at each site.
            categorical: columns of numbers that are categories. Columns of text are always categorical.
            drop: columns that are left out.
            transformer: a scikit-learn transformer of all other columns, fitted or not. By default numbers are
                standardised, after missing ones are replaced by the mean, and categories are one-hot encoded, after
                missing ones are replaced by the most frequent. It is fitted on the training rows, on sums, counts and
                sets of categories of each site.
            classes: the names of the classes, in their order; by default sorted.
            task: as for `from_arrays`; by default texts and up to 100 whole numbers are classes, fractions a
                regression.
            name: of the data set; by default that of the file.

        The fitted transformer is kept as ``encoder``; `transform` applies it to new rows.
        """
        from holdfast.data.tables.dataset import dataset_from_tables, split_by_column, table_name
        from holdfast.data.tables.table import is_table, read_table

        given = is_table(test)
        sites = {"": table} if site is None else split_by_column(table, site)
        if given:
            tests = {"": test} if site is None else split_by_column(test, site)
            if new := [name for name in tests if name not in sites]:
                raise HoldfastError(f"the site '{new[0]}' has test rows, but no training row")
            none = read_table(next(iter(tests.values()))).rows(np.empty(0, np.int64))
            sites = {one: (rows, tests.get(one, none)) for one, rows in sites.items()}
        return dataset_from_tables(
            sites,
            target=target,
            test=0.2 if given else test,
            seed=seed,
            categorical=categorical,
            drop=drop,
            transformer=transformer,
            classes=classes,
            task=task,
            name=name or table_name(table),
        )

    @classmethod
    def from_torch(cls, data: Any, *, test: Any = 0.2, seed: int = 0, **options: Any) -> Dataset:
        """A data set from a map-style torch ``Dataset`` whose items are pairs (sample, target).

        Samples are tensors, arrays, images or numbers of equal shape; transforms of the data set are applied once.
        ``test`` is another such data set, or the share of each class that becomes the test set, drawn by ``seed``. The
        names in ``data.classes``, if there are any, name the classes; further ``options`` are those of `from_arrays`.
        """
        from holdfast.data.samples import draw_test_share, read_items

        arrays = read_items(data)
        names = getattr(data, "classes", None)
        if names is not None and not callable(names):
            options = {"classes": names, **options}
        if isinstance(test, (int, float)):
            return cls.from_arrays(*draw_test_share(*arrays, test, seed), **options)
        return cls.from_arrays(*arrays, *read_items(test, "the test data"), **options)

    @classmethod
    def from_huggingface(
        cls, data: Any, *, inputs: str, target: str, test: Any = 0.2, seed: int = 0, **options: Any
    ) -> Dataset:
        """A data set from one of Hugging Face's ``datasets``.

        The column ``inputs`` holds samples of equal shape: images, arrays, lists of token ids. Of a ``DatasetDict``,
        ``train`` and ``test`` are used; otherwise ``test`` is another data set, or the share of each class that becomes
        the test set, drawn by ``seed``. Further ``options`` are those of `from_arrays`; classes have the names that the
        column ``target`` has. A data set whose columns are numbers and texts is a table for `from_frame`.
        """
        from holdfast.data.samples import class_names, draw_test_share, read_columns

        if isinstance(data, Mapping):
            if not {"train", "test"} <= data.keys():
                raise HoldfastError(
                    f"a DatasetDict must have the parts train and test, not {', '.join(data)}"
                )
            data, test = data["train"], data["test"]
        arrays = read_columns(data, inputs, target)
        if (names := class_names(data, target)) is not None:
            options = {"classes": names, **options}
        if isinstance(test, (int, float)):
            return cls.from_arrays(*draw_test_share(*arrays, test, seed), **options)
        return cls.from_arrays(*arrays, *read_columns(test, inputs, target, "the test data"), **options)

    def transform(self, table: Any) -> Tensor:
        """A model's input for the rows of a table with the columns that this data set was made from."""
        if self.encoder is None:
            raise HoldfastError(
                f"{self.name} was not created from a table; pass samples to its preprocess instead"
            )
        return torch.from_numpy(self.encoder(table))


def _names(given: Sequence[str] | np.ndarray, what: str) -> tuple[str, ...]:
    """Names as Python strings, from strings, numbers or an array of either."""
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise HoldfastError(f"{what} must be a list of names, such as ['healthy', 'ill'], not {given!r}")
    names = tuple(map(str, given))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise HoldfastError(f"{what} must differ, but '{twice}' occurs more than once")
    return names


def warn_of_first_label(dataset: Dataset) -> None:
    """Warn if the labels do not begin at 0, since the classes before the first label then have no samples."""
    if dataset.task.name != "multiclass":
        return
    lowest = min(int(y.min()) for y in (dataset.y_train, dataset.y_test) if len(y))
    if lowest:
        warnings.warn(
            f"the labels begin at {lowest}, and labels count classes from 0: the data set has {dataset.num_classes} "
            f"classes, {lowest} of them without samples; subtract {lowest} from the labels, or pass the names as "
            "classes",
            HoldfastWarning,
            stacklevel=3,
        )


def _is_empty(values: ArrayLike | Tensor) -> bool:
    return isinstance(values, Sized) and not len(values)


def _tensor(values: ArrayLike | Tensor, name: str, hint: str = "") -> Tensor:
    tensor = as_tensor(values, name, hint)
    if tensor.ndim == 0 or len(tensor) == 0:
        raise HoldfastError(f"{name} is empty; it must hold at least one sample")
    return tensor


def as_samples(values: ArrayLike | Tensor, name: str) -> Tensor:
    x = _tensor(values, name)
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.dtype == torch.bool:
        return x.to(torch.float32).contiguous()
    if x.is_floating_point():
        x = x.to(torch.float32)
        bad = ~x.isfinite().flatten(1).all(dim=1) if x.ndim > 1 else ~x.isfinite()
        if bad.any():
            raise HoldfastError(
                f"{name} contains NaN or infinite values in {int(bad.sum())} of {len(x)} samples; the first is "
                f"sample {int(bad.nonzero()[0])}"
            )
    elif x.ndim in (3, 4) and (x.dtype == torch.uint8 or (x.min() >= 0 and x.max() <= 255)):
        return (x[:, None] if x.ndim == 3 else x).to(torch.uint8).contiguous()
    return (x if x.is_floating_point() else x.to(torch.int64)).contiguous()


def _targets(
    y_train: Tensor, y_test: Tensor, task: Task, names: tuple[str, ...] | None, groups: Mapping[str, Group]
) -> dict[str, Any]:
    """The fields of a `Dataset` that depend on the task; ``names`` are those of what is predicted."""
    train = task.targets(y_train, "y_train")
    test = task.targets(y_test, "y_test") if len(y_test) else train[:0]
    targets = {"y_train": train, "y_test": test}
    filled = {name: y for name, y in targets.items() if len(y)}
    labels = task.label_names(list(filled.values())) if names is None else names
    for name, y in filled.items():
        task.check_labels(y, name, len(labels))
    if targets["y_train"].shape[1:] != targets["y_test"].shape[1:]:
        shapes = [tuple(y.shape[1:]) for y in targets.values()]
        raise HoldfastError(f"training targets have shape {shapes[0]}, test targets {shapes[1]}")
    fitted = task.fit(targets["y_train"])
    group = _stratum_group(fitted, groups)
    classes = fitted.stratum_names(labels) if group is None else groups[group].names
    return targets | {"task": fitted, "classes": classes, "labels": () if labels == classes else labels}


def _stratum_group(task: Task, groups: Mapping[str, Group]) -> str | None:
    """The group that decides the strata; None if the task does."""
    return next((name for name in task.strata_groups if name in groups), None)


def _check_group(name: str, group: Group, targets: Mapping[str, Tensor]) -> None:
    if not isinstance(group, Group):
        raise HoldfastError(
            f"group '{name}' is {named(group)}; it must be a holdfast.Group(names, train, test)"
        )
    for part, codes, labels in (
        ("train", group.train, targets["y_train"]),
        ("test", group.test, targets["y_test"]),
    ):
        if codes.shape != (len(labels),):
            raise HoldfastError(
                f"group '{name}' must have one {part} entry for each of {len(labels)} samples"
            )
        if len(codes) and (codes.min() < 0 or codes.max() >= len(group.names)):
            raise HoldfastError(f"group '{name}' has {part} entries outside its {len(group.names)} names")
