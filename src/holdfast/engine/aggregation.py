"""Validation and summation of the updates that clients upload."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tensors, Tree, add_, leaves, size_in_bytes, unflatten
from holdfast.engine.clients import ClientResult, Incident
from holdfast.methods.base import Server, Upload
from holdfast.updates.privacy import ClientPrivacy, clip_factor, total_norm


@dataclass(eq=False)
class UploadSums:
    """Weighted sums of the uploads received so far in a round."""

    sees_uploads: ClassVar[bool] = True  # whether the server sees single uploads

    keeps_uploads: bool  # whether individual uploads are kept too
    weight: float = 0.0
    params: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    sums: Tree = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    bytes: int = 0  # without the models

    @property
    def usable(self) -> bool:
        """Whether the sums contain an upload."""
        return self.weight > 0

    def check_clients(self) -> None:
        """Raise an error if these clients must not take part in a round together."""

    def check(self, incidents: Sequence[Incident]) -> None:
        """Raise an error if the uploads received do not suffice for the sums."""

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
        self._check_sums(result)
        add_(self.sums, result.sums)
        self.bytes += size_in_bytes(result.sums)
        if self.keeps_uploads:
            params, buffers = (
                {k: v.clone() for k, v in tensors.items()} for tensors in (result.shared, result.buffers)
            )
            self.uploads.append(Upload(result.client, weight, params, buffers, result.sums))

    def _check_sums(self, result: ClientResult) -> None:
        """Raise an error if the shapes or dtypes of a client's sums differ from those of previous clients."""
        so_far = dict(leaves(self.sums))
        for path, value in leaves(result.sums):
            one = so_far.get(path, value)
            if one.shape != value.shape or one.dtype != value.dtype:
                raise HoldfastError(
                    f"client_final returns '{path}' with shape {tuple(value.shape)} and dtype {value.dtype} for "
                    f"client {result.client}, but {tuple(one.shape)} and {one.dtype} for other clients; they must "
                    "be the same for every client"
                )

    def record(self) -> dict[str, Any]:
        """Further entries of the round's record."""
        return {}

    def mean(self) -> tuple[Tensors, Tensors]:
        """The weighted means of parameters and buffers."""
        # Contiguous, as they are after loading a checkpoint: otherwise sums would round differently.
        params = {k: (v / self.weight).contiguous() for k, v in self.params.items()}
        buffers = {k: v / self.weight if v.is_floating_point() else v for k, v in self.buffers.items()}
        return params, buffers


class PrivateSums(UploadSums):
    """Sums of clipped uploads with Gaussian noise, for differential privacy of clients.

    Private parameters (``private``) and buffers keep the server's values.
    """

    def __init__(self, privacy: ClientPrivacy, server: Server, private: Collection[str]) -> None:
        super().__init__(keeps_uploads=False)
        self.privacy, self.server = privacy, server
        self.shared = {k: w for k, w in server.params.items() if k not in private}
        self.params = {k: torch.zeros_like(w) for k, w in self.shared.items()}
        self.side = {path: torch.zeros_like(v) for path, v in privacy.sums.items()}
        self.count = 0
        self.below = torch.zeros((), dtype=torch.float64)  # Σ_k (b_k - 1/2)
        self.clip = privacy.clip

    @property
    def usable(self) -> bool:
        """Always true: a round without clients adds noise, too."""
        return True

    def add(self, result: ClientResult) -> None:
        privacy = self.privacy
        weight = privacy.weight(result.samples)
        with torch.no_grad():
            change = [result.shared[k] - w for k, w in self.shared.items()]
            norm = total_norm(change)
            for total, value in zip(self.params.values(), change, strict=True):
                total += (weight * clip_factor(norm, self.clip)).to(value.dtype) * value
            self.below = self.below.to(norm.device) + (norm <= self.clip).double() - 0.5
            if self.side:
                sums = dict(leaves(result.sums))
                values = [sums[path] for path in self.side]
                factor = weight * clip_factor(total_norm(values), privacy.dp.clip_sums or 0.0)
                for path, value in zip(self.side, values, strict=True):
                    self.side[path] += factor.to(value.dtype) * value
        self.count += 1
        self.bytes += size_in_bytes(result.sums)

    def mean(self) -> tuple[Tensors, Tensors]:
        """w^{t-1} plus the noisy mean of the clipped changes; the sums become noisy too. To be called once."""
        privacy, round = self.privacy, self.server.round
        noisy = privacy.add_noise("weights", self.params, self.clip, round)
        params = {
            k: (w + noisy[k] / privacy.per_round).contiguous() if k in noisy else w
            for k, w in self.server.params.items()
        }
        self.sums = unflatten(privacy.add_noise("sums", self.side, privacy.dp.clip_sums or 0.0, round))
        if privacy.dp.adaptive:
            privacy.adapt(privacy.noisy_count(self.below, round))
        return params, dict(self.server.buffers)

    def record(self) -> dict[str, Any]:
        """The entries of the round's record."""
        clipped = None if self.count == 0 else 0.5 - float(self.below) / self.count
        account = {"noise_multiplier": self.privacy.noise_multiplier, "clip": self.clip, "clipped": clipped}
        return {"epsilon": self.privacy.epsilon(self.server.round), "privacy": account}


def validate_update(result: ClientResult, server: Server) -> str | None:
    """The defect of a client's upload (keys, shapes, dtypes or non-finite values), or None if it is valid."""
    for expected, got in ((server.params, result.shared), (server.buffers, result.buffers)):
        if expected.keys() != got.keys():
            return "wrong keys"
        if any(expected[k].shape != got[k].shape for k in expected):
            return "wrong shape"
        if any(expected[k].dtype != got[k].dtype for k in expected):
            return "wrong dtype"
    # The engine has validated the trained parameters; most methods upload them unchanged.
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
    elif "out of range" in kinds:
        hint = "raise secure.range, or lower the learning rate if training diverges"
    elif kinds and kinds <= {"wrong keys", "wrong shape", "wrong dtype"}:
        hint = "uploaded parameters must have the names, shapes and dtypes of the model's parameters"
    return HoldfastError(f"round {round}: {shortage} ({causes}); {hint}")
