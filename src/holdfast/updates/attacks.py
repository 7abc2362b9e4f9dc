"""Simulated attacks: some clients send manipulated updates, or train on manipulated data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from holdfast.core.random import generator
from holdfast.core.spec import (
    Count,
    Description,
    Positive,
    PositiveCount,
    PositiveFraction,
    build,
    parse_text,
    validate,
    validate_fields,
)
from holdfast.data.dataset import Dataset
from holdfast.updates.noise import gaussian

MAX_SHARE = 0.999  # of clients that hide a value in "a little is enough"


@dataclass(frozen=True)
class Attack:
    """An attack by a ``share`` of the clients, drawn with the run's seed.

    A subclass changes the attackers' updates (``changed``) or their data (``poisoned``).
    """

    name: ClassVar[str] = ""
    changes_updates: ClassVar[bool] = True

    share: PositiveFraction

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def describe(self) -> dict[str, Any]:
        """The name and the options."""
        return {"name": self.name} | asdict(self)

    def attackers(self, clients: int, seed: int) -> frozenset[int]:
        """The attackers among this number of clients: at least one."""
        count = max(1, round(self.share * clients))
        return frozenset(generator(seed, "attackers").permutation(clients)[:count].tolist())

    def changed(
        self, updates: Tensor, clients: list[int], hostile: list[bool], seed: int, round: int
    ) -> Tensor:
        """The received updates, given the rows ``updates`` ``[K, d]`` of these clients; honest rows are unchanged."""
        return updates

    def poisoned(
        self, x: Tensor, y: Tensor, classes: int, highest: Tensor, seed: int, client: int
    ) -> tuple[Tensor, Tensor]:
        """The samples that an attacker trains on, in place of its own; ``highest`` is the data's highest value."""
        return x, y


@dataclass(frozen=True)
class SignFlip(Attack):
    """Attackers send -``scale`` Δ_k."""

    name: ClassVar[str] = "sign-flip"
    scale: Positive = 1.0

    def changed(
        self, updates: Tensor, clients: list[int], hostile: list[bool], seed: int, round: int
    ) -> Tensor:
        return torch.where(_column(hostile, updates), -self.scale * updates, updates)


@dataclass(frozen=True)
class Scaled(Attack):
    """Attackers send ``scale`` Δ_k."""

    name: ClassVar[str] = "scaled"
    scale: Positive = 10.0

    def changed(
        self, updates: Tensor, clients: list[int], hostile: list[bool], seed: int, round: int
    ) -> Tensor:
        return torch.where(_column(hostile, updates), self.scale * updates, updates)


@dataclass(frozen=True)
class GaussianNoise(Attack):
    """Attackers send independent values from N(0, ``std``²)."""

    name: ClassVar[str] = "gaussian"
    std: Positive = 1.0

    def changed(
        self, updates: Tensor, clients: list[int], hostile: list[bool], seed: int, round: int
    ) -> Tensor:
        updates = updates.clone()
        for row, (client, bad) in enumerate(zip(clients, hostile, strict=True)):
            if bad:
                updates[row] = self.std * gaussian(updates[row], seed, "attack noise", round, client)
        return updates


@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """Attackers send μ - z σ, a change within the spread of the honest updates (Baruch et al., 2019).

    μ and σ are mean and standard deviation of each coordinate over the updates of the round, which the attackers are
    assumed to see. z is by default the largest with which, of n clients and m attackers, s = ⌊n/2 + 1⌋ - m honest ones
    are farther from μ: z = Φ⁻¹((n - m - s) / (n - m)).
    """

    name: ClassVar[str] = "little-is-enough"
    z: Positive | None = None

    def changed(
        self, updates: Tensor, clients: list[int], hostile: list[bool], seed: int, round: int
    ) -> Tensor:
        if not any(hostile) or len(updates) < 2:
            return updates
        z = largest_hidden(len(clients), sum(hostile)) if self.z is None else self.z
        wrong = updates.mean(0) - z * updates.std(0, correction=0)
        return torch.where(_column(hostile, updates), wrong, updates)


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Attackers train on the labels C - 1 - y."""

    name: ClassVar[str] = "label-flip"
    changes_updates: ClassVar[bool] = False

    def poisoned(
        self, x: Tensor, y: Tensor, classes: int, highest: Tensor, seed: int, client: int
    ) -> tuple[Tensor, Tensor]:
        return x, classes - 1 - y


@dataclass(frozen=True)
class Backdoor(Attack):
    """Attackers mark a part ``samples`` of their samples with a pattern and label them ``target``.

    The pattern is a square of ``size`` pixels in the lower right corner, or the last ``size`` values of samples that
    are not images, at the highest value of the data. Attackers send ``scale`` Δ_k. ``attack_success`` in the record is
    the share of marked test samples of other classes that the model classifies as ``target``.
    """

    name: ClassVar[str] = "backdoor"
    target: Count = 0
    size: PositiveCount = 3
    samples: PositiveFraction = 0.5
    scale: Positive = 1.0

    def changed(
        self, updates: Tensor, clients: list[int], hostile: list[bool], seed: int, round: int
    ) -> Tensor:
        return torch.where(_column(hostile, updates), self.scale * updates, updates)

    def poisoned(
        self, x: Tensor, y: Tensor, classes: int, highest: Tensor, seed: int, client: int
    ) -> tuple[Tensor, Tensor]:
        count = max(1, round(self.samples * len(y)))
        chosen = torch.from_numpy(generator(seed, "backdoor", client).permutation(len(y))[:count])
        x, y = x.clone(), y.clone()
        x[chosen], y[chosen] = self.marked(x[chosen], highest), self.target
        return x, y

    def marked(self, x: Tensor, highest: Tensor) -> Tensor:
        """The samples with the pattern."""
        x = x.clone()
        if x.dim() == 4:
            x[..., -self.size :, -self.size :] = highest
        else:
            x.view(len(x), -1)[:, -self.size :] = highest
        return x


def marked_test(attack: Backdoor, dataset: Dataset) -> Dataset:
    """The test samples of other classes than the target, marked, with the target as their label."""
    others = dataset.y_test != attack.target
    return replace(
        dataset,
        x_test=attack.marked(dataset.x_test[others], dataset.x_train.max()),
        y_test=torch.full_like(dataset.y_test[others], attack.target),
        groups={},
    )


KINDS: dict[str, type[Attack]] = {
    kind.name: kind for kind in (SignFlip, Scaled, GaussianNoise, LittleIsEnough, LabelFlip, Backdoor)
}
"""The attacks by name."""


def parse_attack(written: Attack | str | Mapping[str, Any]) -> Attack:
    """``sign-flip:0.2``, ``backdoor:share=0.2,target=3`` or a mapping as an `Attack`."""
    if isinstance(written, Attack):
        return written
    validate("attack", written, str | Description)
    if isinstance(written, str):
        written = parse_text(written, "attack", ("share",))
    return build(KINDS, written, "attack", "sign-flip:0.2")


def largest_hidden(clients: int, attackers: int) -> float:
    """z of "a little is enough"; at least 0, and bounded where the attackers are the majority."""
    honest = clients - attackers
    if honest == 0:
        return float(norm.ppf(MAX_SHARE))
    supporters = clients // 2 + 1 - attackers
    return float(norm.ppf(np.clip((honest - supporters) / honest, 0.5, MAX_SHARE)))


def _column(hostile: list[bool], rows: Tensor) -> Tensor:
    return torch.tensor(hostile, device=rows.device).unsqueeze(1)
