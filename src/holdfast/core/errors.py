"""Errors and warnings for the user."""

import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any


class HoldfastError(Exception):
    """An error that the user can correct. Its message is one sentence with the cause and the remedy."""


class HoldfastWarning(UserWarning):
    """A condition that does not stop the program but that the user should know of."""


def warning_printer(print_message: Callable[[str], object]) -> Callable[..., None]:
    """A ``warnings.showwarning`` that prints only the message of a `HoldfastWarning`; others are shown as before."""
    default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, HoldfastWarning):
            print_message(str(message))
        else:
            default(message, category, *args, **kwargs)

    return show


def install(extra: str) -> str:
    """The command that installs an optional dependency group."""
    return f"pip install 'holdfast-fl[{extra}]'"


def unknown(kind: str, name: object, known: Iterable[str]) -> HoldfastError:
    """The error for an unknown name, with the most similar known ones. ``name`` may be any value read from a file."""
    names = sorted(known)
    similar = get_close_matches(str(name).lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"known: {', '.join(names)}"
    return HoldfastError(f"unknown {kind} '{name}'; {hint}")
