"""An experiment as plain values, as in a file or on the command line, and how it becomes a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from warnings import catch_warnings

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.settings import (
    DEFAULT_PARTITION,
    DEFAULTS,
    FEDERATION_SETTINGS,
    RECORDED,
    SCHEDULE_SETTINGS,
    ExperimentSettings,
    Role,
    Settings,
    settings_with,
    with_current_names,
)
from holdfast.core.spec import field_hints
from holdfast.training.experiment_entries import (
    MIXED_DIGITS,
    absolute,
    changed,
    data_entry,
    from_yaml,
    options_entry,
    plain_values,
    read_yaml,
    recorded_entry,
    stream_entry,
)

if TYPE_CHECKING:
    from torch import nn

    from holdfast.data.dataset import Dataset
    from holdfast.data.federation import Federation
    from holdfast.data.own import OwnData
    from holdfast.methods.base import Method
    from holdfast.models.network import BatchNormPolicy
    from holdfast.models.own import OwnModel
    from holdfast.models.registry import ModelSpec
    from holdfast.report.trackers import Tracker
    from holdfast.training.execution import SubmitWrite
    from holdfast.training.run import Run

RUN_OPTIONS = (
    "task",
    "loss",
    "metrics",
    "classifier",
    "batchnorm",
    "engine",
    "device",
    "precision",
    "parallel_clients",
    "ray_address",
)
"""The settings besides the schedule that `holdfast.train` takes."""


@dataclass(frozen=True, kw_only=True)
class Experiment(ExperimentSettings):
    """All settings of an experiment, except the directory of its run; besides those of `Settings`:

    Attributes:
        data: a data set's name, a ``.npz`` file, a folder of images, ``mixed-digits:mnist,usps``, or data of the
            user's own: ``sites.py:load``, a function that returns a `Dataset` or a `Federation`, or such an object.
        preprocess: a preset's name, or the fields of `Preprocess`.
        partition: the rule that assigns samples to clients, such as ``dirichlet:0.1`` (the default).
        clients: the number of clients.
        partition_seed: the seed of the partition, the run's own ``seed`` by default. Runs with the same
            partition_seed share one split.
        public: the share of the training samples that is public, held by the server.
        long_tail: the size of the rarest class relative to the largest.
        skew: the fields of `FeatureSkew`, such as ``rotation=30``.
        stream: data that arrives in stages: ``5`` tasks per client, with options ``5,cumulative=true`` or
            ``5,schedule=every-n:10``, or a client that loses samples of a class:
            ``removal:client=0,label=1,keeps=[20,10,0],schedule=every-n:10``.
        federation: a file written by ``holdfast partition --save``, instead of all of these from ``partition`` on.
        method: such as ``fedntd:beta=0.5`` or ``mine.py:Mine``, or a `Method`.
        model: such as ``mlp:64,64`` or ``net.py:make_net``, a module, or a function or class that makes one.
        task: such as ``binary`` or ``regression:loss=huber``; by default that of the data set.
        loss: a loss of the task, such as ``huber``.
        metrics: what is measured on the test set, the primary one first, such as ``auroc,f1``.
        classifier: the name of the model's classifier layer, if it is not the last Linear.
        batchnorm: how BatchNorm is aggregated: ``average``, ``local`` or ``drop``.
        engine: ``auto``, ``sequential``, ``vectorized`` or ``ray``.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: ``auto``, ``float32``, ``tf32``, ``float64``, ``bfloat16`` or ``float16``.
        parallel_clients: how many clients the vectorized engine trains in parallel.
        ray_address: the address of the ``ray`` engine's cluster; by default one is started on this machine.

    Text is converted to a mapping and checked at once, so that two experiments with the same content are equal. Objects
    with a file or an import path are converted to references. Other objects are kept as they are: such an experiment
    runs, but cannot be continued from its directory alone.
    """

    def __post_init__(self) -> None:
        from holdfast.data.partitions import parse_partition, partition_from
        from holdfast.data.skew import FeatureSkew
        from holdfast.data.sources import default_partition
        from holdfast.methods.registry import describe_method, method_from, parse_method
        from holdfast.models.registry import as_model, describe_model, model_from
        from holdfast.tasks.registry import as_task, with_loss
        from holdfast.training.checks import check_method_kind
        from holdfast.updates.attacks import parse_attack
        from holdfast.updates.compression import parse_compression
        from holdfast.updates.privacy import parse_dp
        from holdfast.updates.robust import parse_robust
        from holdfast.updates.sample_privacy import parse_dp_samples
        from holdfast.updates.secure import parse_secure

        self._refuse_unwritable()
        for name, hint in field_hints(type(self)).items():
            self._set(name, from_yaml(getattr(self, name), hint))
        super().__post_init__()
        self._set("data", data_entry(self.data))
        if self.federation is not None:
            self._set("federation", absolute(self.federation))
            self._refuse_beside_federation("a federation file")
        elif isinstance(self.data, str) or self.partition is not None:
            written = self.partition or default_partition(str(self.data))
            partition = parse_partition(written) if isinstance(written, str) else partition_from(written)
            self._set("partition", partition.describe())
        self._set("skew", options_entry(self.skew, "skew", field_hints(FeatureSkew)))
        self._set("stream", stream_entry(self.stream))
        method = self.method
        if isinstance(method, Mapping):
            method = method_from(method)
        check_method_kind(method)
        method = parse_method(method) if isinstance(method, str) else method
        self._set("method", recorded_entry(describe_method(method), method))
        model = model_from(self.model) if isinstance(self.model, Mapping) else as_model(self.model)
        self._set("model", recorded_entry(describe_model(model), model))
        if self.dp is not None:
            self._set("dp", parse_dp(self.dp).describe())
        if self.secure is not None:
            self._set("secure", parse_secure(self.secure).describe())
        if self.dp_samples is not None:
            self._set("dp_samples", parse_dp_samples(self.dp_samples).describe())
        if self.robust is not None:
            self._set("robust", parse_robust(self.robust).describe())
        if self.compress is not None:
            self._set("compress", parse_compression(self.compress).describe())
        if self.attack is not None:
            self._set("attack", parse_attack(self.attack).describe())
        if isinstance(self.metrics, str):
            self._set("metrics", tuple(filter(None, map(str.strip, self.metrics.split(",")))))
        if self.task is not None:
            self._set("task", plain_values(with_loss(as_task(self.task), self.loss).describe()))
            self._set("loss", None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse_unwritable(self) -> None:
        """Raise an error if an entry is an object without a reference, which cannot be written to a file."""
        for name, mark, instead in (
            ("data", "own", "sites.py:load"),
            ("method", "own", "mine.py:Mine"),
            ("model", "own", "net.py:make_net"),
            ("optimizer", "own", ""),
            ("partition", "given", ""),
            ("public", "given", ""),
        ):
            value = getattr(self, name)
            described = value if isinstance(value, Mapping) else {"name": value}
            if described.get("own") or described.get("name") == mark:
                hint = (
                    f" (one that is given as {instead} can be continued from its directory)"
                    if instead
                    else ""
                )
                raise HoldfastError(
                    f"the {name} of this run is a Python object, which is not stored in its file; continue the "
                    f"run with holdfast.train(..., resume=True){hint}"
                )

        for metric in self.metrics if isinstance(self.metrics, list | tuple) else ():
            if isinstance(metric, Mapping):
                raise HoldfastError(
                    f"the metric {metric.get('name')} of this run is a Python function, which is not stored in "
                    "its file; continue the run with holdfast.train(..., resume=True)"
                )

    def _refuse_beside_federation(self, whole: str, allowed: Iterable[str] = ()) -> None:
        for name in FEDERATION_SETTINGS:
            if getattr(self, name) != DEFAULTS[name] and name not in allowed:
                raise HoldfastError(f"{name} is given together with {whole}, which contains it already")

    # Files and settings ---------------------------------------------------------------------------------

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Experiment:
        """The experiment with these settings; further entries that a run records are ignored."""
        known = {field.name for field in fields(cls)}
        current = with_current_names(values)
        for key in current:
            if key not in known and key not in RECORDED:
                raise unknown("setting", str(key), known)
        return cls(**{key: value for key, value in current.items() if key in known})

    @classmethod
    def from_file(cls, path: str | Path) -> Experiment:
        """The experiment in a YAML file, a run's experiment.yaml included."""
        return cls.from_mapping(read_yaml(path))

    def with_settings(self, settings: Iterable[str]) -> Experiment:
        """The experiment with ``["lr=0.1", "method.beta=0.5"]`` changed; values are read as YAML."""
        return self.from_mapping(changed(self.describe(), settings))

    def describe(self) -> dict[str, Any]:
        """All settings as plain values; ``from_mapping`` is the inverse."""
        from holdfast.core import optimizers
        from holdfast.data.own import OwnData
        from holdfast.methods.registry import describe_method
        from holdfast.models.registry import describe_model
        from holdfast.runs.metrics_file import plain

        described = {field.name: getattr(self, field.name) for field in fields(self)}
        objects: dict[str, Callable[[Any], Any]] = {
            "method": describe_method,
            "model": describe_model,
            "data": OwnData.describe,
            "optimizer": optimizers.description,
        }
        for name, describe in objects.items():
            if not isinstance(described[name], (str, Mapping)):
                described[name] = plain(describe(described[name]))
        values: dict[str, Any] = plain_values(described)
        return values

    # Running --------------------------------------------------------------------------------------------

    @property
    def data_is_fixed(self) -> bool:
        """Whether the data is the same for every seed; mixed domains and functions may depend on the seed."""
        if not isinstance(self.data, str):
            return self._own_data().is_fixed
        return self.data.partition(":")[0] != MIXED_DIGITS

    @property
    def names_its_data(self) -> bool:
        """Whether the data has a name, a path or a reference, and is not an object in memory."""
        return isinstance(self.data, (str, Mapping))

    @property
    def data_name(self) -> str:
        """The data's name, for display."""
        return self.data if isinstance(self.data, str) else self._own_data().name

    def load_data(self) -> Dataset | Federation:
        """The data set, or the federation if the user-defined data is one."""
        from holdfast.data.mixed import DIGIT_DOMAINS, mix_domains
        from holdfast.data.preprocess import Preprocess, preprocess_for
        from holdfast.data.sources import check_name, load

        preset: str | Preprocess
        if isinstance(self.preprocess, str):
            preset = self.preprocess
        else:
            preset = Preprocess(
                **(options_entry(self.preprocess, "preprocess", field_hints(Preprocess)) or {})
            )
        if not isinstance(self.data, str):
            own = self._own_data()
            if self.preprocess != DEFAULTS["preprocess"]:
                raise HoldfastError(
                    f"preprocess is given together with {own.name}, whose data set already has one"
                )
            return own.load(self._partition_seed)
        name, _, domains = self.data.partition(":")
        if name != MIXED_DIGITS:
            return load(self.data, preprocess=preset)
        names = domains.split(",") if domains else DIGIT_DOMAINS
        for domain in names:  # check all names before any download
            check_name(domain)
        mixed = mix_domains([load(domain) for domain in names], seed=self._partition_seed)
        chosen = preset if isinstance(preset, Preprocess) else preprocess_for(MIXED_DIGITS, preset)
        return replace(mixed, preprocess=chosen)

    def build_federation(self, dataset: Dataset | Federation | None = None) -> Federation:
        """The federation; ``dataset`` is the result of `load_data`, if it is loaded already."""
        from holdfast.data.federation import Federation
        from holdfast.data.partitions import parse_partition
        from holdfast.data.schedules import schedule_from
        from holdfast.data.streams import federation_from

        dataset = dataset or self.load_data()
        if isinstance(dataset, Federation):
            seeded = () if self.data_is_fixed else ("partition_seed",)
            self._refuse_beside_federation(f"{self.data_name}, a federation", seeded)
            if self.federation is not None:
                raise HoldfastError(
                    f"federation is given together with {self.data_name}, which is a federation"
                )
            return dataset
        if self.federation is not None:
            return Federation.load(self.federation, dataset)
        setting = {
            "clients": self.clients,
            "public": self.public,
            "long_tail": self.long_tail,
            "skew": self.skew,
            "stream": self.stream,
        }
        natural = "by-site" if "site" in dataset.groups else DEFAULT_PARTITION
        partition = parse_partition(natural).describe() if self.partition is None else self.partition
        assert isinstance(partition, Mapping)
        description = dict(partition) | {"seed": self._partition_seed}
        description |= {key: value for key, value in setting.items() if value is not None}
        if self.stream is None:
            return federation_from(dataset, description)
        assert isinstance(self.stream, Mapping)
        streaming = dict(self.stream)
        schedule = streaming.pop("schedule", None)
        stages = len(streaming["keeps"]) if "keeps" in streaming else streaming["tasks_per_client"]
        return federation_from(
            dataset,
            description | {"stream": streaming},
            None if schedule is None else schedule_from({"stages": stages, **schedule}),
        )

    def run(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        federation: Federation | None = None,
        trackers: Iterable[Tracker] = (),
        on_round: Callable[[dict[str, Any]], None] | None = None,
        progress: bool = True,
        submit_final_write: SubmitWrite | None = None,
        stop_after: int | None = None,
    ) -> Run:
        """Train, and store the run in the directory ``out``.

        ``resume`` continues the run in ``out``. ``federation`` is the result of `build_federation`, if several runs
        share it. ``trackers`` and ``on_round`` receive the record of every round; ``progress``,
        ``submit_final_write`` and ``stop_after`` as in `holdfast.train`.
        """
        from holdfast.training.train import train

        written = self.describe()
        # The run itself describes objects in memory.
        asked = settings_with(Role.SOURCE, Role.FEDERATION) if isinstance(self.data, (str, Mapping)) else ()
        return train(
            self.make_method(),
            self._model(),
            federation or self.build_federation(),
            **{name: getattr(self, name) for name in SCHEDULE_SETTINGS},
            **{name: written[name] for name in RUN_OPTIONS},
            out=out,
            resume=resume,
            experiment={key: written[key] for key in asked},
            trackers=trackers,
            on_round=on_round,
            progress=progress,
            submit_final_write=submit_final_write,
            stop_after=stop_after,
        )

    def refuse_early(self, federation: Federation) -> None:
        """Raise the errors that `run` raises before its first round."""
        from holdfast.engine.sequential import SequentialEngine
        from holdfast.training.session import Training

        settings = Settings(**{name: getattr(self, name) for name in SCHEDULE_SETTINGS})
        if not len(federation.dataset.y_test):
            settings = replace(settings, evaluate_locals=False)
        with catch_warnings(action="ignore"):  # they are shown when it trains
            Training(
                self.make_method(),
                self._model(),
                federation,
                settings,
                engine=partial(
                    SequentialEngine, settings=settings
                ),  # the smallest engine: one copy of the model
                device="cpu",
                batchnorm=cast("BatchNormPolicy", self.batchnorm),
                classifier=self.classifier,
                task=self.task,
                loss=self.loss,
                metrics=self.metrics,
            )

    @property
    def _partition_seed(self) -> int:
        return self.seed if self.partition_seed is None else self.partition_seed

    def make_method(self) -> Method:
        """The method itself."""
        from holdfast.methods.base import Method
        from holdfast.methods.registry import method_from

        method = self.method
        assert not isinstance(method, str)  # since __post_init__
        return method if isinstance(method, Method) else method_from(method)

    def _model(self) -> ModelSpec | OwnModel | nn.Module:
        from holdfast.models.registry import model_from

        model = self.model
        assert not isinstance(model, str)
        return model_from(model) if isinstance(model, Mapping) else model

    def _own_data(self) -> OwnData:
        from holdfast.data.own import OwnData, own_data

        data = own_data(self.data) if isinstance(self.data, Mapping) else self.data
        assert isinstance(data, OwnData)
        return data


def resume(
    path: str | Path,
    rounds: int | None = None,
    *,
    device: str | None = None,
    trackers: Iterable[Tracker] = (),
    on_round: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
) -> Run:
    """Continue the run in the directory ``path`` from its last checkpoint; a finished run is returned as it is.

    ``rounds`` sets a new total number of rounds. On the same machine and engine the result has the same bits as that of
    an uninterrupted run with this number of rounds. A `HoldfastError` is raised where that is impossible: for streams,
    for methods that depend on the number of rounds or have a final step, and if the last checkpoint lacks states of
    clients.

    ``device`` continues on another device. The other arguments are those of `train`. A run whose method, model or data
    came from Python continues with ``train(..., out=path, resume=True)``.
    """
    from holdfast.runs import RunDirectory

    experiment = Experiment.from_mapping(RunDirectory.open(path).experiment)
    given = {"rounds": rounds, "device": device}
    experiment = experiment.with_settings(f"{name}={v}" for name, v in given.items() if v is not None)
    return experiment.run(path, resume=True, trackers=trackers, on_round=on_round, progress=progress)


def with_defaults(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a recorded run of any version, with defaults for those it lacks.

    Entries of user-defined objects are returned as recorded; no code is loaded.
    """
    own = ("data", "method", "model", "optimizer", "partition", "public")
    kept = {key: recorded[key] for key in own if key in recorded and _is_own(recorded[key])}
    if "data" in kept:  # which may be a federation, without a partition
        kept["partition"] = recorded.get("partition")
    rest = {key: value for key, value in recorded.items() if key not in kept}
    return Experiment.from_mapping(rest).describe() | kept


def _is_own(value: Any) -> bool:
    """Whether an entry, or a part of a stack, is user-defined or an object."""
    if not isinstance(value, Mapping):
        return bool(value == "given")
    return (
        "own" in value
        or "sha256" in value
        or value.get("name") == "given"
        or any(map(_is_own, value.values()))
    )
