"""The settings of a run: types, ranges, defaults, help texts and roles. Every list of settings derives from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from typing import Annotated, Any

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import (
    Momentum,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveFraction,
    Range,
    validate_fields,
)

DEFAULT_PARTITION = "dirichlet:0.1"

Described = str | Mapping[str, Any]
"""A thing as text, ``fedntd:beta=0.5``, or as a mapping, ``{name: fedntd, beta: 0.5}``."""


class Group(Enum):
    """The groups in which help shows settings."""

    DATA = "Data and clients"
    METHOD = "Method and model"
    SCHEDULE = "Schedule"
    TESTING = "Testing and saving"
    MACHINE = "Machine"


class Role(Enum):
    """What a setting decides."""

    SOURCE = auto()  # the samples
    FEDERATION = auto()  # who holds which samples, and when
    RESULT = auto()  # the result; it cannot change when a run is resumed
    LIMIT = auto()  # when a round is given up; it may change when a run is resumed
    MACHINE = auto()  # where a run is computed and saved; results agree up to rounding


def setting(group: Group, help: str, default: Any = MISSING, role: Role = Role.RESULT) -> Any:
    """A dataclass field that is a setting."""
    return field(default=default, metadata={"group": group, "help": help, "role": role})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is trained: the schedule and the optimiser.

    The learning rate in round t (from 1) is ``lr * lr_decay ** (t - 1)``.
    """

    rounds: PositiveCount = setting(Group.SCHEDULE, "Rounds of communication.")
    clients_per_round: Annotated[int, Range(ge=1, unit="client a round")] | None = setting(
        Group.SCHEDULE, "Clients sampled for each round (default: all).", None
    )
    local_epochs: PositiveCount = setting(Group.SCHEDULE, "Epochs of local training in each round.", 1)
    batch_size: PositiveCount = setting(Group.SCHEDULE, "Samples in each local step.", 32)
    drop_last: bool = setting(
        Group.SCHEDULE, "Leave out an epoch's last batch if it is not full, unless it is the only one.", False
    )
    lr: Positive = setting(Group.SCHEDULE, "Learning rate in the first round.", 0.01)
    lr_decay: PositiveFraction = setting(
        Group.SCHEDULE, "Factor by which the learning rate changes after each round.", 1.0
    )
    momentum: Momentum = setting(Group.SCHEDULE, "Momentum of local SGD.", 0.0)
    keep_momentum: bool = setting(
        Group.SCHEDULE, "Keep a client's momentum from one of its rounds to the next.", False
    )
    weight_decay: NonNegative = setting(Group.SCHEDULE, "Weight decay of local SGD.", 0.0)
    max_grad_norm: Positive | None = setting(Group.SCHEDULE, "Clip local gradients to this norm.", None)
    client_dropout: Momentum = setting(
        Group.SCHEDULE, "Probability that a sampled client fails in a round.", 0.0
    )
    deadline: Annotated[float, Range(gt=0, unit="seconds")] | None = setting(
        Group.SCHEDULE,
        "Seconds after which a round closes without clients that are not ready.",
        None,
        Role.LIMIT,
    )
    min_clients: PositiveCount = setting(
        Group.SCHEDULE, "Usable updates below which the run stops.", 1, Role.LIMIT
    )
    seed: int = setting(Group.SCHEDULE, "Seed of all random choices.", 0)
    evaluate_every: PositiveCount = setting(Group.TESTING, "Rounds between tests of the global model.", 1)
    evaluate_locals: bool = setting(Group.TESTING, "Test every participating client's local model too.", True)
    local_test_samples: Annotated[int, Range(ge=1, unit="sample")] | None = setting(
        Group.TESTING, "Test samples for each local model (default: all on a GPU, 100 on a CPU).", None
    )
    probe_every: Annotated[int, Range(ge=0, unit="rounds")] = setting(
        Group.TESTING, "Rounds between measurements of drift and alignment; 0 for none.", 0
    )
    checkpoint_seconds: NonNegative = setting(
        Group.TESTING, "Seconds between checkpoints.", 30.0, Role.MACHINE
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.keep_momentum and not self.momentum:
            raise HoldfastError("keep_momentum is True; it must be false where momentum is 0")

    def lr_at(self, round: int) -> float:
        """The learning rate in a round (from 1)."""
        return float(self.lr * self.lr_decay ** (round - 1))


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(Settings):
    """Everything that makes a run, and nothing about where it is kept."""

    rounds: PositiveCount = setting(Group.SCHEDULE, "Rounds of communication.", 100)
    data: str = setting(
        Group.DATA, "A data set (see `holdfast datasets`), a .npz file or a folder of images.", "digits",
        Role.SOURCE,
    )  # fmt: skip
    preprocess: Described = setting(
        Group.DATA, "Preprocessing preset: plain, fedntd, fedka, flashback, fedfa, pfllib, moon, fedmlp.", "plain",
        Role.SOURCE,
    )  # fmt: skip
    partition: Described | None = setting(
        Group.DATA, f"Partition: iid, shards:2, dirichlet:0.1, … (default: {DEFAULT_PARTITION}).", None,
        Role.FEDERATION,
    )  # fmt: skip
    clients: int | None = setting(Group.DATA, "Number of clients.", None, Role.FEDERATION)
    partition_seed: int | None = setting(
        Group.DATA, "Seed of the partition (default: that of --seed).", None, Role.FEDERATION
    )
    public: float = setting(
        Group.DATA, "Share of the training data that the server holds.", 0.0, Role.FEDERATION
    )
    long_tail: float | None = setting(
        Group.DATA, "Size of the rarest class relative to the largest, such as 0.05.", None, Role.FEDERATION
    )
    skew: Described | None = setting(
        Group.DATA, "Feature skew between clients, such as rotation=30,noise=0.1.", None, Role.FEDERATION
    )
    stream: Described | None = setting(
        Group.DATA,
        "Data in stages: tasks per client, such as 5 or 5,schedule=every-n:10.",
        None,
        Role.FEDERATION,
    )
    federation: str | None = setting(
        Group.DATA, "A federation saved by `holdfast partition --save`.", None, Role.SOURCE
    )
    method: Described = setting(
        Group.METHOD, "fedavg, fedntd:beta=0.5, fedntd+fedprox, … (see `holdfast methods`).", "fedavg"
    )
    model: Described = setting(
        Group.METHOD, "cnn, linear, mlp:64,64, resnet18:norm=group, ntd-cifar, …", "cnn"
    )
    classifier: str | None = setting(
        Group.METHOD, "Name of the model's classifier layer, if it is not the last Linear.", None
    )
    batchnorm: str = setting(Group.METHOD, "Aggregation of BatchNorm: average, local or drop.", "average")
    engine: str = setting(Group.MACHINE, "auto, sequential, vectorized or ray.", "auto", Role.MACHINE)
    device: str = setting(Group.MACHINE, "auto, cpu or cuda.", "auto", Role.MACHINE)
    precision: str = setting(Group.MACHINE, "auto, float32, tf32 or float64.", "auto")
    parallel_clients: PositiveCount | None = setting(
        Group.MACHINE, "Clients that the vectorized engine trains side by side.", None, Role.MACHINE
    )
    ray_address: str | None = setting(
        Group.MACHINE, "Address of the ray engine's cluster (default: one is started on this machine).", None,
        Role.MACHINE,
    )  # fmt: skip


RECORDED = ("hash", "shape", "classes", "own_kernels", "versions", "machine")
"""Entries of a run's experiment.yaml that are found, not set."""


def settings_with(*roles: Role) -> tuple[str, ...]:
    """The names of the settings that have one of these roles."""
    return tuple(f.name for f in fields(ExperimentSettings) if f.metadata["role"] in roles)


SCHEDULE_SETTINGS = tuple(f.name for f in fields(Settings))
"""The settings of `Settings`, which train() takes as numbers."""

FEDERATION_SETTINGS = settings_with(Role.FEDERATION)
MACHINE_SETTINGS = settings_with(Role.MACHINE)
DEFAULTS = {f.name: f.default for f in fields(ExperimentSettings)}


# Former names -----------------------------------------------------------------------------------------------

FORMER_NAMES = {
    "sample": "clients_per_round",
    "epochs": "local_epochs",
    "dropout": "client_dropout",
    "norm": "batchnorm",
    "probe": "probe_every",
    "local_test": "local_test_samples",
    "lanes": "parallel_clients",
    "address": "ray_address",
}
"""Settings that runs, experiment files and results from before version 0.2 store under another name."""

FORMER_VALUES = {("engine", "lanes"): "vectorized"}
"""Values of settings that had another name, by setting and former value."""


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as stored by any version, under the names they have now."""
    current = {FORMER_NAMES.get(key, key): value for key, value in settings.items()}
    for (key, former), value in FORMER_VALUES.items():
        if current.get(key) == former:
            current[key] = value
    return current
