"""Checks of a run with secure aggregation, before training."""

from __future__ import annotations

import math
import warnings

import numpy as np

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.methods.base import Method
from holdfast.updates.secure import parse_secure


def check_secrecy(method: Method, settings: Settings, federation: Federation) -> None:
    """Raise an error if a part of the run needs single uploads, or a round has too few clients."""
    if settings.secure is None:
        return
    secure = parse_secure(settings.secure)
    if method.keeps_uploads:
        raise HoldfastError(
            f"secure: {method.name} needs individual uploads, but secure aggregation gives the server only their "
            "sum; choose another method"
        )
    for name, why in (
        ("robust", "a robust mean compares single updates"),
        ("max_update_norm", "the server sees no single update that it could measure"),
        ("max_update_ratio", "the server sees no single update that it could measure"),
        (
            "compress",
            "uploads are rounded to whole numbers of fixed length already, and masks cannot be compressed",
        ),
    ):
        if getattr(settings, name) is not None:
            raise HoldfastError(f"secure cannot be combined with {name}: {why}; leave one of them out")
    if settings.dp is not None and secure.neighbours is not None:
        raise HoldfastError(
            "secure: neighbours cannot be combined with dp, which divides its noise among all clients of a "
            "round; leave neighbours out"
        )
    clients = min(int(np.count_nonzero(federation.sizes(stage))) for stage in range(federation.stages))
    per_round = min(settings.clients_per_round or clients, clients)
    if per_round < 2:
        raise HoldfastError(
            "secure: a round has one client, so the sum would reveal its upload; set clients_per_round to 2 "
            "or more"
            if clients > 1
            else f"secure: {'a stage has' if federation.stages > 1 else 'there is'} {clients} client with samples, and "
            "secure aggregation needs 2 or more, since the sum would reveal the upload of one client"
        )
    remaining = math.floor(per_round * (1 - settings.client_dropout))
    if remaining < secure.threshold_of(per_round):
        warnings.warn(
            f"secure: of {per_round} clients a round, about {remaining} remain with client_dropout "
            f"{settings.client_dropout:g}, and {secure.threshold_of(per_round)} are needed: most rounds will fail",
            HoldfastWarning,
            stacklevel=4,
        )
