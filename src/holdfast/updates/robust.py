"""Robust means: estimates of the clients' mean update on which a minority of hostile clients has a bounded effect.

``updates`` are the clients' updates w_k - w^{t-1} as rows ``[K, d]``. All clients have the same weight, because the
numbers of samples that they report are not verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import (
    Description,
    Positive,
    PositiveCount,
    Range,
    build,
    parse_text,
    validate,
    validate_fields,
)

ITERATIONS = 50  # of Weiszfeld's algorithm
SMOOTHING = 1e-6  # smallest distance in it, relative to the mean distance


@dataclass(frozen=True)
class RobustMean:
    """A robust mean in two steps: weights of the clients from their updates, then an estimate from the rows.

    The estimate is also applied to the clients' other uploads, with the weights from their updates.
    """

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def describe(self) -> dict[str, Any]:
        """The name and the options."""
        return {"name": self.name} | asdict(self)

    def needed(self, clients: int) -> int:
        """The smallest number of updates with which this mean is defined, if ``clients`` take part."""
        return 1

    def tolerated(self, clients: int) -> int:
        """The largest tolerated number of hostile clients among this number."""
        return (clients - 1) // 2

    def check(self, clients: int) -> None:
        """Raise an error if this number of clients is too small."""
        if clients < self.needed(clients):
            raise HoldfastError(
                f"robust: {_written(self)} needs {self.needed(clients)} updates in a round, but there are "
                f"{clients}; sample more clients or assume fewer attackers"
            )

    def weights(self, updates: Tensor) -> Tensor:
        """The clients' weights ``[K]``, which sum to 1; 0 for those that are left out."""
        return updates.new_full((len(updates),), 1 / len(updates))

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The estimated mean ``[d]`` of ``rows``."""
        return weights @ rows


@dataclass(frozen=True)
class Median(RobustMean):
    """The median of each coordinate (Yin et al., 2018)."""

    name: ClassVar[str] = "median"

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        ordered, middle = rows.sort(0).values, len(rows) // 2
        return ordered[middle] if len(rows) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class TrimmedMean(RobustMean):
    """The mean of each coordinate without its largest and smallest values (Yin et al., 2018).

    ``share`` of the clients, rounded up, is left out at each end.
    """

    name: ClassVar[str] = "trimmed-mean"
    share: Annotated[float, Range(gt=0, lt=0.5)] = 0.2

    def trimmed(self, clients: int) -> int:
        """How many values are left out at each end."""
        return math.ceil(self.share * clients - 1e-9)

    def needed(self, clients: int) -> int:
        return 2 * self.trimmed(clients) + 1

    def tolerated(self, clients: int) -> int:
        return self.trimmed(clients)

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        cut = self.trimmed(len(rows))
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)


@dataclass(frozen=True)
class Krum(RobustMean):
    """The one update that is nearest to its n - f - 2 nearest neighbours (Blanchard et al., 2017); f: ``attackers``."""

    name: ClassVar[str] = "krum"
    attackers: PositiveCount = 1

    def needed(self, clients: int) -> int:
        return 2 * self.attackers + 3

    def tolerated(self, clients: int) -> int:
        return self.attackers

    def weights(self, updates: Tensor) -> Tensor:
        return _equal(krum_scores(_squared_distances(updates), self.attackers).argmin().view(1), updates)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the ``keep`` updates with the best scores of Krum, by default n - f of them."""

    name: ClassVar[str] = "multi-krum"
    keep: PositiveCount | None = None

    def needed(self, clients: int) -> int:
        return max(super().needed(clients), self.keep or 0)

    def weights(self, updates: Tensor) -> Tensor:
        scores = krum_scores(_squared_distances(updates), self.attackers)
        return _equal(scores.argsort(stable=True)[: self.keep or len(updates) - self.attackers], updates)


@dataclass(frozen=True)
class Bulyan(Krum):
    """Krum chooses θ = n - 2f updates one after another; then, of each coordinate, the mean of the θ - 2f values that
    are nearest to their median (El Mhamdi et al., 2018).
    """

    name: ClassVar[str] = "bulyan"

    def needed(self, clients: int) -> int:
        return 4 * self.attackers + 3

    def weights(self, updates: Tensor) -> Tensor:
        distances = _squared_distances(updates)
        left, chosen = list(range(len(updates))), list[int]()
        for _ in range(len(updates) - 2 * self.attackers):
            best = int(krum_scores(distances[left][:, left], self.attackers).argmin())
            chosen.append(left.pop(best))
        return _equal(torch.tensor(chosen, device=updates.device), updates)

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        chosen = rows[weights > 0]
        median = Median().estimate(chosen, weights)
        nearest = (
            (chosen - median).abs().argsort(stable=True, dim=0)[: max(1, len(chosen) - 2 * self.attackers)]
        )
        return chosen.gather(0, nearest).mean(0)


@dataclass(frozen=True)
class GeometricMedian(RobustMean):
    """The point with the smallest sum of distances, by Weiszfeld's algorithm (Pillutla et al., 2022)."""

    name: ClassVar[str] = "geometric-median"

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        point = rows.mean(0)
        smallest = SMOOTHING * (rows - point).norm(dim=1).mean().clamp(min=torch.finfo(rows.dtype).tiny)
        for _ in range(ITERATIONS):
            share = 1 / (rows - point).norm(dim=1).clamp(min=smallest)
            point = (share / share.sum()) @ rows
        return point


@dataclass(frozen=True)
class NormBound(RobustMean):
    """The mean of updates that are scaled down to ``factor`` times their median norm where they are longer
    (Sun et al., 2019, with a bound that follows the updates).
    """

    name: ClassVar[str] = "norm-bound"
    factor: Positive = 1.0

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        return _shortened(rows, self.factor).mean(0)


@dataclass(frozen=True)
class CentredClipping(RobustMean):
    """v ← v + mean_k clip(Δ_k - v, τ), ``iterations`` times from v = 0 (Karimireddy et al., 2021).

    τ is ``factor`` times the median distance from v.
    """

    name: ClassVar[str] = "centred-clipping"
    factor: Positive = 1.0
    iterations: PositiveCount = 3

    def estimate(self, rows: Tensor, weights: Tensor) -> Tensor:
        point = torch.zeros_like(rows[0])
        for _ in range(self.iterations):
            point = point + _shortened(rows - point, self.factor).mean(0)
        return point


KINDS: dict[str, type[RobustMean]] = {
    kind.name: kind
    for kind in (
        Median,
        TrimmedMean,
        Krum,
        MultiKrum,
        Bulyan,
        GeometricMedian,
        NormBound,
        CentredClipping,
    )
}
"""The robust means by name."""

POSITIONAL = {"trimmed-mean": ("share",), "norm-bound": ("factor",), "centred-clipping": ("factor",)}


def parse_robust(written: RobustMean | str | Mapping[str, Any]) -> RobustMean:
    """``median``, ``krum:attackers=2`` or a mapping as a `RobustMean`."""
    if isinstance(written, RobustMean):
        return written
    validate("robust", written, str | Description)
    if isinstance(written, str):
        name = written.partition(":")[0].strip()
        written = parse_text(written, "robust mean", POSITIONAL.get(name, ("attackers",)))
    return build(KINDS, written, "robust mean")


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Of each client the sum of squared distances to its n - f - 2 nearest neighbours; ``distances`` ``[n, n]``."""
    neighbours = max(1, len(distances) - attackers - 2)
    nearest = distances.sort(1).values[:, 1 : neighbours + 1]  # the first is the distance to itself, 0
    return nearest.sum(1)


def _squared_distances(rows: Tensor) -> Tensor:
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


def _equal(chosen: Tensor, rows: Tensor) -> Tensor:
    """Equal weights for the chosen rows, 0 for the others."""
    weights: Tensor = rows.new_zeros(len(rows))
    weights[chosen] = 1 / len(chosen)
    return weights


def _shortened(rows: Tensor, factor: float) -> Tensor:
    """The rows, none longer than ``factor`` times their median length."""
    norms: Tensor = rows.norm(dim=1)
    bound = factor * Median().estimate(norms.unsqueeze(1), norms)
    return rows * (bound / norms.clamp(min=torch.finfo(rows.dtype).tiny)).clamp(max=1).unsqueeze(1)


def _written(mean: RobustMean) -> str:
    options = ",".join(f"{key}={value}" for key, value in asdict(mean).items() if value is not None)
    return f"{mean.name}:{options}" if options else mean.name
