"""Binding of replies to requests: replayed replies, replies of another site and changed replies are rejected.

Every request contains a nonce, a random number that only its receiver gets. The site seals its reply with an
HMAC-SHA256, keyed with the nonce, over the request (run, round, clients) and over all records of the reply.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from holdfast.flower.messages import ConfigReader
from holdfast.flower.wire import WireError

BINDING, SEAL, REQUEST = "binding", "seal", "request"
NONCE_BYTES = 16
HEX_DIGITS = 64  # of an HMAC-SHA256


def new_binding() -> dict[str, ConfigRecord]:
    """The record that makes a request unique."""
    return {BINDING: ConfigRecord({"nonce": secrets.token_hex(NONCE_BYTES)})}


def seal_reply(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod of Flower's ClientApp: the app's reply, sealed if the request is bound.

    It must be the first of several mods, so that it seals the reply after the changes of the others.
    """
    reply = call_next(message, context)
    if BINDING in message.content and not reply.has_error():
        reply.content[SEAL] = seal_of(message.content, reply.content)
    return reply


def seal_of(request: RecordDict, reply: RecordDict) -> ConfigRecord:
    """The seal of a reply to a request."""
    nonce = _nonce(request)
    return ConfigRecord({"nonce": nonce, "code": _code(nonce, request, reply)})


def check_seal(request: RecordDict, reply: RecordDict) -> None:
    """Raise a `WireError` unless the receiver of this request has sealed the reply."""
    nonce = _nonce(request)
    if SEAL not in reply:
        raise WireError("forged", "it has no seal; all sites need the server's version of Holdfast")
    seal = ConfigReader(reply, SEAL)
    if seal.text("nonce", 2 * NONCE_BYTES) != nonce:
        raise WireError("wrong request", "it answers another request: of another round, site or run")
    code = _code(nonce, request, reply)
    if not hmac.compare_digest(seal.text("code", HEX_DIGITS).encode(), code.encode()):
        raise WireError("forged", "its seal does not match its content")


def _nonce(request: RecordDict) -> str:
    return ConfigReader(request, BINDING).text("nonce", 2 * NONCE_BYTES)


def _code(nonce: str, request: RecordDict, reply: RecordDict) -> str:
    code = hmac.new(nonce.encode(), digestmod="sha256")
    parts = [_parts(REQUEST, request.get(REQUEST))]
    parts += [_parts(name, reply[name]) for name in sorted(reply) if name != SEAL]
    for part in (part for several in parts for part in several):
        code.update(b"%d:" % len(part))  # no two sequences of parts have the same bytes
        code.update(part)
    return code.hexdigest()


def _parts(name: str, record: Any) -> Iterator[bytes]:
    """The content of a record as a sequence of bytes."""
    yield repr((type(record).__name__, name, 0 if record is None else len(record))).encode()
    if isinstance(record, ArrayRecord):
        for key in sorted(record):
            array = record[key]
            yield repr((key, array.dtype, tuple(array.shape), array.stype)).encode()
            yield array.data
    elif record is not None:
        for key in sorted(record):
            yield repr((key, record[key])).encode()
