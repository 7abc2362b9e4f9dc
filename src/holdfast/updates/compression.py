"""Compression of updates: sparsification to the largest values, and quantization to 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import (
    Description,
    PositiveCount,
    PositiveFraction,
    build,
    parse_text,
    validate,
    validate_fields,
)
from holdfast.core.trees import Tensors
from holdfast.updates.noise import uniform

INDEX_BYTES = 4


@dataclass(frozen=True)
class Compressor:
    """A part of a compression."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def describe(self) -> dict[str, Any]:
        """The name and the options."""
        return {"name": self.name} | asdict(self)


@dataclass(frozen=True)
class TopK(Compressor):
    """The ``share`` of an update's values that are largest in magnitude; all others count as 0.

    With ``feedback`` a client keeps the rest and adds it to its next update (error feedback, Stich et al., 2018). The
    positions are sent as 32-bit numbers, or as a bit mask of the update if that is shorter.
    """

    name: ClassVar[str] = "topk"
    share: PositiveFraction = 0.01
    feedback: bool = True

    def count(self, size: int) -> int:
        """k."""
        return max(1, math.ceil(self.share * size - 1e-9))

    def encode(self, values: Tensor) -> tuple[Tensor, Tensors]:
        """The largest values, in order of position, and their positions."""
        places = values.abs().topk(self.count(len(values))).indices.sort().values
        return values[places], self._packed(places, len(values))

    def _packed(self, places: Tensor, size: int) -> Tensors:
        if not self._as_bits(size):
            return {"places": places.to(torch.int32)}
        bits = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=places.device)
        bits[places] = 1
        return {"bits": (bits.view(-1, 8) << torch.arange(8, device=bits.device)).sum(1).to(torch.uint8)}

    def places(self, encoded: Tensors, size: int) -> Tensor:
        """The positions of the sent values; `HoldfastError` if they cannot come from `encode`."""
        if self._as_bits(size):
            packed = encoded["bits"].unsqueeze(1)
            bits = (packed >> torch.arange(8, device=packed.device)) & 1
            places = bits.flatten().nonzero().flatten()
        else:
            places = encoded["places"].long()
        sound = len(places) == self.count(size) and bool((places >= 0).all() and (places < size).all())
        if not sound or bool((places.diff() <= 0).any()):
            raise HoldfastError(
                f"places of values must be {self.count(size)} increasing numbers below {size}"
            )
        return places

    def _as_bits(self, size: int) -> bool:
        return -(-size // 8) < INDEX_BYTES * self.count(size)


@dataclass(frozen=True)
class Quantizer(Compressor):
    """Values as whole multiples of a bucket's largest magnitude by the number of levels, rounded up or down at random
    such that the expectation is the value (QSGD, Alistarh et al., 2017). ``bucket`` values share a scale.
    """

    levels: ClassVar[int] = 0
    bucket: PositiveCount = 1024

    def encode(self, values: Tensor, *counters: int) -> Tensors:
        """Levels and scales; ``counters`` are the seed, the round and the client."""
        seed, round, client = counters
        padded = torch.cat([values, values.new_zeros(-len(values) % self.bucket)]).view(-1, self.bucket)
        scales = padded.abs().amax(1).float()
        unit = scales.to(values.dtype).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        chance = uniform(padded, seed, "rounding", round, client)
        # The scale is rounded to 32 bits, so that the largest value may slightly exceed it.
        levels = (padded / unit * self.levels + chance).floor().clamp(-self.levels, self.levels)
        return {"levels": self.pack(levels.flatten()[: len(values)].to(torch.int8)), "scales": scales}

    def decode(self, encoded: Tensors, size: int, dtype: torch.dtype) -> Tensor:
        """The values; inverse of `encode` up to rounding."""
        levels = self.unpack(encoded["levels"], size).to(dtype)
        unit = (encoded["scales"].to(dtype) / self.levels).repeat_interleave(self.bucket)[:size]
        return levels * unit

    def pack(self, levels: Tensor) -> Tensor:
        return levels

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        return packed


@dataclass(frozen=True)
class Int8(Quantizer):
    """127 levels in 8 bits."""

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = 127


@dataclass(frozen=True)
class Int4(Quantizer):
    """7 levels in 4 bits, two values in a byte."""

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = 7

    def pack(self, levels: Tensor) -> Tensor:
        pairs = torch.cat([levels, levels.new_zeros(len(levels) % 2)]).view(-1, 2).to(torch.int16) + 8
        return (pairs[:, 0] | (pairs[:, 1] << 4)).to(torch.uint8)

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        pairs = torch.stack([packed & 15, packed >> 4], 1).flatten()[:size]
        return pairs.to(torch.int16) - 8


@dataclass(frozen=True)
class Compression:
    """Sparsification, quantization, or both: the largest values are then quantized."""

    topk: TopK | None = None
    quantizer: Quantizer | None = None

    def describe(self) -> dict[str, Any]:
        """The names, joined by +, and the options of each part."""
        parts = [part for part in (self.topk, self.quantizer) if part is not None]
        return {"name": "+".join(part.name for part in parts)} | {p.name: p.describe() for p in parts}

    @property
    def keeps_rest(self) -> bool:
        """Whether a client keeps the compression error (error feedback)."""
        return self.topk is not None and self.topk.feedback

    def encode(self, values: Tensor, seed: int, round: int, client: int) -> Tensors:
        """Encode the update ``values`` ``[d]``; the shapes of the result depend on d only."""
        encoded: Tensors = {}
        if self.topk is not None:
            values, encoded = self.topk.encode(values)
        if self.quantizer is None:
            return encoded | {"values": values}
        return encoded | self.quantizer.encode(values, seed, round, client)

    def decode(self, encoded: Tensors, size: int, dtype: torch.dtype) -> Tensor:
        """Decode the update ``[size]``; `HoldfastError` if it is invalid."""
        sent = size if self.topk is None else self.topk.count(size)
        values = encoded["values"] if self.quantizer is None else self.quantizer.decode(encoded, sent, dtype)
        if self.topk is None:
            return values
        return values.new_zeros(size).index_copy_(0, self.topk.places(encoded, size), values)


KINDS: dict[str, type[Compressor]] = {kind.name: kind for kind in (TopK, Int8, Int4)}
"""The parts of a compression by name."""


def parse_compression(written: Compression | str | Mapping[str, Any]) -> Compression:
    """``int8``, ``topk:0.01`` or ``topk:0.1+int4`` as a `Compression`, or a mapping."""
    if isinstance(written, Compression):
        return written
    validate("compress", written, str | Description)
    if isinstance(written, str):
        described = [parse_text(part, "compression", ("share",)) for part in written.split("+")]
    else:
        names = str(written.get("name", "")).split("+")
        described = [{"name": name, **written.get(name, {})} for name in names]
        if len(names) == 1:
            described = [described[0] | {k: v for k, v in written.items() if k != names[0]}]
    parts = [build(KINDS, part, "compression") for part in described]
    match parts:
        case [TopK() as topk]:
            return Compression(topk)
        case [Quantizer() as quantizer]:
            return Compression(None, quantizer)
        case [TopK() as topk, Quantizer() as quantizer]:
            return Compression(topk, quantizer)
    raise HoldfastError(
        f"compress is '{'+'.join(part.name for part in parts)}'; it must be topk, int8, int4, topk+int8 or topk+int4"
    )
