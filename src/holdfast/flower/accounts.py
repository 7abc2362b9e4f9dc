"""A site's own privacy account of its samples, independent of the server's."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.engine.batching import local_steps
from holdfast.updates.accounting import epsilon_after
from holdfast.updates.sample_privacy import parse_dp_samples


class SiteAccount:
    """The rounds of one of a site's clients in one run, in ``STATE-DIR/RUN/CLIENT/sample-privacy.json``.

    A round is counted before it is computed, and again if it is repeated, since each computation adds new noise.
    """

    def __init__(self, folder: Path, client: int, settings: Settings) -> None:
        assert settings.dp_samples is not None
        self.path, self.client = folder / str(client) / "sample-privacy.json", client
        self.settings, self.dp = settings, parse_dp_samples(settings.dp_samples)

    def spend(self, samples: int, noise_multiplier: float) -> int:
        """Account for one more round; returns the number of rounds, or raises if the budget is spent."""
        taken, before = self._read()
        if not noise_multiplier > 0 or (taken and noise_multiplier != before):
            raise HoldfastError(
                f"dp_samples: the server requests noise_multiplier {noise_multiplier:g} for client {self.client}; it "
                f"must be above 0 and the same in every round{f' ({before:g} so far)' if taken else ''}"
            )
        settings, rounds = self.settings, taken + 1
        steps = local_steps(-(-samples // settings.batch_size), settings.local_epochs, settings.local_steps)
        sampling = self.dp.sampling_of(samples, settings.batch_size)
        spent = epsilon_after(rounds * steps, self.dp.delta, noise_multiplier, sampling)
        if spent > self.dp.epsilon:
            raise HoldfastError(
                f"dp_samples: client {self.client} would spend a total epsilon of {spent:.4g} by round {rounds}, "
                f"more than its budget of {self.dp.epsilon:g}; it takes part in no further round"
            )
        with files.writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"rounds": rounds, "noise_multiplier": noise_multiplier}
        files.replace(self.path, json.dumps(content).encode())
        return rounds

    def _read(self) -> tuple[int, float]:
        """The rounds so far, and their noise multiplier."""
        if not self.path.exists():
            return 0, 0.0
        with files.reading(self.path):
            content = self.path.read_bytes()
        try:
            known = json.loads(content)
            return int(known["rounds"]), float(known["noise_multiplier"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise HoldfastError(
                f"{self.path} is damaged, so the privacy budget that the client has spent is unknown; restore it, "
                "or start a new run"
            ) from None
