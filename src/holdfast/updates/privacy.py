"""Client-level differential privacy: the guarantee that a user requests, and its arithmetic (DP-FedAvg)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import (
    Description,
    Positive,
    PositiveCount,
    Range,
    parse_options,
    validate,
    validate_fields,
)
from holdfast.core.trees import Tensors
from holdfast.updates.accounting import Sampling, epsilon_after, noise_multiplier_for
from holdfast.updates.noise import gaussian

Share = Annotated[float, Range(gt=0, lt=1)]

COUNT_SHARE = 1 / 20  # noise of the clipped clients' count, in expected clients (Andrew et al., 2021)
MIN_COUNT_NOISE = 2.5  # in noise multipliers: the count then takes at most 4 % of 1/z²

Budget = TypeVar("Budget")


@dataclass(frozen=True)
class DP:
    """Client-level differential privacy by the server (central): DP-FedAvg of McMahan et al., 2018.

    The server clips every client's update Δ_k = w_k - w^{t-1} to the norm C, and adds Gaussian noise to the sum::

        w^t = w^{t-1} + (Σ_k ω_k Δ_k min(1, C / ‖Δ_k‖) + N(0, (z C)²)) / (q N)

    All models that the server publishes are then (ε, δ)-differentially private for the participation of a client.
    The noise multiplier z follows from ε, δ, the number of rounds and the sampling of clients.

    ``clip`` is C. ``clip_sums`` is the bound of what a method uploads besides the weights, as one vector; a method
    with such uploads needs it. ``adaptive`` moves C to the ``quantile`` of the updates' norms with the rate ``clip_lr``
    (Andrew et al., 2021); ``count_noise`` is the standard deviation of the noise on their count, by default a
    twentieth of the expected clients. ``max_samples`` weights clients by ω_k = min(n_k / max_samples, 1); by default
    all ω_k are 1. ``sampling``: ``poisson`` samples each client with probability q = clients_per_round / N, ``fixed``
    takes exactly clients_per_round clients, for which the known bounds are weaker and more noise is needed.
    ``noise_multiplier`` sets z; the run must then stay within ε. ``noise_seed``: with ``run``, the default of
    simulations, noise and sampled clients follow from the run's seed; with ``system``, the default on Flower, from a
    secret of the operating system that is not stored. Anyone who knows the seed can subtract the noise: use ``system``
    for models that you publish.
    """

    epsilon: Positive
    delta: Share
    clip: Positive = 1.0
    clip_sums: Positive | None = None
    adaptive: bool = False
    quantile: Share = 0.5
    clip_lr: Positive = 0.2
    count_noise: Positive | None = None
    max_samples: PositiveCount | None = None
    sampling: Literal["poisson", "fixed"] = "poisson"
    noise_multiplier: Positive | None = None
    noise_seed: Literal["run", "system"] | None = None

    def __post_init__(self) -> None:
        validate_fields(self, "dp")
        if not self.adaptive and self.count_noise is not None:
            raise HoldfastError("dp: count_noise has no effect without adaptive=true; leave it out")

    def describe(self) -> dict[str, Any]:
        """The options as plain values."""
        return asdict(self)

    def weight(self, samples: int) -> float:
        """ω_k of a client with this number of samples."""
        return 1.0 if self.max_samples is None else min(samples / self.max_samples, 1.0)


def parse_dp(written: DP | str | Mapping[str, Any]) -> DP:
    """``epsilon=8,delta=1e-5`` or a mapping as a `DP`."""
    return parse_budget(written, DP, "dp")


def parse_budget(written: Budget | str | Mapping[str, Any], kind: type[Budget], name: str) -> Budget:
    """A budget as it is written for the setting ``name``: its options, of which ε and δ are needed."""
    if isinstance(written, kind):
        return written
    validate(name, written, str | Description)
    values = (
        parse_options(written, name) if isinstance(written, str) else dict(cast(Mapping[str, Any], written))
    )
    known = [f.name for f in fields(cast(Any, kind))]
    for key in values:
        if key not in known:
            raise unknown(f"option of {name}", str(key), known)
    for key in ("epsilon", "delta"):
        if key not in values:
            raise HoldfastError(f"{name} needs {key}, such as epsilon=8,delta=1e-5")
    return kind(**values)


@dataclass(eq=False)
class ClientPrivacy:
    """The noise and the account of one run; its state (the clipping bound) changes from round to round.

    ``clients`` are those that may be sampled, ``per_round`` of them in a round; ``seed`` is the run's. ``sums`` are
    zeros in the shape of what a client uploads besides its weights, by path.
    """

    dp: DP
    clients: int
    per_round: int
    rounds: int
    seed: int
    sums: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        dp = self.dp
        self.sampling = Sampling(dp.sampling, self.per_round, self.clients)
        self.clip = dp.clip
        self.secret = secrets.randbits(64) if dp.noise_seed == "system" else self.seed
        if dp.noise_multiplier is None:
            self.noise_multiplier = noise_multiplier_for(dp.epsilon, dp.delta, self.sampling, self.rounds)
        else:
            self.noise_multiplier = dp.noise_multiplier
            self._check_rounds()
        self.part_multiplier()  # raises an error if the count's noise is too small

    @property
    def rate(self) -> float | None:
        """The probability with which each client is sampled; None for samples of a fixed size."""
        poisson = self.dp.sampling == "poisson" and self.per_round < self.clients
        return self.sampling.rate if poisson else None

    def epsilon(self, rounds: int) -> float:
        """ε spent after this number of rounds."""
        return epsilon_after(rounds, self.dp.delta, self.noise_multiplier, self.sampling)

    def check_budget(self, round: int) -> None:
        """Raise an error if this round would exceed the budget."""
        if self.epsilon(round) > self.dp.epsilon:
            raise HoldfastError(
                f"round {round} would spend a total epsilon of {self.epsilon(round):.4g}, more than the budget of "
                f"{self.dp.epsilon:g}; the run ends with round {round - 1}"
            )

    def _check_rounds(self) -> None:
        if self.epsilon(self.rounds) <= self.dp.epsilon:
            return
        fitting = _largest(lambda rounds: self.epsilon(rounds) <= self.dp.epsilon, self.rounds)
        raise HoldfastError(
            f"dp: {self.rounds} rounds with noise_multiplier={self.noise_multiplier:g} spend epsilon "
            f"{self.epsilon(self.rounds):.4g}, more than {self.dp.epsilon:g}; {fitting} rounds fit, or leave "
            "noise_multiplier out, which then follows from epsilon"
        )

    def weight(self, samples: int) -> float:
        """ω_k of a client with this number of samples."""
        return self.dp.weight(samples)

    # Noise ----------------------------------------------------------------------------------------------

    @property
    def count_noise(self) -> float:
        """σ_b: the standard deviation of the noise on Σ_k (b_k - 1/2), b_k = 1 where ‖Δ_k‖ ≤ C."""
        default = max(COUNT_SHARE * self.per_round, MIN_COUNT_NOISE * self.noise_multiplier)
        return self.dp.count_noise or default * self.sampling.sensitivity

    def part_multiplier(self) -> float:
        """The noise multiplier of the weights, and of the sums, such that all parts together have that of the run.

        Parts with multipliers z_i are one Gaussian mechanism with 1/z² = Σ_i 1/z_i².
        """
        left = self.noise_multiplier**-2
        if self.dp.adaptive:
            left -= (2 * self.count_noise / self.sampling.sensitivity) ** -2
        if left <= 0:
            raise HoldfastError(
                f"dp: count_noise is {self.count_noise:g}, which takes the whole budget; it must be above "
                f"{self.noise_multiplier * self.sampling.sensitivity / 2:.3g}"
            )
        return math.sqrt((2 if self.sums else 1) / left)

    def deviation(self, bound: float) -> float:
        """The standard deviation of the noise on a sum of vectors that are clipped to ``bound``."""
        return self.part_multiplier() * self.sampling.sensitivity * bound

    def add_noise(self, name: str, total: Tensors, bound: float, round: int) -> Tensors:
        """The sums of clipped vectors with noise; ``name`` separates the noise of different parts."""
        deviation = self.deviation(bound)
        return {
            key: value + deviation * gaussian(value, self.secret, f"dp noise of {name}", round, place)
            for place, (key, value) in enumerate(total.items())
        }

    def noisy_count(self, below: Tensor, round: int) -> float:
        """``below``, which is Σ_k (b_k - 1/2), with noise."""
        return float(
            below.double() + self.count_noise * gaussian(below.double(), self.secret, "dp count", round)
        )

    def adapt(self, below: float) -> None:
        """Move C towards the quantile: C ← C exp(-η (b̃ - γ)); ``below`` is Σ_k (b_k - 1/2) with noise."""
        share = below / self.per_round + 0.5
        self.clip *= math.exp(-self.dp.clip_lr * (share - self.dp.quantile))

    # State ----------------------------------------------------------------------------------------------

    def state(self) -> Tensors:
        """What a checkpoint keeps."""
        return {"clip": _number(self.clip), "noise_multiplier": _number(self.noise_multiplier)}

    def restore(self, state: Tensors) -> None:
        """Restore ``state``, also for a run with more rounds: past rounds keep their noise multiplier."""
        self.clip, self.noise_multiplier = float(state["clip"]), float(state["noise_multiplier"])


def clip_factor(norm: Tensor, bound: float) -> Tensor:
    """min(1, C / ‖Δ‖)."""
    return (bound / norm).clamp(max=1.0)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors as one vector, in double precision; 0 without any."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    total: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return total


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _largest(fits: Callable[[int], bool], above: int) -> int:
    """The largest number below ``above`` that fits; 0 if none does."""
    low, high = 0, above
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
