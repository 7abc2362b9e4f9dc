"""The space of a hyper-parameter search: ranges and choices of settings, and settings drawn from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import counter_key
from holdfast.core.spec import parse_value

EXAMPLE = "lr=0.003..0.1:log, local_epochs=1..10 or method.beta=[0.5,1,2]"
_RANGE = re.compile(r"^(?P<low>[^:\[\]]+?)\.\.(?P<high>[^:\[\]]+?)(?P<log>:log)?$")


@dataclass(frozen=True)
class Interval:
    """The numbers from ``low`` to ``high``, uniform or uniform in their logarithm; whole numbers if both ends are."""

    low: float
    high: float
    log: bool = False

    def at(self, u: float) -> float | int:
        """The value at the quantile ``u`` in [0, 1)."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            # Every whole number has an interval of one unit.
            low, high = self.low - 0.5, self.high + 0.5
            value = low * (high / low) ** u if self.log else low + u * (high - low)
            return min(max(round(value), self.low), self.high)
        value = self.low * (self.high / self.low) ** u if self.log else self.low + u * (self.high - self.low)
        return float(f"{value:.4g}")  # four digits are read and written more easily than sixteen

    def describe(self) -> str:
        return f"{self.low}..{self.high}{':log' if self.log else ''}"


@dataclass(frozen=True)
class OneOf:
    """One of several values."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """The value at the quantile ``u`` in [0, 1)."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def describe(self) -> str:
        return f"[{','.join(map(str, self.values))}]"


Space = Mapping[str, Interval | OneOf]
"""Settings, as in ``--set``, and the values they may have."""


def parse_space(written: Sequence[str]) -> dict[str, Interval | OneOf]:
    """The space written as ``["lr=0.003..0.1:log", "method.beta=[0.5,1,2]"]``."""
    space: dict[str, Interval | OneOf] = {}
    for text in written:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key or not values:
            raise HoldfastError(f"'{text}' is not of the form setting=values, such as {EXAMPLE}")
        if key in space:
            raise HoldfastError(f"{key} is given twice in the space of the search")
        space[key] = _values(text, key, values)
    if not space:
        raise HoldfastError(f"a search needs at least one setting to vary, such as {EXAMPLE}")
    return space


def _values(text: str, key: str, values: str) -> Interval | OneOf:
    found = _RANGE.match(values)
    if found is None:
        choices = parse_value(values, f"'{text}'")
        if not isinstance(choices, list) or len(choices) < 2:
            raise HoldfastError(
                f"the values of {key} are '{values}'; they must be a range or a list, such as {EXAMPLE}"
            )
        return OneOf(tuple(choices))
    low, high = (parse_value(found[end].strip(), f"'{text}'") for end in ("low", "high"))
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end):
            raise HoldfastError(f"{end!r} in '{text}' is not a number; a range is written as 0.003..0.1")
    if low >= high:
        raise HoldfastError(
            f"the range of {key} begins at {low} and ends at {high}; it must begin with the smaller number"
        )
    if found["log"] and low <= 0:
        raise HoldfastError(f"the logarithmic range of {key} begins at {low}; it must begin above 0")
    return Interval(low, high, bool(found["log"]))


def draw_settings(space: Space, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different settings from the space, evenly spread: a scrambled Sobol sequence.

    Fewer if the space is a grid with fewer points. The first settings do not depend on ``count``.
    """
    from scipy.stats import qmc

    rng = np.random.default_rng(counter_key(seed, "tune"))
    sobol = qmc.Sobol(len(space), rng=rng)
    drawn: dict[tuple[str, ...], dict[str, Any]] = {}
    block = 1 << max(4, math.ceil(math.log2(count)))
    for _ in range(16):  # a block without a new point in a small grid does not mean that none is left
        for point in sobol.random(block):
            settings = {
                key: values.at(float(u)) for (key, values), u in zip(space.items(), point, strict=True)
            }
            drawn.setdefault(tuple(map(repr, settings.values())), settings)
            if len(drawn) == count:
                return list(drawn.values())
    return list(drawn.values())
