"""The server's side of secure aggregation: the stages of one secure sum.

A client's failure in a stage is an incident. A client that is lost before its upload arrives is excluded from the sum;
the others then reveal the shares that remove its masks. A client that is lost afterwards is part of the sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engine.clients import Incident
from holdfast.flower.messages import KEYS, SHARES, UNMASK, ConfigReader, tree_from_record
from holdfast.flower.nodes import Nodes
from holdfast.flower.sealing import REQUEST
from holdfast.flower.secagg import (
    DIGEST_BYTES,
    MAX_SHARE,
    PUBLIC_BYTES,
    Dealing,
    PublicKeys,
    Unmasking,
)
from holdfast.flower.wire import TreeSpec, WireError
from holdfast.updates.secure import FixedPoint, SecAggPlus, too_few_to_unmask

Answer = TypeVar("Answer")
Content = dict[int, dict[str, Any]]
"""The records of a message, by node."""


class TooFew(HoldfastError):
    """The error for a sum that cannot be unmasked; another attempt may succeed."""


class SecureRound:
    """One secure sum over a round's ``seats`` clients, including those that could not be reached."""

    def __init__(
        self,
        nodes: Nodes,
        secure: SecAggPlus,
        grid: FixedPoint,
        number: int,
        seats: int,
        seconds: float | None,
    ) -> None:
        """``seconds``: the timeout of each stage."""
        self.nodes, self.secure, self.grid, self.number = nodes, secure, grid, number
        self.seats, self.seconds = seats, seconds
        self.session = secrets.token_hex(16)
        self.threshold = secure.threshold_of(seats)
        self.incidents: list[Incident] = []
        self.keys: dict[int, PublicKeys] = {}
        self.neighbours: dict[int, list[int]] = {}  # of each client, and itself
        self.dealings: dict[int, Dealing] = {}

    def sum(
        self,
        clients: Sequence[int],
        kind: str,
        content: Callable[[Sequence[int]], Content],
        length: int,
        read: Callable[[int, RecordDict], Iterator[Answer | Incident]],
    ) -> tuple[Tensor, dict[int, Answer]]:
        """The sum of the vectors of ``length`` integers, and the clients' other values.

        ``kind`` and ``content`` are the request for the uploads; `TooFew` if too few clients remain.
        """
        self.nodes.refresh()
        self._exchange_keys(clients)
        self._exchange_shares()
        total, answers = self._collect(kind, content, length, read)
        unmasking = Unmasking(self.threshold, self.grid.bits, self.keys, self.dealings, list(answers))
        self._unmask(unmasking)
        return self.grid.reduce(unmasking.unmasked(total)), answers

    # Stages ---------------------------------------------------------------------------------------------

    def _exchange_keys(self, clients: Sequence[int]) -> None:
        def read(client: int, content: RecordDict) -> Iterator[PublicKeys]:
            fields = ConfigReader(content, f"keys {client}")
            yield PublicKeys(fields.blob("masks", PUBLIC_BYTES), fields.blob("channel", PUBLIC_BYTES))

        self.keys = self._ask(KEYS, clients, self._requests(clients), read)
        circle = list(self.keys)
        secrets.SystemRandom().shuffle(circle)  # random seats, so that no client can choose its neighbours
        self.neighbours = {
            client: sorted(circle[seat] for seat in self.secure.neighbourhood(place, len(circle)))
            for place, client in enumerate(circle)
        }
        self._require(self.keys)

    def _exchange_shares(self) -> None:
        requests = self._requests(list(self.keys), threshold=self.threshold)
        for client, circle in self.neighbours.items():
            keys = [self.keys[k] for k in circle]
            requests[self.nodes.of_client[client]][f"neighbours {client}"] = ConfigRecord(
                {
                    "clients": circle,
                    "masks": [key.masks for key in keys],
                    "channel": [key.channel for key in keys],
                }
            )

        def read(client: int, content: RecordDict) -> Iterator[Dealing]:
            fields, holders = ConfigReader(content, f"shares {client}"), self.neighbours[client]
            count = len(holders)
            if fields.integers("holders", count) != holders:
                raise WireError("wrong values", "its shares are not addressed to its neighbours")
            yield Dealing(
                holders,
                fields.blobs("ciphertexts", count, MAX_SHARE),
                fields.blobs("seed_digests", count, DIGEST_BYTES),
                fields.blobs("key_digests", count, DIGEST_BYTES),
                fields.blob("seed_digest", DIGEST_BYTES),
            )

        self.dealings = self._ask(SHARES, list(self.keys), requests, read)
        self._require(self.dealings)

    def _collect(
        self,
        kind: str,
        content: Callable[[Sequence[int]], Content],
        length: int,
        read: Callable[[int, RecordDict], Iterator[Answer | Incident]],
    ) -> tuple[Tensor, dict[int, Answer]]:
        clients = list(self.dealings)
        requests = content(clients)
        fields = {"session": self.session, "parties": self.grid.parties, "remaining": self.threshold}
        for records in requests.values():
            records["secure"] = ConfigRecord({**dict(records.get("secure", {})), **fields})
        for client in clients:
            dealers = [k for k in self.neighbours[client] if k in self.dealings and k != client]
            dealt = [self.dealings[k].to(client) for k in dealers]
            record = ConfigRecord(
                {
                    "dealers": dealers,
                    "ciphertexts": [each.ciphertext for each in dealt],
                    "seed_digests": [each.seed_digest for each in dealt],
                    "key_digests": [each.key_digest for each in dealt],
                }
            )
            requests[self.nodes.of_client[client]][f"shares {client}"] = record
        dtype = torch.int32 if self.grid.bits == 32 else torch.int64
        total = torch.zeros(length, dtype=torch.int64)

        def read_masked(client: int, reply: RecordDict) -> Iterator[Answer | Incident]:
            spec: TreeSpec = {"masked": (dtype, (length,))}
            masked = tree_from_record(reply, f"client {client}", spec)["masked"]
            found = list(read(client, reply))
            if any(not isinstance(item, Incident) for item in found):
                total.copy_(self.grid.reduce(total + masked.to(torch.int64)))
            yield from found

        answers = self._ask(kind, clients, requests, read_masked)
        self._require(answers)
        return total, answers

    def _unmask(self, unmasking: Unmasking) -> None:
        clients = list(unmasking.present)
        requests = self._requests(clients)
        for client in clients:
            present, lost = unmasking.asked_of(client)
            record = ConfigRecord({"present": present, "lost": lost})
            requests[self.nodes.of_client[client]][f"unmask {client}"] = record

        def read(client: int, content: RecordDict) -> Iterator[bool]:
            count = sum(len(asked) for asked in unmasking.asked_of(client))
            revealed = ConfigReader(content, f"unmask {client}").blobs("shares", count, MAX_SHARE)
            changed = unmasking.add(client, revealed)
            if changed is not None:
                raise WireError(
                    "forged", f"its share of client {changed}'s secret is not the one that was dealt"
                )
            yield True

        helpers = self._ask(UNMASK, clients, requests, read)
        if not unmasking.suffices:
            raise self._too_few(len(helpers))

    # Messages -------------------------------------------------------------------------------------------

    def _requests(self, clients: Sequence[int], **fields: int) -> Content:
        """The request of a stage for each node with clients among these."""
        of_node: dict[int, list[int]] = {}
        for client in clients:
            if client in self.nodes.of_client:
                of_node.setdefault(self.nodes.of_client[client], []).append(client)
        return {
            node: {
                REQUEST: ConfigRecord(
                    {"round": self.number, "session": self.session, "clients": mine, **fields}
                )
            }
            for node, mine in of_node.items()
        }

    def _ask(
        self,
        kind: str,
        clients: Sequence[int],
        requests: Content,
        read: Callable[[int, RecordDict], Iterator[Answer | Incident]],
    ) -> dict[int, Answer]:
        """The replies of a stage by client; clients without a reply are incidents."""
        replies, faults = self.nodes.request(kind, requests, self.seconds)
        answers: dict[int, Answer] = {}
        for client in clients:

            def read_one(content: RecordDict, client: int = client) -> Iterator[Answer | Incident]:
                return read(client, content)

            for found in self.nodes.read_reply(client, replies, faults, read_one, self.seconds):
                if isinstance(found, Incident):
                    self.incidents.append(found)
                else:
                    answers[client] = found
        return answers

    def _require(self, there: Mapping[int, object]) -> None:
        """Raise an error unless enough clients remain to remove the masks."""
        circles = (self.neighbours[client] for client in self.dealings or self.keys)
        enough = (len(there.keys() & set(circle)) >= self.threshold for circle in circles)
        if not there or not all(enough):
            raise self._too_few(len(there))

    def _too_few(self, present: int) -> TooFew:
        causes = ", ".join(f"client {i.client}: {i.kind}" for i in self.incidents[:10])
        error = too_few_to_unmask(
            self.number, self.secure, present, self.seats, "client", causes or "not reached"
        )
        return TooFew(str(error))
