"""The site's side of secure aggregation: handlers of its stages, in their order.

    keys ─▶ shares ─▶ training (or statistics), masked ─▶ unmask

Flower starts a new process for every message. Between messages, a client's secrets are stored in the context of the
app, which is in the SuperNode's memory and never on a disk. The last stage deletes them.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engine.clients import private_names
from holdfast.engine.secure_sums import ClientNoise, SecureUpload, encoded_tree
from holdfast.flower.app import AppConfig, FlowerApp
from holdfast.flower.messages import (
    KEYS,
    SHARES,
    STATISTICS_MASKED,
    TRAIN_MASKED,
    UNMASK,
    ConfigReader,
    tree_to_record,
)
from holdfast.flower.sealing import REQUEST
from holdfast.flower.secagg import DIGEST_BYTES, MAX_SHARE, PUBLIC_BYTES, Dealt, PublicKeys, Seat
from holdfast.flower.site import Handler, RoundWork, for_each_client, guarded, make_reply
from holdfast.methods.base import Server
from holdfast.updates.noise import gaussian
from holdfast.updates.privacy import parse_dp
from holdfast.updates.secure import FixedPoint, SecAggPlus, parse_secure


class Seats:
    """The places of this site's clients in the secure sum that a message belongs to."""

    def __init__(self, message: Message, context: Context, record: str = REQUEST) -> None:
        self.state = context.state
        self.fields = ConfigReader(message.content, record)
        self.session = self.fields.text("session", 32)

    def clients(self) -> list[int]:
        return self.fields.integers("clients")

    def put(self, seat: Seat) -> None:
        self.state[f"seat {seat.client}"] = ConfigRecord(asdict(seat))

    def get(self, client: int) -> Seat:
        """The client's seat; `HoldfastError` if this node has none in this sum."""
        record = self.state.get(f"seat {client}")
        if not isinstance(record, ConfigRecord) or record["session"] != self.session:
            raise HoldfastError(
                f"secure aggregation: client {client} has no keys for this round; its node was restarted"
            )
        return Seat(**dict(record))

    def drop(self, client: int) -> None:
        self.state.pop(f"seat {client}")


def _parsed(app_config: AppConfig) -> SecAggPlus:
    if app_config.settings.secure is None:
        raise HoldfastError("the server requests a secure sum, but secure is not set in this run")
    return parse_secure(app_config.settings.secure)


# Handlers of messages -----------------------------------------------------------------------------------------


def keys(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Make new keys for each client."""
    _parsed(app_config)
    seats, content = Seats(message, context), {}
    for client in seats.clients():
        seat = Seat.new(seats.session, client)
        seats.put(seat)
        content[f"keys {client}"] = ConfigRecord(asdict(seat.public))
    return make_reply(message, content)


def shares(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Deal shares of each client's secrets to its neighbours."""
    secure, seats = _parsed(app_config), Seats(message, context)
    threshold = seats.fields.integer("threshold", 1)

    def dealt(client: int) -> dict[str, Any]:
        neighbours = ConfigReader(message.content, f"neighbours {client}")
        numbers = neighbours.integers("clients")
        public = (neighbours.blobs(key, len(numbers), PUBLIC_BYTES) for key in ("masks", "channel"))
        named = {k: PublicKeys(*pair) for k, *pair in zip(numbers, *public, strict=True)}
        # A site checks the threshold itself: with a low one the server could remove a single client's masks.
        least = replace(secure, neighbours=None).threshold_of(len(named))
        if threshold < least:
            raise HoldfastError(
                f"secure aggregation: the server asks for a threshold of {threshold} among {len(named)} clients; it "
                f"must be at least {least}"
            )
        if len(named) < 2 and app_config.settings.dp is None:
            raise HoldfastError(
                "secure aggregation: no other client takes part, so the sum would reveal the upload"
            )
        seat = seats.get(client)
        dealing = seat.deal(named, threshold)
        seats.put(seat)
        return {f"shares {client}": ConfigRecord(asdict(dealing))}

    content = (guarded(client, partial(dealt, client)) for client in seats.clients())
    return make_reply(message, {name: record for records in content for name, record in records})


def train_masked(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Train the requested clients one by one, and mask their uploads."""
    work = MaskedWork(app, app_config, message, context)
    return make_reply(message, dict(for_each_client(work, work.train_masked)))


def masked_statistics(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Compute the requested clients' statistics under the final model, and mask them."""
    work = MaskedWork(app, app_config, message, context)
    return make_reply(message, dict(for_each_client(work, lambda client, _: work.statistics_masked(client))))


def unmask(app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> Message:
    """Reveal shares, once, and delete each client's secrets."""
    seats = Seats(message, context)

    def revealed(client: int) -> dict[str, Any]:
        asked = ConfigReader(message.content, f"unmask {client}")
        seat = seats.get(client)
        found = seat.reveal(asked.integers("present"), asked.integers("lost"))
        seats.drop(client)
        return {f"unmask {client}": ConfigRecord({"shares": found})}

    content = (guarded(client, partial(revealed, client)) for client in seats.clients())
    return make_reply(message, {name: record for records in content for name, record in records})


SECURE_HANDLERS: dict[str, Handler] = {
    KEYS: keys,
    SHARES: shares,
    TRAIN_MASKED: train_masked,
    STATISTICS_MASKED: masked_statistics,
    UNMASK: unmask,
}


class MaskedWork(RoundWork):
    """One message's work whose results are masked."""

    def __init__(self, app: FlowerApp, app_config: AppConfig, message: Message, context: Context) -> None:
        super().__init__(app, app_config, message, context.node_config)
        self.secure = _parsed(app_config)
        self.seats = Seats(message, context, "secure")
        self.fields = self.seats.fields
        self.grid: FixedPoint = self.secure.grid(self.fields.integer("parties", 1))

    def train_masked(self, client: int, memory_round: int) -> dict[str, Any]:
        """Train one client; returns the records of its reply."""
        seat = self._seat(client)
        result, memory = self.trained(client, memory_round)
        settings = self.app_config.settings
        if settings.dp_samples is not None:
            result = replace(result, loss=0.0)  # the noise on the gradients does not protect it
        noise, weight = None, None
        if settings.dp is not None:
            bounds = self.fields.numbers("noise", len(ClientNoise.__dataclass_fields__))
            noise, weight = ClientNoise(*bounds), parse_dp(settings.dp).weight
        sent = self.sent
        server = Server(sent.params, sent.buffers, {}, sent.round)
        private = private_names(self.method, self.context)
        upload = SecureUpload(self.grid, self.fields.number("unit"), server, private, noise, weight)
        values = upload.encode(result).cpu()
        if noise is not None:
            remaining, secret = self.fields.integer("remaining", 1), secrets.randbits(64)
            values += upload.noise_share(
                upload.layout(result), remaining, lambda like, path: gaussian(like, secret, path)
            )
        masked = self._masked(seat, values)
        fields = self.remembered(result, memory, memory_round)
        return {f"client {client}": tree_to_record(masked), f"result {client}": ConfigRecord(fields)}

    def statistics_masked(self, client: int) -> dict[str, Any]:
        """The record of one client's masked statistics under the final model."""
        seat = self._seat(client)
        _, values = encoded_tree(self.final_statistics(client), self.grid)
        return {f"client {client}": tree_to_record(self._masked(seat, values))}

    def _seat(self, client: int) -> Seat:
        """The client's seat, with the shares that its neighbours dealt to it."""
        seat = self.seats.get(client)
        fields = ConfigReader(self.content, f"shares {client}")
        dealers = fields.integers("dealers")
        longest = {"ciphertexts": MAX_SHARE, "seed_digests": DIGEST_BYTES, "key_digests": DIGEST_BYTES}
        columns = [fields.blobs(key, len(dealers), most) for key, most in longest.items()]
        seat.receive({k: Dealt(*parts) for k, *parts in zip(dealers, *columns, strict=True)})
        return seat

    def _masked(self, seat: Seat, values: Tensor) -> dict[str, Tensor]:
        """The values plus the client's masks; its secrets are stored for the last stage."""
        masked = self.grid.reduce(seat.mask(values, self.grid.bits))
        self.seats.put(seat)
        return {"masked": masked.to(torch.int32 if self.grid.bits == 32 else torch.int64)}
