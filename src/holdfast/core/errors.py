"""The one kind of error, and of warning, a user is meant to read."""

import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any


class HoldfastError(Exception):
    """Something the user can put right: one sentence that names what is wrong and what would be right."""


class HoldfastWarning(UserWarning):
    """Something that goes on, but that the user should know of."""


def warning_printer(tell: Callable[[str], object]) -> Callable[..., None]:
    """For ``warnings.showwarning``: our own are told as one sentence, others are shown as they are until now."""
    otherwise = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, HoldfastWarning):
            tell(str(message))
        else:
            otherwise(message, category, *where, **more)

    return show


def install(extra: str) -> str:
    """The command that adds an optional part to an installed Holdfast."""
    return f"pip install 'holdfast-fl[{extra}]'"


def unknown(kind: str, name: object, known: Iterable[str]) -> HoldfastError:
    """The error for a name that does not exist, with the nearest names that do; a file may hold anything."""
    names = sorted(known)
    near = get_close_matches(str(name).lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return HoldfastError(f"unknown {kind} '{name}'; {hint}")
