"""The settings of a run: types, ranges, defaults, help texts and roles. Every list of settings derives from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from holdfast.core.errors import HoldfastError
from holdfast.core.lr_schedules import LRSchedule, lr_schedule_from
from holdfast.core.optimizers import SGD, Factory, OptimizerSpec, described, factory_name, optimizer_from
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
"""A description as text, ``fedntd:beta=0.5``, or as a mapping, ``{name: fedntd, beta: 0.5}``."""

Given = Described | Any
"""A description, or the Python object itself; `Experiment` checks which."""


class HelpGroup(Enum):
    """The groups in which help shows settings."""

    DATA = "Data and clients"
    METHOD = "Method and model"
    SCHEDULE = "Schedule"
    PRIVACY = "Privacy and robustness"
    TESTING = "Testing and saving"
    MACHINE = "Machine"


class Role(Enum):
    """What a setting affects."""

    SOURCE = auto()  # the samples
    FEDERATION = auto()  # the assignment of samples to clients and stages
    RESULT = auto()  # the result; it cannot change when a run is resumed
    LIMIT = auto()  # when a round ends or fails; it may change when a run is resumed
    MACHINE = auto()  # where a run is computed and saved; results agree up to rounding


def setting(group: HelpGroup, help: str, default: Any = MISSING, role: Role = Role.RESULT) -> Any:
    """A dataclass field that is a setting."""
    return field(default=default, metadata={"group": group, "help": help, "role": role})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The training settings of a run: schedule, optimiser, privacy and tests.

    The learning rate in round t (from 1) is ``lr * lr_decay ** (t - 1)``, times the factor of ``lr_schedule``.
    """

    rounds: PositiveCount = setting(HelpGroup.SCHEDULE, "Rounds of communication.")
    clients_per_round: Annotated[int, Range(ge=1, unit="client a round")] | None = setting(
        HelpGroup.SCHEDULE, "Clients sampled for each round (default: all).", None
    )
    sampling: Literal["random", "cyclic"] = setting(
        HelpGroup.SCHEDULE,
        "How clients are sampled: random, or cyclic (each client once, in random order, before any is sampled again).",
        "random",
    )
    local_epochs: Annotated[int | float, Range(gt=0)] = setting(
        HelpGroup.SCHEDULE, "Epochs of local training in each round, such as 5 or 0.5.", 1
    )
    local_steps: Annotated[int, Range(ge=1, unit="step")] | None = setting(
        HelpGroup.SCHEDULE, "Local steps of every client in each round, instead of local_epochs.", None
    )
    batch_size: PositiveCount = setting(HelpGroup.SCHEDULE, "Samples in each local step.", 32)
    micro_batch_size: Annotated[int, Range(ge=1, unit="sample")] | None = setting(
        HelpGroup.SCHEDULE,
        "Samples per forward and backward pass; gradients are accumulated over the batch (default: the whole batch).",
        None,
    )
    drop_last: bool = setting(
        HelpGroup.SCHEDULE,
        "Skip the last batch of an epoch if it is not full, unless it is the only batch.",
        False,
    )
    lr: Positive = setting(
        HelpGroup.SCHEDULE,
        "Learning rate in the first round (default: 0.1 for sgd, 0.01 for adagrad, 0.001 for others).",
        None,
    )
    lr_decay: PositiveFraction = setting(
        HelpGroup.SCHEDULE, "Factor that multiplies the learning rate after each round.", 1.0
    )
    lr_schedule: Described = setting(
        HelpGroup.SCHEDULE,
        "Learning-rate schedule, applied in addition to lr_decay: constant, exponential:gamma=0.99, "
        "step:every=30,gamma=0.1 or cosine:final=0.01; options of each: warmup=5, over=steps.",
        "constant",
    )
    optimizer: Described | Factory = setting(
        HelpGroup.SCHEDULE,
        "Optimiser of the clients: sgd, sgd:nesterov=true, adam:betas=[0.9,0.99], adamw, rmsprop or adagrad.",
        "sgd",
    )
    momentum: Momentum = setting(HelpGroup.SCHEDULE, "Momentum of the sgd and rmsprop optimisers.", 0.0)
    keep_optimizer: bool = setting(
        HelpGroup.SCHEDULE,
        "Keep each client's optimiser state between the rounds in which it takes part.",
        False,
    )
    weight_decay: NonNegative = setting(HelpGroup.SCHEDULE, "Weight decay of the optimiser.", 0.0)
    max_grad_norm: Positive | None = setting(
        HelpGroup.SCHEDULE, "Norm to which local gradients are clipped.", None
    )
    client_dropout: Momentum = setting(
        HelpGroup.SCHEDULE, "Probability that a sampled client fails in a round.", 0.0
    )
    deadline: Annotated[float, Range(gt=0, unit="seconds")] | None = setting(
        HelpGroup.SCHEDULE,
        "Seconds after which a round ends; clients that have not finished are left out.",
        None,
        Role.LIMIT,
    )
    min_clients: PositiveCount = setting(
        HelpGroup.SCHEDULE,
        "Minimum number of usable updates in a round; the run stops below it.",
        1,
        Role.LIMIT,
    )
    seed: int = setting(HelpGroup.SCHEDULE, "Seed of all random choices.", 0)
    dp: Described | None = setting(
        HelpGroup.PRIVACY, "Client-level differential privacy, such as epsilon=8,delta=1e-5.", None
    )
    secure: Described | None = setting(
        HelpGroup.PRIVACY, "Secure aggregation of updates: secagg+, secagg+:threshold=0.8,bits=32.", None
    )
    dp_samples: Described | None = setting(
        HelpGroup.PRIVACY,
        "Sample-level differential privacy at each client (DP-SGD), such as epsilon=8.",
        None,
    )
    robust: Described | None = setting(
        HelpGroup.PRIVACY,
        "Robust aggregation of updates: median, trimmed-mean:0.2, krum:2, bulyan:1, …",
        None,
    )
    attack: Described | None = setting(
        HelpGroup.PRIVACY, "Simulated attack by a share of the clients: sign-flip:0.2, backdoor:0.2, …", None
    )
    compress: Described | None = setting(
        HelpGroup.PRIVACY, "Compression of updates: int8, int4, topk:0.01, topk:0.1+int8.", None
    )
    max_update_norm: Positive | None = setting(
        HelpGroup.PRIVACY, "Norm above which an update is rejected.", None
    )
    max_update_ratio: Annotated[float, Range(ge=1)] | None = setting(
        HelpGroup.PRIVACY,
        "Multiple of the round's median update norm above which an update is rejected.",
        None,
    )
    validation: Annotated[float, Range(gt=0, lt=1)] | None = setting(
        HelpGroup.TESTING,
        "Share of each client's training data that is held out for validation, such as 0.1.",
        None,
    )
    patience: PositiveCount | None = setting(
        HelpGroup.TESTING,
        "Early stopping: number of tests without improvement on the validation samples.",
        None,
    )
    evaluate_every: PositiveCount = setting(HelpGroup.TESTING, "Rounds between tests of the global model.", 1)
    evaluate_locals: bool = setting(
        HelpGroup.TESTING, "Also test the local model of every participating client.", True
    )
    local_test_samples: Annotated[int, Range(ge=1, unit="sample")] | None = setting(
        HelpGroup.TESTING, "Test samples for each local model (default: all on a GPU, 100 on a CPU).", None
    )
    probe_every: Annotated[int, Range(ge=0, unit="rounds")] = setting(
        HelpGroup.TESTING, "Rounds between measurements of drift and alignment; 0 for none.", 0
    )
    checkpoint_seconds: NonNegative = setting(
        HelpGroup.TESTING, "Seconds between checkpoints.", 30.0, Role.MACHINE
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", described(self.optimizer))
        if self.lr is None:
            object.__setattr__(self, "lr", (self.optimizer_spec or OptimizerSpec).default_lr)
        validate_fields(self)
        self._check_optimizer()
        object.__setattr__(self, "lr_schedule", self.schedule.describe())
        if float(self.local_epochs).is_integer():
            object.__setattr__(self, "local_epochs", int(self.local_epochs))
        if self.local_steps is not None and self.local_epochs != 1:
            raise HoldfastError(
                f"local_steps is {self.local_steps} and local_epochs is {self.local_epochs}; give one of them"
            )
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise HoldfastError(
                f"micro_batch_size is {self.micro_batch_size}; it must be at most batch_size, {self.batch_size}"
            )
        if self.micro_batch_size is not None and self.dp_samples is not None:
            raise HoldfastError(
                "micro_batch_size must be None with dp_samples, which computes the gradients of single samples"
            )

    def _check_optimizer(self) -> None:
        spec = self.optimizer_spec
        if spec is None:  # a factory has its own options
            for name in ("momentum", "weight_decay"):
                if getattr(self, name):
                    own = factory_name(cast("Factory", self.optimizer))
                    raise HoldfastError(
                        f"{name} is {getattr(self, name)}, which has no effect on {own}; set the options of {own} "
                        f"by functools.partial({own}, …)"
                    )
            return
        if self.momentum and not spec.uses_momentum:
            raise HoldfastError(
                f"momentum is {self.momentum}; it must be 0 for optimizer {spec.name}: only sgd and rmsprop use it"
            )
        if getattr(spec, "nesterov", False) and not self.momentum:
            raise HoldfastError("sgd: nesterov is True; it must be false where momentum is 0")
        if self.keep_optimizer and not (spec.slots or self.momentum):
            raise HoldfastError(
                f"keep_optimizer is True; it must be false for optimizer {spec.name} where momentum is 0, "
                "which keeps no state"
            )

    @cached_property
    def optimizer_spec(self) -> OptimizerSpec | None:
        """The named optimiser; None for a factory of PyTorch optimisers."""
        return optimizer_from(self.optimizer) if isinstance(self.optimizer, (str, Mapping)) else None

    @property
    def uses_plain_sgd(self) -> bool:
        """Whether the optimiser is SGD without ``nesterov``."""
        return self.optimizer_spec == SGD()

    def lr_at(self, round: int) -> float:
        """The learning rate in a round (from 1), without the factors of local steps if it varies within rounds."""
        lr = float(self.lr * self.lr_decay ** (round - 1))
        return lr if self.lr_varies_in_round else lr * self.schedule.factor(round - 1, self.rounds)

    def step_factors(self, steps: int) -> list[float]:
        """The factors of the learning rate in each of a client's local steps in a round, if it varies within rounds."""
        return [self.schedule.factor(step, steps) for step in range(steps)]

    @cached_property
    def schedule(self) -> LRSchedule:
        """The schedule of the learning rate besides ``lr_decay``."""
        return lr_schedule_from(self.lr_schedule)

    @property
    def withholds_counts(self) -> bool:
        """Whether the clients' label counts are private, so that neither server nor methods may use them."""
        return any(given is not None for given in (self.dp, self.dp_samples, self.secure))

    @property
    def lr_varies_in_round(self) -> bool:
        """Whether the learning rate changes from one local step to the next."""
        return self.schedule.over == "steps"


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(Settings):
    """All settings of an experiment, except the directory of its run."""

    rounds: PositiveCount = setting(HelpGroup.SCHEDULE, "Rounds of communication.", 100)
    data: Given = setting(
        HelpGroup.DATA,
        "A data set (see `holdfast datasets`), a .npz file, a folder of images, sites/:target=y, or sites.py:load.",
        "digits",
        Role.SOURCE,
    )
    preprocess: Described = setting(
        HelpGroup.DATA, "Preprocessing preset: plain, fedntd, fedka, flashback, fedfa, pfllib, moon, fedmlp.", "plain",
        Role.SOURCE,
    )  # fmt: skip
    partition: Described | None = setting(
        HelpGroup.DATA,
        f"Partition: iid, shards:2, … (default: {DEFAULT_PARTITION}; by-site for data with sites).", None,
        Role.FEDERATION,
    )  # fmt: skip
    clients: int | None = setting(HelpGroup.DATA, "Number of clients.", None, Role.FEDERATION)
    partition_seed: int | None = setting(
        HelpGroup.DATA, "Seed of the partition (default: the value of --seed).", None, Role.FEDERATION
    )
    public: float = setting(
        HelpGroup.DATA, "Share of the training data that is public, held by the server.", 0.0, Role.FEDERATION
    )
    long_tail: float | None = setting(
        HelpGroup.DATA,
        "Size of the rarest class relative to the largest, such as 0.05.",
        None,
        Role.FEDERATION,
    )
    skew: Described | None = setting(
        HelpGroup.DATA,
        "Feature skew between clients, such as rotation=30,noise=0.1.",
        None,
        Role.FEDERATION,
    )
    stream: Described | None = setting(
        HelpGroup.DATA,
        "Data in stages: tasks per client, such as 5 or 5,schedule=every-n:10; or "
        "removal:client=0,label=1,keeps=[20,10,0], a client that loses samples of a class.",
        None,
        Role.FEDERATION,
    )
    federation: str | None = setting(
        HelpGroup.DATA, "A federation saved by `holdfast partition --save`.", None, Role.SOURCE
    )
    method: Given = setting(
        HelpGroup.METHOD,
        "fedavg, fedntd:beta=0.5, fedntd+fedprox, mine.py:Mine, … (see `holdfast methods`).",
        "fedavg",
    )
    model: Given = setting(
        HelpGroup.METHOD, "cnn, linear, mlp:64,64, resnet18:norm=group, ntd-cifar, net.py:make_net, …", "cnn"
    )
    task: Described | None = setting(
        HelpGroup.METHOD,
        "multiclass, binary, regression:loss=huber, survival, … (default: that of the data).",
        None,
    )
    loss: str | None = setting(
        HelpGroup.METHOD,
        "Loss function, such as huber for regression (default: the first of the task's losses).",
        None,
    )
    metrics: tuple[str, ...] | str | None = setting(
        HelpGroup.TESTING,
        "Metrics of the tests, the primary one first, such as auroc,f1 (default: those of the task).",
        None,
    )
    classifier: str | None = setting(
        HelpGroup.METHOD, "Name of the model's classifier layer, if it is not the last Linear.", None
    )
    batchnorm: str = setting(
        HelpGroup.METHOD, "Aggregation of BatchNorm layers: average, local or drop.", "average"
    )
    engine: str = setting(HelpGroup.MACHINE, "auto, sequential, vectorized or ray.", "auto", Role.MACHINE)
    device: str = setting(HelpGroup.MACHINE, "auto, cpu or cuda.", "auto", Role.MACHINE)
    precision: str = setting(HelpGroup.MACHINE, "auto, float32, tf32, float64, bfloat16 or float16.", "auto")
    parallel_clients: PositiveCount | None = setting(
        HelpGroup.MACHINE,
        "Number of clients that the vectorized engine trains at the same time.",
        None,
        Role.MACHINE,
    )
    ray_address: str | None = setting(
        HelpGroup.MACHINE, "Address of a Ray cluster for the ray engine (default: start one on this machine).", None,
        Role.MACHINE,
    )  # fmt: skip


RECORDED = (
    "hash", "shape", "sample_dtype", "sample_preprocess", "classes", "outputs", "encoder", "frozen", "own_kernels",
    "versions", "machine",
)  # fmt: skip
"""Entries of a run's experiment.yaml that are derived from the data, the model and the machine, not set."""


def settings_with(*roles: Role) -> tuple[str, ...]:
    """The names of the settings that have one of these roles."""
    return tuple(f.name for f in fields(ExperimentSettings) if f.metadata["role"] in roles)


SCHEDULE_SETTINGS = tuple(f.name for f in fields(Settings))
"""The settings of `Settings`, which train() takes as numbers."""

FEDERATION_SETTINGS = settings_with(Role.FEDERATION)
MACHINE_SETTINGS = settings_with(Role.MACHINE)
DEFAULTS = {f.name: getattr(ExperimentSettings(), f.name) for f in fields(ExperimentSettings)}


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
    "keep_momentum": "keep_optimizer",
}
"""Settings that runs, experiment files and results from before version 0.2 store under another name."""

FORMER_VALUES = {("engine", "lanes"): "vectorized"}
"""Values of settings that had another name, by setting and former value."""

FORMER_DEFAULTS = {"task": {"name": "multiclass"}, "metrics": ["accuracy"]}
"""Values of settings that runs from before version 0.2 do not record."""


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as stored by any version, under the names they have now."""
    current = {FORMER_NAMES.get(key, key): value for key, value in settings.items()}
    for (key, former), value in FORMER_VALUES.items():
        if current.get(key) == former:
            current[key] = value
    return current
