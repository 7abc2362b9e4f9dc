"""Client sampling: which clients train in which round."""

from __future__ import annotations

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.data.schedules import StageSchedule


class ClientSampler:
    """Samples the clients of each round, without replacement, among those that hold data at the round's stage.

    With ``sampling="cyclic"`` every client takes part once before any takes part again; the last round of a cycle may
    have fewer clients. With ``rate``, each client is sampled independently with this probability. ``seed`` is the seed
    of sampling, by default the run's. Results that depend only on the stage or the epoch are cached.
    """

    def __init__(
        self,
        federation: Federation,
        settings: Settings,
        rate: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.federation, self.settings, self.rate = federation, settings, rate
        self.seed = settings.seed if seed is None else seed
        self._sizes: tuple[int, np.ndarray, np.ndarray] | None = None  # stage, sizes, clients with data
        self._epoch: tuple[int, np.ndarray] | None = None  # epoch, clients with data at one of its stages
        self._sampled: tuple[int, np.ndarray, np.ndarray] | None = None  # round, present, lost

    def stage(self, round: int) -> int:
        """The stage of a stream that this round trains; 0 without a stream."""
        schedule = self.federation.schedule
        return 0 if schedule is None else schedule.stage(round)

    def sample(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """The clients that train in a round, and those that are sampled but drop out."""
        if self._sampled is None or self._sampled[0] != round:
            sampled = self._participants(round)
            lost = np.zeros(len(sampled), bool)
            if self.settings.client_dropout:
                drawn = generator(self.settings.seed, "dropout", round).random(len(sampled))
                lost = drawn < self.settings.client_dropout
            self._sampled = (round, sampled[~lost], sampled[lost])
        return self._sampled[1], self._sampled[2]

    def anyone_has_data(self, round: int) -> bool:
        """Whether any client holds data at the round's stage."""
        return bool(len(self._clients_with_data(self.stage(round))[1]))

    def _participants(self, round: int) -> np.ndarray:
        schedule = self.federation.schedule
        counter = round if schedule is None else schedule.epoch(round)
        sizes, present = self._clients_with_data(self.stage(round))
        if not len(present):
            raise HoldfastError(f"round {round}: no client has samples at stage {self.stage(round)}")
        if self.rate is not None:
            drawn = generator(self.seed, "poisson", counter).random(len(present))
            return present[drawn < self.rate]
        count = self.settings.clients_per_round
        if count is None:
            return present
        # The same clients take part in every stage of an epoch; one without data at a stage skips it.
        candidates = present if schedule is None else self._clients_of_epoch(round, schedule)
        if count >= len(candidates):
            return present
        if self.settings.sampling == "cyclic":
            chosen = self._next_in_cycle(candidates, count, counter - 1 if schedule is None else counter)
        else:
            chosen = generator(self.seed, "clients", counter).choice(candidates, count, replace=False)
        with_data = chosen[sizes[chosen] > 0]
        return with_data if len(with_data) else present[:1]

    def _next_in_cycle(self, candidates: np.ndarray, count: int, position: int) -> np.ndarray:
        """The clients at a position (from 0) of a sequence of cycles; every cycle has its own random order."""
        cycle, place = divmod(position, -(-len(candidates) // count))
        order = generator(self.seed, "cycle", cycle).permutation(candidates)
        return order[place * count : (place + 1) * count]

    def _clients_with_data(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """The sizes of all clients at a stage, and the clients that hold data."""
        if self._sizes is None or self._sizes[0] != stage:
            sizes = self.federation.sizes(stage)
            self._sizes = (stage, sizes, np.flatnonzero(sizes))
        return self._sizes[1], self._sizes[2]

    def _clients_of_epoch(self, round: int, schedule: StageSchedule) -> np.ndarray:
        """The clients that hold data at one of the stages that the round's epoch trains."""
        epoch = schedule.epoch(round)
        if self._epoch is None or self._epoch[0] != epoch:
            rounds = range(1, max(round, self.settings.rounds) + 1)
            stages = {schedule.stage(r) for r in rounds if schedule.epoch(r) == epoch}
            sizes = sum(self.federation.sizes(stage) for stage in stages)
            self._epoch = (epoch, np.flatnonzero(sizes))
        return self._epoch[1]
