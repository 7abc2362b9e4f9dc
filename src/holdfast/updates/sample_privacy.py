"""Sample-level differential privacy at each client (DP-SGD): the guarantee and its account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import Positive, validate_fields
from holdfast.core.trees import Tensors
from holdfast.updates.accounting import Sampling, epsilon_after, noise_multiplier_for
from holdfast.updates.privacy import Share, parse_budget


@dataclass(frozen=True)
class SampleDP:
    """Sample-level differential privacy at each client (local steps of DP-SGD, Abadi et al., 2016).

    A client with n samples takes each of them into the batch of a step with probability q = min(1, B / n), clips the
    gradient of every sample to the norm C, and adds Gaussian noise to the sum::

        g = (Σ_i g_i min(1, C / ‖g_i‖) + N(0, (z C)²)) / (q n)

    The client's uploads are then (ε, δ)-differentially private for adding or removing one sample, also against the
    server. Each client has its own noise multiplier z, which follows from ε, δ, its number of samples and the steps of
    all rounds in which it takes part.

    ``clip`` is C. ``sampling``: ``poisson`` as above; ``fixed`` takes exactly min(B, n) samples; neighbouring
    clients then differ by the content of one sample, and more noise is needed. ``noise_multiplier`` sets z for all
    clients; the run must then stay within ε for each of them. ``noise_seed``: with ``run``, the default of
    simulations, noise and batches follow from the run's seed; with ``system``, the default on Flower, from a secret of
    the client's operating system.
    """

    epsilon: Positive
    delta: Share
    clip: Positive = 1.0
    sampling: Literal["poisson", "fixed"] = "poisson"
    noise_multiplier: Positive | None = None
    noise_seed: Literal["run", "system"] | None = None

    def __post_init__(self) -> None:
        validate_fields(self, "dp_samples")

    def describe(self) -> dict[str, Any]:
        """The options as plain values."""
        return asdict(self)

    def sampling_of(self, samples: int, batch_size: int) -> Sampling:
        """The sampling of a step's batch from this number of samples."""
        return Sampling(self.sampling, min(batch_size, samples), samples)

    def noise_for(self, samples: int, batch_size: int, steps: int) -> float:
        """z of a client with this number of samples and of steps in total."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return noise_multiplier_for(self.epsilon, self.delta, self.sampling_of(samples, batch_size), steps)


def parse_dp_samples(written: SampleDP | str | Mapping[str, Any]) -> SampleDP:
    """``epsilon=8,delta=1e-5`` or a mapping as a `SampleDP`."""
    return parse_budget(written, SampleDP, "dp_samples")


@dataclass(eq=False)
class SampleAccount:
    """The privacy budget spent by each client of a run.

    ``samples`` [N] are the clients' numbers of samples, ``steps`` [N] the optimiser steps of one of their rounds, and
    ``rounds`` [N] the rounds in which they will take part.
    """

    dp: SampleDP
    batch_size: int
    samples: np.ndarray
    steps: np.ndarray
    rounds: np.ndarray

    def __post_init__(self) -> None:
        self.taken: dict[int, int] = {}  # rounds by client
        self.largest = 0.0  # ε of the client that has spent most
        if self.dp.noise_multiplier is not None:
            self._check_rounds()

    def noise_multiplier(self, client: int) -> float:
        """z of a client that takes part."""
        rounds = max(1, int(self.rounds[client]))
        return self.dp.noise_for(int(self.samples[client]), self.batch_size, rounds * int(self.steps[client]))

    def epsilon(self, client: int, rounds: int) -> float:
        """ε that a client has spent after so many of its rounds."""
        sampling = self.dp.sampling_of(int(self.samples[client]), self.batch_size)
        steps = rounds * int(self.steps[client])
        return epsilon_after(steps, self.dp.delta, self.noise_multiplier(client), sampling)

    def spend(self, clients: Sequence[int]) -> None:
        """Account for one more round of these clients."""
        for client in clients:
            self._set(client, self.taken.get(client, 0) + 1)

    def correct(self, client: int, rounds: int) -> None:
        """Use a client's own count of its rounds if it is larger, since rounds may have been repeated."""
        if rounds > self.taken.get(client, 0):
            self._set(client, rounds)

    def record(self, clients: Sequence[int]) -> dict[str, Any]:
        """The entries of a round's record, with the ``clients`` that took part."""
        return {
            "epsilon": self.largest,
            "epsilons": [self.epsilon(client, self.taken[client]) for client in clients],
            "noise_multipliers": [self.noise_multiplier(client) for client in clients],
        }

    def _set(self, client: int, rounds: int) -> None:
        self.taken[client] = rounds
        self.largest = max(self.largest, self.epsilon(client, rounds))

    def _check_rounds(self) -> None:
        """Raise if a client would spend more than the budget."""
        seen = set()
        for client in np.flatnonzero(self.rounds).tolist():
            key = tuple(int(values[client]) for values in (self.samples, self.steps, self.rounds))
            if key in seen:
                continue
            seen.add(key)
            spent = self.epsilon(client, int(self.rounds[client]))
            if spent > self.dp.epsilon:
                raise HoldfastError(
                    f"dp_samples: client {client} with {self.samples[client]} samples would spend epsilon {spent:.4g} "
                    f"in its {self.rounds[client]} rounds with noise_multiplier={self.dp.noise_multiplier:g}, more "
                    f"than {self.dp.epsilon:g}; choose fewer rounds, or leave noise_multiplier out, which then follows "
                    "from epsilon"
                )

    def state(self) -> Tensors:
        """What a checkpoint keeps."""
        clients = sorted(self.taken)
        return {
            "sample_clients": torch.tensor(clients, dtype=torch.int64),
            "sample_rounds": torch.tensor([self.taken[client] for client in clients], dtype=torch.int64),
            "sample_epsilon": torch.tensor(self.largest, dtype=torch.float64),
        }

    def restore(self, state: Tensors) -> None:
        """Continue from ``state``."""
        columns = (state[key].tolist() for key in ("sample_clients", "sample_rounds"))
        self.taken = dict(zip(*columns, strict=True))
        self.largest = float(state["sample_epsilon"])


def participations(clients: int, rounds: Iterable[Iterable[int]]) -> np.ndarray:
    """The number of rounds of each client, ``[clients]``; ``rounds`` lists the participants of each round."""
    counts = np.zeros(clients, np.int64)
    for participants in rounds:
        np.add.at(counts, np.fromiter(participants, np.int64), 1)
    return counts
