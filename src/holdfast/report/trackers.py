"""Experiment trackers: CSV, TensorBoard, Weights & Biases, MLflow.

A tracker receives the records that a run also writes to ``metrics.jsonl``. All trackers write below a directory of
the user; none needs an account or a network.
"""

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from holdfast.core import files
from holdfast.core.errors import HoldfastError, unknown
from holdfast.report.loading import mean_of_numbers


@runtime_checkable
class Tracker(Protocol):
    """Receives a run's records during training."""

    def start(self, experiment: Mapping[str, Any]) -> None:
        """Called once, before the first round or on resuming."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Called with the record of each round."""

    def finish(self) -> None:
        """Called once, also when training is interrupted."""


def tracker(name: str, directory: Path) -> Tracker:
    """The tracker ``csv``, ``tensorboard``, ``wandb`` or ``mlflow``, writing below ``directory``."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    try:
        return TRACKERS[name](Path(directory))
    except ImportError as error:
        raise HoldfastError(
            f"tracking with {name} needs a package: pip install {error.name or name}"
        ) from error


def scalars(record: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, float]:
    """The numbers of a record by name: the mean of a list over clients, one entry per class and nested key.

    ``{"accuracy": 0.5, "class_accuracy": [0.4, 0.6], "seconds": {"train": 2.0}}`` becomes
    ``{"accuracy": 0.5, "class_accuracy/cat": 0.4, "class_accuracy/dog": 0.6, "seconds/train": 2.0}``.
    """
    nested = dict(record)
    for key in ("round", "participants", "samples", "incidents", "locals"):
        nested.pop(key, None)
    per_class = nested.pop("class_accuracy", None) or []
    names = classes if len(classes) == len(per_class) else [str(number) for number in range(len(per_class))]
    nested["class_accuracy"] = dict(zip(names, per_class, strict=True))
    return dict(_flattened(nested, ""))


def _flattened(value: Any, prefix: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flattened(inner, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(value, list):
        mean = mean_of_numbers(value)
        if mean is not None:
            yield prefix, mean
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, float(value)


class CsvTracker:
    """``metrics.csv``: one row per round, one column per number; later columns are added to all rows."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.csv"
        self._classes: Sequence[str] = ()
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = ["round"]

    def start(self, experiment: Mapping[str, Any]) -> None:
        """Read the file of a resumed run, if there is one."""
        self._classes = experiment.get("classes") or ()
        if self._path.exists():
            with open(self._path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self._rows = [row for row in reader if (row.get("round") or "").isdigit()]
                self._columns = list(reader.fieldnames or self._columns)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a row; rows of rounds that are trained again are replaced."""
        row = {"round": record["round"], **scalars(record, self._classes)}
        kept = [old for old in self._rows if int(old["round"]) < record["round"]]
        new = [name for name in row if name not in self._columns]
        rewrite = bool(new) or len(kept) < len(self._rows) or not self._path.exists()
        self._columns += new
        self._rows = [*kept, row]
        with files.writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "w" if rewrite else "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                if rewrite:
                    writer.writeheader()
                writer.writerows(self._rows if rewrite else [row])

    def finish(self) -> None:
        """Does nothing: all rows are already in the file."""


class TensorBoardTracker:
    """Event files in ``tensorboard/``, shown by ``tensorboard --logdir``."""

    def __init__(self, directory: Path) -> None:
        import tensorboard  # noqa: F401 (required by torch's writer, the error of which does not name it)
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._directory = directory / "tensorboard"
        self._writer: Any = None
        self._experiment: Mapping[str, Any] = {}

    def start(self, experiment: Mapping[str, Any]) -> None:
        """Store the experiment; the file is opened at the first record, whose round it needs."""
        self._experiment = experiment

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a record; events of rounds that are trained again are purged."""
        if self._writer is None:
            self._writer = self._make(str(self._directory), purge_step=record["round"])
            self._writer.add_text(
                "experiment", f"```\n{json.dumps(self._experiment, indent=2, default=str)}\n```"
            )
        for name, value in scalars(record, self._experiment.get("classes") or ()).items():
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """Weights & Biases in offline mode, in ``wandb/``; ``wandb sync`` uploads a run."""

    def __init__(self, directory: Path) -> None:
        import wandb

        self._wandb = wandb
        self._directory = directory
        self._run: Any = None
        self._classes: Sequence[str] = ()

    def start(self, experiment: Mapping[str, Any]) -> None:
        """Begin an offline run with the experiment as its configuration."""
        self._classes = experiment.get("classes") or ()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            mode="offline",
            dir=str(self._directory),
            project="holdfast",
            name=experiment.get("name"),
            config=dict(experiment),
        )

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log(scalars(record, self._classes), step=record["round"])

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()


class MlflowTracker:
    """MLflow's file store in ``mlruns/``, shown by ``mlflow ui``."""

    def __init__(self, directory: Path) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param = Metric, Param
        directory.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by newer versions
        self._client = MlflowClient((directory / "mlruns").resolve().as_uri())
        self._run = ""
        self._classes: Sequence[str] = ()

    def start(self, experiment: Mapping[str, Any]) -> None:
        """Begin a run with the experiment's settings as parameters."""
        self._classes = experiment.get("classes") or ()
        found = self._client.get_experiment_by_name("holdfast")
        place = found.experiment_id if found else self._client.create_experiment("holdfast")
        self._run = self._client.create_run(place, run_name=experiment.get("name")).info.run_id
        settings = [self._param(key, str(value)[:500]) for key, value in experiment.items()]
        self._client.log_batch(self._run, params=settings)

    def log(self, record: Mapping[str, Any]) -> None:
        now, step = int(time.time() * 1000), record["round"]
        found = scalars(record, self._classes)
        self._client.log_batch(
            self._run, [self._metric(_plain(name), value, now, step) for name, value in found.items()]
        )

    def finish(self) -> None:
        if self._run:
            self._client.set_terminated(self._run)


def _plain(name: str) -> str:
    """A valid name for MLflow: letters, digits and ``_-./ `` only."""
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in name)


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "csv": CsvTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
