"""Methods by name, for the command line and for experiment files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from holdfast.core.errors import HoldfastError, unknown
from holdfast.methods.base import Method
from holdfast.methods.ccvr import CCVR
from holdfast.methods.creff import CReFF
from holdfast.methods.fedala import FedALA
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedavgm import FedAvgM
from holdfast.methods.fedcurv import FedCurv
from holdfast.methods.feddf import FedDF
from holdfast.methods.feddyn import FedDyn
from holdfast.methods.fedfa import FedFA
from holdfast.methods.fedfomo import FedFomo
from holdfast.methods.fedka import FedKA
from holdfast.methods.fedmlp import FedMLP
from holdfast.methods.fednova import FedNova
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.fedpac import FedPAC
from holdfast.methods.fedproc import FedProc
from holdfast.methods.fedproto import FedProto
from holdfast.methods.fedprox import FedProx
from holdfast.methods.fedreg import FedReg
from holdfast.methods.fedrep import FedRep
from holdfast.methods.fedrod import FedRoD
from holdfast.methods.flashback import Flashback
from holdfast.methods.moon import Moon
from holdfast.methods.scaffold import Scaffold
from holdfast.methods.stack import Stack

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        FedAvg,
        FedProx,
        FedAvgM,
        Scaffold,
        FedNTD,
        FedKA,
        Flashback,
        FedFA,
        FedMLP,
        FedNova,
        Moon,
        FedDyn,
        FedCurv,
        FedDF,
        FedProc,
        FedReg,
        FedRep,
        FedProto,
        CReFF,
        CCVR,
        FedALA,
        FedFomo,
        FedPAC,
        FedRoD,
    )
}
"""Every method by its name."""

BETWEEN_OPTIONS = re.compile(r",(?![^\[]*\])")  # a comma, but not one inside of a list


def parse_method(text: str) -> Method:
    """``fedntd``, ``fedntd:beta=0.5,tau=2``, ``fedka:shared=[4,17]`` or a stack, ``fedntd+fedprox:mu=0.1``."""
    parts = []
    for part in text.split("+"):
        name, _, options = part.strip().partition(":")
        given: dict[str, Any] = {"name": name}
        for option in filter(None, BETWEEN_OPTIONS.split(options)):
            key, equals, value = option.partition("=")
            if not equals:
                raise HoldfastError(f"'{option}' in method '{part}' is not of the form option=value")
            given[key.strip()] = _value(value.strip(), part)
        parts.append(method_from(given))
    return parts[0] if len(parts) == 1 else Stack(*parts)


def is_known(method: Method) -> bool:
    """Whether a file can name this method: it, or each of a stack, is one of ours."""
    parts = method.parts if isinstance(method, Stack) else (method,)
    return all(type(part) in METHODS.values() for part in parts)


def method_from(description: Mapping[str, Any]) -> Method:
    """The method that ``Method.describe`` described, or one written in an experiment file."""
    name = str(description.get("name", ""))
    if "+" in name:
        parts = [method_from({"name": part, **description.get(part, {})}) for part in name.split("+")]
        return Stack(*parts)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    kind = METHODS[name]
    known = {f.name: f for f in fields(kind)}
    options = {key: value for key, value in description.items() if key != "name"}
    for key in options:
        if key not in known:
            raise (
                unknown(f"option of {name}", key, known) if known else HoldfastError(f"{name} has no options")
            )
    return kind(**{key: _converted(name, key, value, known[key].default) for key, value in options.items()})


def _converted(method: str, key: str, value: Any, default: Any) -> Any:
    """A written value in the type of the option's default."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise HoldfastError(f"{method}: {key} is {value!r}; it must be true or false")
        return value
    if isinstance(default, (int, float)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise HoldfastError(f"{method}: {key} is {value!r}; it must be a number")
        return float(value) if isinstance(default, float) else value
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise HoldfastError(
                f"{method}: {key} is {value!r}; it must be a list of whole numbers, as [4,17]"
            )
        return tuple(value)
    return value


def _value(text: str, method: str) -> Any:
    """A value as YAML reads it: number, true/false, list or text; but ``off`` is a word here, not false."""
    import yaml

    try:
        return text if text in ("on", "off") else yaml.safe_load(text)
    except yaml.YAMLError:
        raise HoldfastError(f"'{text}' in method '{method}' is no number, list or word") from None
