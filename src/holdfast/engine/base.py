"""The interfaces between the round loop, an engine, and the storage of client states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.core.trees import Tree
from holdfast.engine.clients import Broadcast, ClientResult, Incident, Job

if TYPE_CHECKING:
    from holdfast.engine.secure_sums import SecureSums


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Overlap:
    """Work of the round loop that an engine may do while its device computes. An engine may ignore all of it."""

    next_jobs: Callable[[], Sequence[Job]] = tuple
    """The known clients of the next round, so that their batches can be prepared."""

    test_last_model: Callable[[], None] = _nothing
    """Starts the test of the last round's model; called when much of this round is still queued on the device."""

    finish_last_round: Callable[[], None] = _nothing
    """Completes the record of the last round; called before the engine waits for the device."""


NO_OVERLAP = Overlap()


class MaskedTraining(Protocol):
    """The training of clients that mask their uploads, so that nobody else can read them."""

    def __call__(
        self, sent: Broadcast, jobs: Sequence[Job], sums: SecureSums, /
    ) -> Iterator[ClientResult | Incident]:
        """Train each client and give ``sums`` the sum of their uploads; the results have no tensors."""


class Engine(Protocol):
    """Trains the clients of a round."""

    name: str
    group: int
    """How many local models are tested together."""

    @property
    def train_masked(self) -> MaskedTraining | None:
        """Under secure aggregation, used instead of ``train``; None if the round loop masks the uploads."""

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = ...
    ) -> Iterator[ClientResult | Incident]:
        """Train each client; a result's tensors are valid until the next one is requested."""


class ClientStateStore(Protocol):
    """Storage for the states of clients between their rounds."""

    def get(self, client: int) -> Tree | None:
        """The client's state; None before it first took part."""

    def put(self, client: int, state: Tree) -> None:
        """Store a copy."""
