"""A round under secure aggregation: encoding of uploads as integer vectors, and decoding of their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tensors, Tree, leaves, unflatten
from holdfast.engine.aggregation import UploadSums
from holdfast.engine.clients import ClientResult, Incident, Job
from holdfast.methods.base import Server
from holdfast.updates.noise import gaussian
from holdfast.updates.privacy import ClientPrivacy, clip_factor, total_norm
from holdfast.updates.secure import (
    FixedPoint,
    Layout,
    MaskedSum,
    SecAggPlus,
    flatten,
    in_dtype,
    layout_of,
    too_few_to_unmask,
    unflatten_vector,
)

Gaussian = Callable[[Tensor, str], Tensor]
"""Standard normal values in the shape of a tensor, for the value of the upload with this path."""

MIN_STEPS = (
    16.0  # of the noise's standard deviation, so that rounding has a negligible effect on its distribution
)


@dataclass(frozen=True)
class ClientNoise:
    """The clipping bounds of uploads for differential privacy, and the standard deviations of the noise on the sum."""

    clip: float
    clip_sums: float
    weights_std: float
    sums_std: float
    count_std: float  # 0: the updates within the bound are not counted

    @classmethod
    def of(cls, privacy: ClientPrivacy) -> ClientNoise:
        """The current bounds and deviations of a run."""
        clip_sums = privacy.dp.clip_sums or 0.0
        return cls(
            privacy.clip,
            clip_sums,
            privacy.deviation(privacy.clip),
            privacy.deviation(clip_sums),
            privacy.count_noise if privacy.dp.adaptive else 0.0,
        )


class SecureUpload:
    """A client's upload as a vector: its weight, its loss, its weighted change of the model, and its method's sums.

    Weights are relative to ``unit``. With ``noise`` the vector consists of the clipped change and the clipped sums,
    with the weight that ``weight`` returns for a number of samples. It excludes private parameters (``private``) and
    integer buffers, which count batches.
    """

    def __init__(
        self,
        grid: FixedPoint,
        unit: float,
        server: Server,
        private: Collection[str],
        noise: ClientNoise | None = None,
        weight: Callable[[int], float] | None = None,
    ) -> None:
        self.grid, self.unit, self.noise, self.weight = grid, unit, noise, weight
        self.params = {k: w for k, w in server.params.items() if k not in private}
        self.buffers = {k: b for k, b in server.buffers.items() if k not in private and b.is_floating_point()}

    @classmethod
    def of(
        cls,
        secure: SecAggPlus,
        jobs: Sequence[Job],
        server: Server,
        private: Collection[str],
        privacy: ClientPrivacy | None,
    ) -> SecureUpload:
        """The encoding of a round; weights are relative to the largest number of samples."""
        unit, grid = float(max(len(job.ids) for job in jobs)), secure.grid(len(jobs))
        if privacy is None:
            return cls(grid, unit, server, private)
        return cls(grid, unit, server, private, ClientNoise.of(privacy), privacy.weight)

    def encode(self, result: ClientResult) -> Tensor:
        """The vector of a result; `HoldfastError` if a value is out of range."""
        with torch.no_grad():
            return self.grid.encode(flatten(self._values(result)))

    def layout(self, result: ClientResult) -> Layout:
        """The layout of a result's vector, which must be the same for all clients."""
        own = {path: value.dtype for path, value in leaves({"sums": result.sums})}
        layout = layout_of(self._values(result))
        return {path: (shape, own.get(path, dtype)) for path, (shape, dtype) in layout.items()}

    def _values(self, result: ClientResult) -> Tensors:
        change = {f"params/{k}": result.shared[k].double() - w.double() for k, w in self.params.items()}
        sums = {path: value.double() for path, value in sorted(leaves({"sums": result.sums}))}
        if self.noise is not None:
            return self._clipped(result.samples, change, sums, self.noise)
        change |= {f"buffers/{k}": result.buffers[k].double() - b.double() for k, b in self.buffers.items()}
        share = result.weight / self.unit
        weighted = {path: share * value for path, value in change.items()}
        loss = result.loss * result.samples / self.unit
        return (
            weighted
            | sums
            | {
                "weight": torch.tensor(share, dtype=torch.float64),
                "loss": torch.tensor(loss, dtype=torch.float64),
            }
        )

    def _clipped(self, samples: int, change: Tensors, sums: Tensors, noise: ClientNoise) -> Tensors:
        weight = 1.0 if self.weight is None else self.weight(samples)
        norm = total_norm(list(change.values()))
        values: Tensors = {}
        for part, length, bound in (
            (change, norm, noise.clip),
            (sums, total_norm(list(sums.values())), noise.clip_sums),
        ):
            factor = weight * clip_factor(length, self._rounded_down(bound, part)) if part else 0.0
            values |= {path: factor * value for path, value in part.items()}
        return values | ({"below": (norm <= noise.clip).double() - 0.5} if noise.count_std else {})

    def _rounded_down(self, bound: float, part: Tensors) -> float:
        """The bound minus the largest amount by which rounding can increase the norm of a part."""
        rounding = math.sqrt(sum(value.numel() for value in part.values())) * self.grid.step / 2
        if rounding > bound / 2:
            raise HoldfastError(
                f"secure aggregation: rounding to multiples of {self.grid.step:.3g} may change an upload by "
                f"{rounding:.3g}, too much for the bound {bound:g} of dp; use bits=64 or a smaller range"
            )
        return bound - rounding

    def noise_share(self, layout: Layout, remaining: int, gaussian: Gaussian) -> Tensor:
        """One share of the noise on the sum; ``remaining`` shares together have the required variance."""
        assert self.noise is not None
        deviations = {
            "below": self.noise.count_std,
            "params": self.noise.weights_std,
            "sums": self.noise.sums_std,
        }
        noise: Tensors = {}
        for path, (shape, _) in layout.items():
            std = deviations[path.partition("/")[0]] / math.sqrt(remaining)
            if std < MIN_STEPS * self.grid.step:
                raise HoldfastError(
                    f"secure aggregation: noise of deviation {std:.3g} cannot be drawn in multiples of "
                    f"{self.grid.step:.3g}; use bits=64 or a smaller range"
                )
            noise[path] = std * gaussian(torch.zeros(shape, dtype=torch.float64), path)
        return self.grid.encode(flatten(noise))


class SecureSums(UploadSums):
    """The sum of a round's uploads under secure aggregation. Its means are the plain ones, up to rounding.

    In a simulation uploads are masked and added one by one (``add``), with the share of the noise that
    ``noise(layout, client)`` draws; on Flower the engine provides the sum (``set_total``).
    """

    sees_uploads = False

    def __init__(
        self,
        upload: SecureUpload,
        masked: MaskedSum,
        server: Server,
        privacy: ClientPrivacy | None = None,
        noise: Callable[[Layout, int], Tensor] | None = None,
    ) -> None:
        super().__init__(keeps_uploads=False)
        self.upload, self.masked, self.server, self.privacy = upload, masked, server, privacy
        self.noise = noise
        self.clip = None if privacy is None else privacy.clip
        self.layout: Layout = {}
        self.total: Tensor | None = None  # without masks
        self.count = 0
        self.error = 0.0  # the largest possible one of a parameter

    @classmethod
    def of(
        cls,
        secure: SecAggPlus,
        jobs: Sequence[Job],
        lost: Sequence[int],
        server: Server,
        private: Collection[str],
        seed: int,
        privacy: ClientPrivacy | None,
    ) -> SecureSums:
        """The sums of a round with these clients; the clients ``lost`` are sampled but do not train."""
        upload = SecureUpload.of(secure, jobs, server, private, privacy)
        seats = sorted([*(job.client for job in jobs), *lost])
        masked = MaskedSum(secure, upload.grid, seats, seed, server.round)
        if privacy is None:
            return cls(upload, masked, server)
        secret, remaining = privacy.secret, secure.threshold_of(len(seats))

        def noise(layout: Layout, client: int) -> Tensor:
            def draw(like: Tensor, path: str) -> Tensor:
                return gaussian(like, secret, f"dp noise of {path}", masked.round, client)

            return upload.noise_share(layout, remaining, draw)

        return cls(upload, masked, server, privacy, noise)

    @property
    def usable(self) -> bool:
        """Whether the sums contain an upload."""
        return self.count > 0

    def add(self, result: ClientResult) -> None:
        """Add a client's upload, in a simulation."""
        layout = self.upload.layout(result)
        if self.layout and layout != self.layout:
            raise HoldfastError(
                f"client_final returns different tensors for client {result.client} than for other clients; "
                "secure aggregation needs tensors of the same names and shapes for every client"
            )
        values = self.upload.encode(result)
        if self.noise is not None:
            values += self.noise(layout, result.client).to(values.device)
        self.masked.add(result.client, values)
        self._count(layout, values, 1)

    def set_total(self, total: Tensor, layout: Layout, clients: int) -> None:
        """Set the unmasked sum of the uploads of this number of clients."""
        self.total = total
        self._count(layout, total, clients)

    def _count(self, layout: Layout, values: Tensor, clients: int) -> None:
        self.layout = layout
        self.count += clients
        self.bytes += clients * len(values) * self.masked.grid.bits // 8

    def check_clients(self) -> None:
        """Raise an error if the sum would be a single upload.

        With noise, a single upload is protected by the mechanism.
        """
        if len(self.masked.seats) < 2 and self.privacy is None:
            raise HoldfastError(
                f"round {self.masked.round}: only one client takes part, so the sum would reveal its upload to "
                "the server; use more clients per round"
            )

    def check(self, incidents: Sequence[Incident]) -> None:
        """Raise an error if too many of the round's clients are lost to unmask the sum."""
        if self.total is None and not self.masked.suffices:
            raise too_few(self.masked, incidents)

    def mean(self) -> tuple[Tensors, Tensors]:
        """The means of parameters and buffers; the sums become available too. To be called once."""
        values, grid, server = self._decoded(), self.masked.grid, self.server
        error = grid.error(self.count)
        if self.privacy is not None:
            divisor = float(self.privacy.per_round)
            if "below" in values:
                self.privacy.adapt(float(values["below"]))
        else:
            divisor = float(values["weight"])
            if divisor <= error:
                raise HoldfastError(f"round {server.round}: the weights of the clients sum to 0")
        model = {"params": dict(server.params), "buffers": dict(server.buffers)}
        largest = 0.0
        for path, value in values.items():
            part, _, name = path.partition("/")
            if part in model:
                change, before = value / divisor, model[part][name]
                largest = max(largest, float(change.abs().max()) if change.numel() else 0.0)
                model[part][name] = (before.double() + change).to(before.dtype)
        # The divisor is a rounded sum, too.
        self.error = (
            error / divisor if self.privacy is not None else error * (1 + largest) / (divisor - error)
        )
        sums = {path: value for path, value in values.items() if path.startswith("sums/")}
        self.sums = unflatten(in_dtype(sums, self.layout)).get("sums", {})
        return model["params"], model["buffers"]

    def mean_loss(self, samples: int) -> float | None:
        """The mean loss of the clients with ``samples`` samples in total; None if losses are not sent."""
        return float(self._decoded()["loss"]) * self.upload.unit / samples if "loss" in self.layout else None

    def _decoded(self) -> Tensors:
        total = self.masked.unmasked() if self.total is None else self.total
        return unflatten_vector(self.masked.grid.decode(total), self.layout)

    def record(self) -> dict[str, Any]:
        """The entries of the round's record."""
        secure = {"clients": len(self.masked.seats), "step": self.masked.grid.step, "error": self.error}
        if self.privacy is None:
            return {"secure": secure}
        account = {"noise_multiplier": self.privacy.noise_multiplier, "clip": self.clip, "clipped": None}
        return {"epsilon": self.privacy.epsilon(self.server.round), "privacy": account, "secure": secure}


def encoded_tree(tree: Tree, grid: FixedPoint) -> tuple[Layout, Tensor]:
    """A tree of tensors, such as a client's final statistics, as a vector of whole numbers."""
    flat = dict(sorted(leaves(tree)))
    return layout_of(flat), grid.encode(flatten(flat))


def decoded_tree(total: Tensor, layout: Layout, grid: FixedPoint) -> Tree:
    """The sum of the trees whose vectors add up to ``total``."""
    return unflatten(in_dtype(unflatten_vector(grid.decode(total), layout), layout))


def masked_sum(secure: SecAggPlus, trees: Mapping[int, Tree], seed: int, round: int) -> Tree:
    """The sum of one tree of each client, in a simulation: each is encoded, masked and added."""
    grid = secure.grid(len(trees))
    masked, layout = MaskedSum(secure, grid, list(trees), seed, round), Layout()
    for client, tree in trees.items():
        layout, values = encoded_tree(tree, grid)
        masked.add(client, values)
    return decoded_tree(masked.unmasked(), layout, grid)


def too_few(masked: MaskedSum, incidents: Sequence[Incident]) -> HoldfastError:
    """The error for a round of a simulation whose sum cannot be unmasked."""
    causes = ", ".join(f"client {i.client}: {i.kind}" for i in incidents[:10])
    return too_few_to_unmask(
        masked.round, masked.secure, len(masked.present), len(masked.seats), "client", causes
    )
