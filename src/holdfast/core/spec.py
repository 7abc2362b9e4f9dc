"""Whether a value is of the kind that it must be, in one sentence where it is not."""

from __future__ import annotations

import math
from numbers import Integral, Real
from types import FunctionType, NoneType
from typing import Any, get_args

from holdfast.core.errors import HoldfastError


def as_number(name: str, value: Any, hint: Any) -> Any:
    """The value of a setting that is a number, or true or false, or one sentence on what it must be."""
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    truth = isinstance(value, bool)
    if bool in kinds and truth:
        return value
    if int in kinds and isinstance(value, Integral) and not truth:
        return int(value)
    if float in kinds and isinstance(value, Real) and not truth and math.isfinite(value):
        return float(value)
    wanted = "true or false" if bool in kinds else "a whole number" if int in kinds else "a number"
    raise HoldfastError(f"{name} is {value!r}; it must be {wanted}")


def named(value: object) -> str:
    """What a value is, for a sentence: ``a Dataset``, ``the class FedAvg``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return (
        f"the function {value.__name__}" if isinstance(value, FunctionType) else f"a {type(value).__name__}"
    )
