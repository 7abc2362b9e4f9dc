"""User-defined data: functions that return a data set or a federation, and objects of these types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any

from holdfast.core import own
from holdfast.core.errors import HoldfastError
from holdfast.core.spec import named
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation


@dataclass(frozen=True)
class OwnData:
    """A data set or a federation, or a function that returns one.

    A function is called with ``options``, and with the partition's ``seed`` if it has an argument of this name.
    ``code`` is its source, if that is known.
    """

    made: Dataset | Federation | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    code: own.Code | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.made, (Dataset, Federation)):
            own.accepted(self.made, self.name, ("seed",), self.options)
        elif self.options:
            raise HoldfastError(
                f"{self.name} is an object, which has no options; name a function that returns one"
            )

    @property
    def name(self) -> str:
        if self.code is not None:
            return self.code.name
        if isinstance(self.made, (Dataset, Federation)):
            return (self.made.dataset if isinstance(self.made, Federation) else self.made).name
        return str(getattr(self.made, "__qualname__", type(self.made).__name__))

    @property
    def is_fixed(self) -> bool:
        """Whether the data is the same for every seed."""
        return isinstance(self.made, (Dataset, Federation)) or not own.accepted(
            self.made, self.name, ("seed",), self.options
        )

    def load(self, seed: int) -> Dataset | Federation:
        """The data set or the federation; a function may return a different one for each seed."""
        if isinstance(self.made, (Dataset, Federation)):
            return self.made
        arguments = {} if self.is_fixed else {"seed": seed}
        made = own.call(self.made, self.name, arguments | dict(self.options))
        if not isinstance(made, (Dataset, Federation)):
            raise HoldfastError(
                f"{self.name} returns {named(made)}; it must return a holdfast.Dataset or a holdfast.Federation"
            )
        return made

    def describe(self) -> dict[str, Any]:
        """The reference and the options as plain values; ``own`` if there is no reference."""
        where = {"name": self.name, "own": True} if self.code is None else self.code.describe()
        return where | dict(self.options)


def own_data(description: Mapping[str, Any]) -> OwnData | None:
    """The data that a reference names; None if the name is not a reference."""
    code = own.find(description, "data set")
    if code is None:
        return None
    if not (isfunction(code.value) or isinstance(code.value, (Dataset, Federation))):
        raise HoldfastError(
            f"{code.name} is {named(code.value)}; it must be a function that returns a holdfast.Dataset or a "
            "holdfast.Federation, or such an object"
        )
    options = {key: value for key, value in description.items() if key not in ("name", *own.RECORDED)}
    return OwnData(code.value, options, code)
