"""The privacy account: ε of a number of rounds, and the noise for a given ε, by Google's dp-accounting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from holdfast.core.errors import HoldfastError, install

INTERVAL = 2e-3  # discretisation interval of privacy losses at z = 1; estimates of ε are upper bounds for any interval
RDP_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256)
TOLERANCE = 2e-3  # relative, of a derived noise multiplier; it is rounded up
MIN_NOISE, MAX_NOISE = 0.05, 1e6  # of noise multipliers


@dataclass(frozen=True)
class Sampling:
    """How a round's clients are sampled: ``per_round`` of ``clients`` on average or exactly.

    ``poisson``: each client independently with probability ``rate``; neighbouring federations differ by the presence of
    one client. ``fixed``: exactly ``per_round`` clients; neighbouring federations differ by the data of one client. If
    all clients take part in every round, neighbouring federations differ by the presence of one client.
    """

    kind: Literal["poisson", "fixed"]
    per_round: int
    clients: int

    @property
    def rate(self) -> float:
        """q: the probability that a client takes part in a round."""
        return min(1.0, self.per_round / self.clients)

    @property
    def replaces(self) -> bool:
        """Whether neighbouring federations differ by the data of one client, not by its presence."""
        return self.kind == "fixed" and self.per_round < self.clients

    @property
    def sensitivity(self) -> float:
        """The sensitivity of the sum of clipped updates, in units of the bound C."""
        return 2.0 if self.replaces else 1.0


@lru_cache(4096)
def epsilon_after(rounds: int, delta: float, noise_multiplier: float, sampling: Sampling) -> float:
    """ε after this number of rounds; ``noise_multiplier`` is the noise's deviation over the sum's sensitivity."""
    if rounds == 0:
        return 0.0
    # Privacy loss distributions are tighter, but are not available for samples of a fixed size.
    return (_renyi if sampling.replaces else _loss_distribution)(rounds, delta, noise_multiplier, sampling)


@lru_cache(256)
def noise_multiplier_for(epsilon: float, delta: float, sampling: Sampling, rounds: int) -> float:
    """The smallest noise multiplier, up to `TOLERANCE`, with which this number of rounds spends at most ε."""
    high = 1.0
    while _renyi(rounds, delta, high, sampling) > epsilon:
        high *= 2
        if high > MAX_NOISE:
            raise HoldfastError(
                f"dp: no amount of noise gives epsilon {epsilon:g} with delta {delta:g} over {rounds} rounds; "
                "raise epsilon"
            )
    # First by Rényi's bound alone, which is quick and needs a little more noise.
    high = _smallest(lambda z: _renyi(rounds, delta, z, sampling) <= epsilon, MIN_NOISE, high, 0.05)
    low = 0.8 * high
    while low > MIN_NOISE and epsilon_after(rounds, delta, low, sampling) <= epsilon:
        low, high = max(0.8 * low, MIN_NOISE), low
    return _smallest(lambda z: epsilon_after(rounds, delta, z, sampling) <= epsilon, low, high, TOLERANCE)


def _smallest(fits: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """The smallest valid value between ``low`` and ``high`` (which is valid), up to a relative tolerance."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _renyi(rounds: int, delta: float, noise_multiplier: float, sampling: Sampling) -> float:
    """An upper bound of ε by Rényi differential privacy."""
    accounting = _library()
    from dp_accounting.rdp import RdpAccountant

    event: Any = accounting.GaussianDpEvent(noise_multiplier)
    relation = accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if sampling.replaces:
        event = accounting.SampledWithoutReplacementDpEvent(sampling.clients, sampling.per_round, event)
        relation = accounting.NeighboringRelation.REPLACE_ONE
    elif sampling.rate < 1:
        event = accounting.PoissonSampledDpEvent(sampling.rate, event)
    return float(RdpAccountant(RDP_ORDERS, relation).compose(event, rounds).get_epsilon(delta))


def _loss_distribution(rounds: int, delta: float, noise_multiplier: float, sampling: Sampling) -> float:
    """An upper bound of ε by the distribution of the privacy loss, tight up to its discretisation."""
    accounting = _library()
    from dp_accounting.pld import PLDAccountant

    event: Any = accounting.GaussianDpEvent(noise_multiplier)
    if sampling.rate < 1:
        event = accounting.PoissonSampledDpEvent(sampling.rate, event)
    interval = INTERVAL / (noise_multiplier if noise_multiplier > 1 else noise_multiplier**2)
    accountant = PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise HoldfastError(
            f"differential privacy needs the package dp-accounting: {install('privacy')}"
        ) from None
    return dp_accounting
