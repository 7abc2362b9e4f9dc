"""Methods in a few lines each: when to use one, what it costs, what leaves a client, what it has reached.

Words come from the method's class (`Method.card`), numbers from measurements.json, as far as they were measured.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.core.spec import choices, either, field_hints
from holdfast.methods.base import Method
from holdfast.methods.registry import method_class

MEASUREMENTS = Path(__file__).with_name("measurements.json")
NOT_MEASURED = "not measured"


@cache
def _measurements() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
    return measured


def describe(name: str) -> dict[str, Any]:
    """A method, also one of the user's own, as plain values: docstring, hyper-parameters, costs, privacy, results."""
    kind = method_class(name)
    written = (
        "" if str(kind.__doc__).startswith(f"{kind.__name__}(") else kind.__doc__ or ""
    )  # not by dataclass
    about = inspect.cleandoc(written).replace("``", "`")
    default = kind if any(field.default is MISSING for field in fields(kind)) else kind()
    return {
        "name": name,
        "summary": about.split("\n")[0],
        "about": about,
        "when": kind.card.when,
        "needs_public": default.needs_public,
        "parameters": _parameters(kind),
        "costs": {
            "client": kind.card.client,
            "server": kind.card.server,
            **_measurements()["costs"].get(name, {}),
        },
        "privacy": {"leaves": kind.card.uploads, "seen_alone": default.keeps_uploads},
        "results": _measurements()["results"].get(name, []),
    }


def _parameters(kind: type[Method]) -> list[dict[str, Any]]:
    # The comment beside a field explains it.
    classes = [parent for parent in reversed(kind.__mro__) if issubclass(parent, Method)]
    source = "".join(map(inspect.getsource, classes))
    comments = dict(re.findall(r"^    (\w+):[^\n#]*=[^\n#]*# ?(.*)$", source, re.MULTILINE))
    hints = field_hints(kind)
    return [
        {
            "name": f.name,
            "default": "" if f.default is MISSING else f.default,
            "about": comments.get(f.name) or _choices(hints[f.name]),
        }
        for f in fields(kind)
    ]


def _choices(hint: Any) -> str:
    words = choices(hint)
    return either(words) if words else ""


def costs_in_words(described: dict[str, Any]) -> dict[str, str]:
    """A method's costs and what it reveals, one line each."""
    costs, privacy = described["costs"], described["privacy"]
    work = up = down = state = NOT_MEASURED
    if "model" in costs:
        work = f"{costs['work']:.2f} × FedAvg's"
        if costs["work_augmented"] != costs["work"]:
            work += f", {costs['work_augmented']:.2f} × where inputs are augmented"
        up, down = (
            f"{costs[way] / costs['model']:.2f} × the model ({_size(costs[way])})" for way in ("up", "down")
        )
        if costs["up_at_the_end"]:
            up += f", and {_size(costs['up_at_the_end'])} after the last round"
        state = _size(costs["state"]) if costs["state"] else "nothing"
    return {
        "client's work": f"{work}: {costs['client']}",
        "up, each client and round": up,
        "down": down,
        "client keeps": state,
        "server": costs["server"] or "the mean alone",
        "public data": "needed on the server" if described["needs_public"] else "not needed",
        "leaves a client besides": privacy["leaves"] or "nothing",
        "server sees": "every client's upload by itself"
        if privacy["seen_alone"]
        else "sums over clients only",
    }


def overview(described: dict[str, Any]) -> dict[str, str]:
    """A method's numbers in a row: costs as multiples of FedAvg's or of the model, results in percent."""
    costs = described["costs"]
    row = {"method": described["name"], **dict.fromkeys(("work", "aug.", "up", "down", "keeps"), "–")}
    if "model" in costs:
        row |= {
            "work": f"{costs['work']:.2f}",
            "aug.": f"{costs['work_augmented']:.2f}",
            "up": f"{costs['up'] / costs['model']:.2f}",
            "down": f"{costs['down'] / costs['model']:.2f}",
            "keeps": f"{costs['state'] / costs['model']:.2f}" if costs["state"] else "–",
        }
    row["public"] = "yes" if described["needs_public"] else "no"
    row["alone"] = "yes" if described["privacy"]["seen_alone"] else "no"
    for data, column in (("digits", "digits"), ("fashion-mnist", "fashion")):
        found = [r for r in described["results"] if r["data"] == data and r["split"] == "Dirichlet 0.1"]
        row[column] = f"{found[0]['accuracy']:.1f}/{found[0]['forgetting']:.1f}" if found else "–"
    return row


def _size(number: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"
