"""Secure aggregation: the server receives the sum of the clients' uploads, not single uploads (Bell et al., 2020).

This module has the arithmetic for simulations and Flower: fixed-point encoding, sums modulo a power of two, the graph
of neighbours, and the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.random import counter_key
from holdfast.core.spec import (
    Description,
    Positive,
    PositiveCount,
    Range,
    build,
    parse_text,
    validate,
    validate_fields,
)
from holdfast.core.trees import Tensors

RANGES = {32: 16.0, 64: 2.0**20}
"""The default of ``range``, by ``bits``."""


@dataclass(frozen=True)
class SecAggPlus:
    """Sums of masked uploads.

    Every client adds masks to its upload that cancel in the sum of all: one for each of its ``neighbours`` (all other
    clients of the round by default), and one of its own. Clients hold shares of each other's secrets. If a client is
    lost, the others' shares remove its masks from the sum, as long as a share ``threshold`` of each
    neighbourhood remains; otherwise the round fails.

    Uploads are rounded to whole multiples of a step, modulo 2^``bits``. ``range`` is the largest magnitude that a value
    may have, by default 2^20 for 64 bits and 16 for 32. The step follows: it is the smallest power of two with which
    the sum of a round's clients cannot overflow.
    """

    name: ClassVar[str] = "secagg+"

    threshold: Annotated[float, Range(gt=0.5, le=1)] = 0.6
    neighbours: PositiveCount | None = None
    bits: Literal[32, 64] = 64
    range: Positive | None = None

    def __post_init__(self) -> None:
        validate_fields(self, "secure")
        if self.neighbours is not None and self.neighbours % 2:
            raise HoldfastError(
                f"secure: neighbours is {self.neighbours}; it must be even, because a client has the same "
                "number on each side"
            )

    def describe(self) -> dict[str, Any]:
        """The name and the options."""
        return {"name": self.name} | asdict(self)

    def neighbourhood(self, seat: int, seats: int) -> list[int]:
        """The seats whose clients share masks with the one at ``seat`` of ``seats``, in a circle, including its own."""
        if self.neighbours is None or self.neighbours >= seats - 1:
            return list(range(seats))
        half = self.neighbours // 2
        return sorted((seat + offset) % seats for offset in range(-half, half + 1))

    def threshold_of(self, seats: int) -> int:
        """The number of clients of each neighbourhood that must remain: at least two, if the round has two."""
        return min(seats, max(2, math.ceil(self.threshold * len(self.neighbourhood(0, seats)) - 1e-9)))

    def suffice(self, present: Collection[int], seats: int) -> bool:
        """Whether the clients ``present`` suffice to remove the masks of all clients."""
        there, needed = set(present), self.threshold_of(seats)
        return all(
            len(there.intersection(self.neighbourhood(seat, seats))) >= needed for seat in range(seats)
        )

    def grid(self, seats: int) -> FixedPoint:
        """The fixed-point format of a round with this number of clients."""
        return FixedPoint(self.bits, self.range or RANGES[self.bits], seats)


def parse_secure(written: SecAggPlus | str | Mapping[str, Any]) -> SecAggPlus:
    """``secagg+``, ``secagg+:threshold=0.8`` or a mapping as a `SecAggPlus`."""
    if isinstance(written, SecAggPlus):
        return written
    validate("secure", written, str | Description)
    if isinstance(written, str):
        written = parse_text(written, "secure aggregation", ("threshold",))
    return build({SecAggPlus.name: SecAggPlus}, written, "secure aggregation", "secagg+:threshold=0.6")


class OutOfRange(HoldfastError):
    """The error for an upload with a value that cannot be encoded."""


@dataclass(frozen=True)
class FixedPoint:
    """Whole multiples of a step, modulo 2^``bits``; sums of ``parties`` values below ``range`` do not overflow."""

    bits: int
    range: float
    parties: int

    @property
    def step(self) -> float:
        """A power of two, so that division by it is exact."""
        return math.ldexp(1.0, math.ceil(math.log2(self.range * self.parties)) - (self.bits - 1))

    def encode(self, values: Tensor) -> Tensor:
        """Multiples of the step, int64; `OutOfRange` if a value is too large or not finite."""
        values = values.double()
        largest = float(values.abs().max()) if values.numel() else 0.0
        if not largest < self.range - self.step:
            raise OutOfRange(
                f"secure aggregation: a value of {largest:.3g} is to be uploaded, and range is {self.range:g}; raise "
                "secure.range, or lower the learning rate if training diverges"
            )
        return (values / self.step).round().to(torch.int64)

    def reduce(self, total: Tensor) -> Tensor:
        """The representative of a sum modulo 2^bits, between ±2^(bits-1)."""
        if self.bits == 64:
            return total  # int64 arithmetic wraps around
        half = 1 << (self.bits - 1)
        return ((total + half) & ((1 << self.bits) - 1)) - half

    def decode(self, total: Tensor) -> Tensor:
        """The sum of the encoded values, up to rounding, in float64."""
        return self.reduce(total).double() * self.step

    def error(self, added: int) -> float:
        """The largest possible error of a sum of this number of values."""
        return added * self.step / 2


class MaskedSum:
    """The sum of the received masked vectors of ``clients`` (in their order), in a simulation.

    Each client adds the mask that it shares with the next client and subtracts the one that it shares with the previous
    client, so that all masks sum to 0. In a simulation they protect nothing, since one process holds all vectors.
    """

    def __init__(
        self, secure: SecAggPlus, grid: FixedPoint, clients: Sequence[int], seed: int, round: int
    ) -> None:
        self.secure, self.grid, self.seed, self.round = secure, grid, seed, round
        self.seats = {client: seat for seat, client in enumerate(clients)}
        self.present: set[int] = set()  # seats
        self.total: Tensor | None = None

    def add(self, client: int, values: Tensor) -> None:
        """Mask a client's vector (of `FixedPoint.encode`) and add it."""
        seat = self.seats[client]
        self.present.add(seat)
        masked = values + self._mask(values, seat)
        self.total = self.grid.reduce(masked if self.total is None else self.total + masked)

    @property
    def suffices(self) -> bool:
        """Whether enough clients are present for the masks to be removed."""
        return self.total is not None and self.secure.suffice(self.present, len(self.seats))

    def unmasked(self) -> Tensor:
        """The sum of the vectors, without the masks of lost clients."""
        assert self.total is not None
        total = self.total
        for seat in sorted({*self.seats.values()} - self.present):
            total = total + self._mask(total, seat)
        return self.grid.reduce(total)

    def _mask(self, like: Tensor, seat: int) -> Tensor:
        return self._shared(like, seat) - self._shared(like, (seat - 1) % len(self.seats))

    def _shared(self, like: Tensor, seat: int) -> Tensor:
        """Uniform values of 64 bits that the client at ``seat`` and the next one agree on."""
        key = counter_key(self.seed, "pairwise masks", self.round, seat) >> 1
        source = torch.Generator(like.device).manual_seed(key)
        return torch.empty_like(like).random_(-(2**63), None, generator=source)


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and the dtype of each value of a vector, by path and in its order."""


def layout_of(values: Mapping[str, Tensor]) -> Layout:
    """The layout of the vector that `flatten` makes."""
    return {path: (tuple(value.shape), value.dtype) for path, value in values.items()}


def flatten(values: Mapping[str, Tensor]) -> Tensor:
    """All values as one vector of float64."""
    parts = [value.double().flatten() for value in values.values()]
    return torch.cat([part.to(parts[0].device) for part in parts] or [torch.zeros(0, dtype=torch.float64)])


def unflatten_vector(vector: Tensor, layout: Layout) -> Tensors:
    """The values of a vector, in float64."""
    parts = torch.split(vector, [math.prod(shape) for shape, _ in layout.values()])
    return {path: part.view(shape) for (path, (shape, _)), part in zip(layout.items(), parts, strict=True)}


def in_dtype(values: Tensors, layout: Layout) -> Tensors:
    """The values in the dtypes of the layout, rounded for integer types."""
    return {
        path: (value if layout[path][1].is_floating_point else value.round()).to(layout[path][1])
        for path, value in values.items()
    }


def too_few_to_unmask(
    round: int, secure: SecAggPlus, present: int, seats: int, who: str, causes: str
) -> HoldfastError:
    """The error for a round whose sum cannot be unmasked. The last complete round is kept."""
    near = "" if secure.neighbours is None else " of each neighbourhood"
    return HoldfastError(
        f"round {round}: secure aggregation needs {secure.threshold_of(seats)}{near} of {seats} {who}s to the end, and "
        f"{present} remained ({causes}); resume the run when the others are available again, or begin a new one with a "
        "lower threshold"
    )
