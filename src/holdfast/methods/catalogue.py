"""Every method in a few lines: when to use it, what it costs, what leaves a client, what it has learnt.

Words stand here; numbers are measured, and kept beside this file in catalogue.json.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from holdfast.core.errors import unknown
from holdfast.methods.base import Method
from holdfast.methods.registry import METHODS

FACTS = Path(__file__).with_name("catalogue.json")

NOTHING_MORE = "no extra pass"
TEACHER = (
    "a forward pass of the global model over its samples each round, each step where inputs are augmented"
)
CLASS_MEANS = "the mean feature of each of its classes, and so which classes it holds"


@dataclass(frozen=True)
class Entry:
    """What a method's measurements do not say."""

    when: str  # to use it
    client: str = NOTHING_MORE  # what a client computes beyond FedAvg
    server: str = ""  # what the server computes beyond a mean
    leaves: str = ""  # what leaves a client besides weights, buffers and its number of samples
    run_as: tuple[str, ...] = ()  # how it was run for the measured results, where not by its name alone


CATALOGUE: dict[str, Entry] = {
    "fedavg": Entry("the baseline; enough where clients hold similar data"),
    "fedprox": Entry(
        "clients drift because they take many or unequal numbers of local steps; one number to tune"
    ),
    "fedavgm": Entry(
        "few clients take part in a round and the global model swings from round to round",
        server="a velocity of the model's size",
    ),
    "scaffold": Entry(
        "clients take part often and can keep state; label skew makes their gradients disagree",
        server="a control variate of the model's size",
        leaves="how its control variate changed, which is about its mean gradient",
        run_as=("scaffold:variant=ntd",),
    ),
    "fedntd": Entry(
        "label skew makes local training forget the classes a client lacks; nothing more may be sent or kept",
        client=TEACHER,
    ),
    "fedka": Entry(
        "clients lack classes or hold few samples of them, and one sample of each class may be shown to all",
        client="up to μ = 10 anchor samples go through the model with every batch",
        server="holds the shared set",
        leaves="one raw training sample of each class, once, from some client to all (unless `shared` is public)",
        run_as=(
            "fedka", "fedka:beta=0.01", "fedka:logits=centred,beta=0.01", "fedka:logits=centred,beta=0.1",
        ),
    ),
    "flashback": Entry(
        "the server has a small labelled public set, and label counts may be known",
        client=TEACHER,
        server="forward passes of all participants' models over the public set, then SGD on it",
        leaves="its label counts",
    ),
    "fedfa": Entry(
        "label or feature skew pulls the clients' features apart; next to nothing more may be sent",
        client="no extra pass; after each step a step of the classifier on one anchor a class",
        leaves="how far its training moved the anchors of its classes, and so which classes it holds",
    ),
    "fedmlp": Entry(
        "a stream: tasks arrive one after another at every client; a personal classifier is wanted",
        client="a forward pass over its samples each round, for prototypes",
        server="clusters at most one prototype a class",
        leaves=CLASS_MEANS,
        run_as=("fedmlp", "fedmlp:head=shared"),
    ),
    "fednova": Entry(
        "clients take very different numbers of local steps",
        leaves="how far its steps would lead, and so how many they are",
    ),
    "moon": Entry(
        "image features drift apart, clients take part often and can keep a model",
        client="forward passes of two models over its samples each round, each step where inputs are augmented",
    ),
    "feddyn": Entry(
        "clients can keep state, and accuracy in few rounds matters more than stability over very many",
        server="a linear term of the model's size",
    ),
    "fedcurv": Entry(
        "weights that matter to others should be protected, and bandwidth is plentiful",
        client="a forward and a backward pass for each of its samples by itself each round",
        server="two sums of the model's size",
        leaves="how its diagonal Fisher information changed, one number a weight",
    ),
    "feddf": Entry(
        "the server has unlabelled public data like the clients'",
        server="forward passes of all participants' models over the public set, then epochs of Adam on it",
    ),
    "fedproc": Entry(
        "features should be learnt before the classifier; label counts may be known",
        client="a forward pass over its samples each round, for prototypes",
        leaves="the sum of each class's features, and its label counts",
    ),
    "fedreg": Entry(
        "forgetting is to be fought with nothing sent or kept, and clients have time",
        client="20 forward and backward passes over its samples each round make generated ones; "
        "a step takes three gradients",
    ),
    "fedrep": Entry("every client has its own few classes and needs a model only for them"),
    "fedproto": Entry(
        "weights must not travel, or models are personal; there is hardly a global model",
        leaves=CLASS_MEANS,
    ),
    "creff": Entry(
        "the classes are long-tailed over the whole federation",
        client="a forward pass over its samples each round",
        server="100 steps on synthetic features, then 300 epochs of the classifier on them",
        leaves="the classifier's gradient for each of its classes, and which classes they are",
    ),
    "ccvr": Entry(
        "the classifier is what skew has spoilt: a last touch on top of any method, `fedfa+ccvr`",
        client="no extra pass in a round; one forward pass after the last",
        server="after the last round, epochs of the classifier on features drawn from each class's Gaussian",
        leaves="after the last round the number, sum and second moment of each class's features",
        run_as=("fedavg+ccvr",),
    ),
    "fedala": Entry(
        "every client wants its own model, close to the global one",
        client="a pass over 80 % of its samples each round, backward through the mixed layers; "
        "11 to 100 the first time",
    ),
    "fedfomo": Entry(
        "a few clients resemble each other and may see each other's models",
        client="six forward passes over the held-out fifth of its samples each round",
        server="keeps every client's last model",
        leaves="how much each received model helped it; and its model goes to other clients",
    ),
    "fedpac": Entry(
        "every client wants its own model, and label counts may be known",
        client="two forward passes over its samples each round",
        server="a small quadratic programme for each participant; keeps every client's classifier",
        leaves="each class's feature sums and counts, their spread; and its classifier is mixed into others'",
    ),
    "fedrod": Entry(
        "one good global model and a personal one are wanted from the same training",
        client="no extra pass; after each step a step of the personal classifier",
    ),
}  # fmt: skip


def describe(name: str) -> dict[str, Any]:
    """A method as plain values: its docstring and hyper-parameters, costs, privacy and measured results."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    kind, entry, facts = METHODS[name], CATALOGUE[name], json.loads(FACTS.read_text(encoding="utf-8"))
    about = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
    return {
        "name": name,
        "summary": about.split("\n")[0],
        "about": about,
        "when": entry.when,
        "needs_public": kind().needs_public,
        "parameters": _parameters(kind),
        "costs": {"client": entry.client, "server": entry.server} | facts["costs"][name],
        "privacy": {"leaves": entry.leaves, "seen_alone": kind().keeps_uploads},
        "results": facts["results"][name],
    }


def _parameters(kind: type[Method]) -> list[dict[str, Any]]:
    # What a hyper-parameter means stands beside it in the source, where whoever reads the method wants it.
    comments = dict(re.findall(r"^    (\w+):[^\n#]*=[^\n#]*# ?(.*)$", inspect.getsource(kind), re.MULTILINE))
    hints = get_type_hints(kind)
    choices = {
        key: " or ".join((", ".join(get_args(hint)[:-1]), get_args(hint)[-1]))
        for key, hint in hints.items()
        if get_origin(hint) is Literal
    }
    return [
        {"name": f.name, "default": f.default, "about": comments.get(f.name) or choices.get(f.name, "")}
        for f in fields(kind)
    ]


def costs_in_words(described: dict[str, Any]) -> dict[str, str]:
    """What a method costs and tells, line by line, for people."""
    costs, privacy = described["costs"], described["privacy"]
    model = costs["model"]
    per_model = {
        part: f"{costs[part] / model:.2f} × the model ({_size(costs[part])})" for part in ("up", "down")
    }
    if costs["up_at_the_end"]:
        per_model["up"] += f", and {_size(costs['up_at_the_end'])} after the last round"
    work = f"{costs['work']:.2f} × FedAvg's"
    if costs["work_augmented"] != costs["work"]:
        work += f", {costs['work_augmented']:.2f} × where inputs are augmented"
    return {
        "client's work": f"{work}: {costs['client']}",
        "up, each client and round": per_model["up"],
        "down": per_model["down"],
        "client keeps": _size(costs["state"]) if costs["state"] else "nothing",
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
    row = {
        "method": described["name"],
        "work": f"{costs['work']:.2f}",
        "aug.": f"{costs['work_augmented']:.2f}",
        "up": f"{costs['up'] / costs['model']:.2f}",
        "down": f"{costs['down'] / costs['model']:.2f}",
        "keeps": f"{costs['state'] / costs['model']:.2f}" if costs["state"] else "–",
        "public": "yes" if described["needs_public"] else "no",
        "alone": "yes" if described["privacy"]["seen_alone"] else "no",
    }
    for data, column in (("digits", "digits"), ("fashion-mnist", "fashion")):
        found = [r for r in described["results"] if r["data"] == data and r["split"] == "Dirichlet 0.1"]
        row[column] = f"{found[0]['accuracy']:.1f}/{found[0]['forgetting']:.1f}" if found else "–"
    return row


def _size(number: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"
