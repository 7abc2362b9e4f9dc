"""Validation and summation of the updates that clients upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tensors, Tree, add_, leaves, size_in_bytes
from holdfast.engine.clients import ClientResult, Incident
from holdfast.methods.base import Server, Upload


@dataclass(eq=False)
class UploadSums:
    """Weighted sums of the uploads received so far in a round."""

    keeps_uploads: bool  # whether individual uploads are kept too
    weight: float = 0.0
    params: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    sums: Tree = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    bytes: int = 0  # without the models

    def add(self, result: ClientResult) -> None:
        weight = result.weight
        if not self.params:
            self.params = {k: torch.zeros_like(v) for k, v in result.shared.items()}
            self.buffers = {k: torch.zeros_like(v) for k, v in result.buffers.items()}
        self.weight += weight
        with torch.no_grad():
            shared = [result.shared[k] for k in self.params]
            torch._foreach_add_(list(self.params.values()), shared, alpha=weight)
            for k, b in self.buffers.items():
                # Integer buffers are counters, aggregated by their maximum.
                if b.is_floating_point():
                    b.add_(result.buffers[k], alpha=weight)
                else:
                    torch.maximum(b, result.buffers[k], out=b)
        add_(self.sums, result.sums)
        self.bytes += size_in_bytes(result.sums)
        if self.keeps_uploads:
            params, buffers = (
                {k: v.clone() for k, v in tensors.items()} for tensors in (result.shared, result.buffers)
            )
            self.uploads.append(Upload(result.client, weight, params, buffers, result.sums))

    def mean(self) -> tuple[Tensors, Tensors]:
        """The weighted means of parameters and buffers."""
        # Contiguous, as they are after loading a checkpoint: otherwise sums would round differently.
        params = {k: (v / self.weight).contiguous() for k, v in self.params.items()}
        buffers = {k: v / self.weight if v.is_floating_point() else v for k, v in self.buffers.items()}
        return params, buffers


def validate_update(result: ClientResult, server: Server) -> str | None:
    """The defect of a client's upload (keys, shapes, dtypes or non-finite values), or None if it is valid."""
    for expected, got in ((server.params, result.shared), (server.buffers, result.buffers)):
        if expected.keys() != got.keys():
            return "wrong keys"
        if any(expected[k].shape != got[k].shape for k in expected):
            return "wrong shape"
        if any(expected[k].dtype != got[k].dtype for k in expected):
            return "wrong dtype"
    # The engine has checked the trained parameters, which most methods upload unchanged.
    shared = {} if result.shared is result.params else result.shared
    uploaded = {"shared": shared, "buffers": result.buffers, "sums": result.sums}
    values = [v for _, v in leaves(uploaded) if v.is_floating_point() and v.numel()]
    finite = result.finite
    if finite and values:
        largest = torch.stack(torch._foreach_norm(values, float("inf")))
        finite = bool(torch.isfinite(largest).all())
    return None if finite else "not finite"


def too_few_updates(
    round: int, usable: int, min_clients: int, incidents: Sequence[Incident]
) -> HoldfastError:
    """The error for a round with fewer valid updates than ``min_clients``. The last complete round is kept."""
    causes = ", ".join(f"client {i.client}: {i.kind}" for i in incidents[:10])
    shortage = (
        "no usable update is left"
        if not usable
        else f"{usable} usable updates were received, but min_clients is {min_clients}"
    )
    kinds = {incident.kind for incident in incidents}
    hint = "resume the run when the clients are available again"
    if "not finite" in kinds:
        hint = "try a lower learning rate"
    elif kinds and kinds <= {"wrong keys", "wrong shape", "wrong dtype"}:
        hint = "uploaded parameters must have the names, shapes and dtypes of the model's parameters"
    return HoldfastError(f"round {round}: {shortage} ({causes}); {hint}")
