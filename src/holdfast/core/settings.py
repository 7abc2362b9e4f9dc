"""How a run is trained: the schedule and the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import as_number

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


@dataclass(frozen=True)
class Settings:
    """The schedule of a run. Learning rate in round t (from 1): ``lr * lr_decay ** (t - 1)``."""

    rounds: int
    clients_per_round: int | None = None  # clients per round; None: all
    local_epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False  # leave out an epoch's last batch where it is not full, unless it is the only one
    lr: float = 0.01
    momentum: float = 0.0
    keep_momentum: bool = (
        False  # it outlives a round: a client goes on with what it had when it last took part
    )
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    max_grad_norm: float | None = None
    client_dropout: float = 0.0  # probability that a sampled client is lost mid-round
    deadline: float | None = None  # seconds after which a round closes without those still at work
    min_clients: int = 1  # with fewer usable updates a round is not closed, and the run stops
    seed: int = 0
    evaluate_every: int = 1
    evaluate_locals: bool = True
    local_test_samples: int | None = (
        None  # test samples for each local model; None: all on a GPU, few on a CPU
    )
    probe_every: int = 0  # every n rounds the heavier probes; 0: never
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        hints = get_type_hints(Settings)
        for field in fields(Settings):
            value = as_number(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)

        def need(holds: bool, name: str, right: str) -> None:
            if not holds:
                raise HoldfastError(f"{name} is {getattr(self, name)!r}; it must be {right}")

        need(self.rounds >= 1, "rounds", "at least 1")
        need(
            self.clients_per_round is None or self.clients_per_round >= 1,
            "clients_per_round",
            "at least 1 client a round",
        )
        need(self.local_epochs >= 1, "local_epochs", "at least 1")
        need(self.batch_size >= 1, "batch_size", "at least 1")
        need(self.lr > 0, "lr", "above 0")
        need(0 <= self.momentum < 1, "momentum", "from 0 up to, but not, 1")
        need(not self.keep_momentum or self.momentum > 0, "keep_momentum", "false where momentum is 0")
        need(self.weight_decay >= 0, "weight_decay", "at least 0")
        need(0 < self.lr_decay <= 1, "lr_decay", "above 0 and at most 1")
        need(self.max_grad_norm is None or self.max_grad_norm > 0, "max_grad_norm", "above 0")
        need(0 <= self.client_dropout < 1, "client_dropout", "from 0 up to, but not, 1")
        need(self.deadline is None or self.deadline > 0, "deadline", "above 0 seconds")
        need(self.min_clients >= 1, "min_clients", "at least 1")
        need(self.evaluate_every >= 1, "evaluate_every", "at least 1")
        need(
            self.local_test_samples is None or self.local_test_samples >= 1,
            "local_test_samples",
            "at least 1 sample",
        )
        need(self.probe_every >= 0, "probe_every", "0 or more rounds")
        need(self.checkpoint_seconds >= 0, "checkpoint_seconds", "at least 0")

    def lr_at(self, round: int) -> float:
        """η_t."""
        return float(self.lr * self.lr_decay ** (round - 1))
