"""Measures every method's costs and collects its accuracy, for `holdfast methods` and docs/methods.md.

    python benchmarks/catalogue.py [--missing | --results]

Costs are measured in the third round of a small federation; ``--missing`` measures them only for methods that have
none yet. Accuracy and forgetting are means of the runs in results/learning.json; ``--results`` updates only these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import learning
from holdfast.core.trees import size_in_bytes
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.data.preprocess import Preprocess
from holdfast.data.schedules import EveryN
from holdfast.engine.base import NO_OVERLAP, Engine, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, Incident, Job
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods import METHODS, TARGET, CReFF, Method
from holdfast.methods.catalogue import MEASUREMENTS, costs_in_words, describe, overview
from work import prepare

ROOT = Path(__file__).resolve().parent.parent
RUN_AS = {
    "scaffold": ("scaffold:variant=ntd",),
    "fedka": (
        "fedka",
        "fedka:discard=dominant",
        "fedka:discard=dominant,beta=0.01",
        "fedka:discard=dominant,logits=centred,beta=0.01",
        "fedka:discard=dominant,logits=centred,beta=0.1",
    ),
    "fedmlp": ("fedmlp", "fedmlp:head=shared"),
    "ccvr": ("fedavg+ccvr",),
}
"""The method texts of the measured results, for methods that were not run with their defaults."""

CLIENTS, ROUND = 6, 3  # in round 3 every method sends all it ever sends; 6 clients, as FedFomo sends 5 models


def measured_method(name: str) -> Method:
    """The method with default hyper-parameters, but without the steps of CReFF and TARGET on the server, which take
    long."""
    quick = {"creff": CReFF(epochs=1), "target": TARGET(generator_steps=1, student_steps=0)}
    return quick.get(name) or METHODS[name]()


def stages_of(method: Method) -> int:
    """The stages of the federation: two for TARGET, which is FedAvg without a stream; round 3 begins the second."""
    return 2 if method.name == "target" else 1


def federation(shape: tuple[int, ...], each: int, augment: bool = False, stages: int = 1) -> Federation:
    """Clients with ``each`` samples of eight of ten classes at each stage, and 20 public samples."""
    rng = np.random.default_rng(0)
    samples = CLIENTS * stages * each + 20
    labels = (np.arange(samples) % 8 + np.arange(samples) // each) % 10
    x = rng.integers(0, 256, (samples, *shape), dtype=np.uint8)
    data = Dataset.from_arrays(x, labels, x[:10], labels[:10], preprocess=Preprocess(flip=augment))
    parts = np.split(np.arange(samples - 20), CLIENTS)
    whole = federate(data, parts, public=np.arange(samples - 20, samples))
    if stages == 1:
        return whole
    offsets = each * np.arange(CLIENTS * stages + 1)
    return replace(whole, offsets=offsets, stages=stages, schedule=EveryN(ROUND - 1, stages))


def first_rounds(
    method: Method, model: str, data: Federation, local_epochs: int, batch_size: int
) -> tuple[RoundLoop, StateCache]:
    """A run before its first round, and the states of its clients."""
    training = prepare(
        method, model, data, engine="sequential", rounds=10, evaluate_every=10, local_epochs=local_epochs,
        batch_size=batch_size, momentum=0.9,
    )  # fmt: skip
    states = StateCache(None, None)
    return training.loop(states), states


def traffic(method: Method) -> dict[str, Any]:
    """Bytes of one client in one round of ntd-cifar, which has 2.2 million parameters."""
    loop, states = first_rounds(
        method,
        "ntd-cifar",
        federation((3, 32, 32), each=8, stages=stages_of(method)),
        local_epochs=2,
        batch_size=8,
    )
    watched = loop.engine = Watched(loop.engine)
    for number in range(1, ROUND + 1):
        record = loop.round(number)
    server, kept = loop.server, dict(states.get(0) or {})
    if stages_of(method) > 1:
        kept.pop("head")  # with which the client's model is tested in every stream, whatever the method
    final_statistics = loop.runner.final_statistics(
        Job(0, loop.federation.client(0)), Broadcast(ROUND, server.params, server.buffers, {})
    )
    return {
        "model": size_in_bytes({**server.params, **server.buffers}),
        "up": record["bytes_up"] // CLIENTS,
        "down": record["bytes_down"] // CLIENTS,
        "state": size_in_bytes(kept),
        "server_state": size_in_bytes(server.state),
        "up_at_the_end": size_in_bytes(final_statistics),
        "sends": sorted(watched.sends),
        "surveyed": sorted(final_statistics),
    }


def work(method: Method, augment: bool) -> dict[str, float]:
    """Multiplications and additions of the clients and of the server in one round."""
    data = federation((1, 8, 8), each=100, augment=augment, stages=stages_of(method))
    loop, _ = first_rounds(method, "mlp", data, local_epochs=5, batch_size=50)
    for number in range(1, ROUND):
        loop.round(number)
    with Operations() as counter:
        watched = loop.engine = Watched(loop.engine, counter)
        loop.round(ROUND)
    return {"clients": watched.operations, "server": counter.total - watched.operations}


class Operations(TorchDispatchMode):
    """Counts the operations of matrix products; torch's FlopCounterMode fails on gradients of inputs."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = flop_registry.get(func._overloadpacket)
        if rule is not None:
            self.total += rule(*args, **(kwargs or {}), out_val=out)
        return out


class Watched:
    """An engine that also records the operations and the uploads of its clients."""

    def __init__(self, engine: Engine, counter: Operations | None = None) -> None:
        self.engine, self.counter = engine, counter
        self.name, self.group = engine.name, engine.group
        self.operations = 0
        self.sends: set[str] = set()

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult | Incident]:
        results = self.engine.train(sent, jobs, overlap)
        for _ in jobs:
            before = self._count()
            result = next(results)
            self.operations += self._count() - before
            self.sends |= set(result.sums) if isinstance(result, ClientResult) else set()
            yield result

    def _count(self) -> int:
        return 0 if self.counter is None else self.counter.total


def costs(names: Iterable[str]) -> dict[str, Any]:
    """The costs of these methods, with work as a multiple of FedAvg's."""
    costs: dict[str, Any] = {}
    base = {augment: work(METHODS["fedavg"](), augment)["clients"] for augment in (False, True)}
    for name in names:
        method = measured_method(name)
        plain, augmented = (work(method, augment) for augment in (False, True))
        costs[name] = traffic(method) | {
            "work": round(plain["clients"] / base[False], 3),
            "work_augmented": round(augmented["clients"] / base[True], 3),
            "server_works": plain["server"] > 0,
        }
        print(name, costs[name], flush=True)
    return costs


def results(name: str) -> list[dict[str, Any]]:
    """Mean accuracy and forgetting of a method in each setting of results/learning.json, in percent."""
    rows = [r for r in json.loads(learning.RESULTS.read_text()) if "accuracy" in r]
    rows = [r for r in rows if r["setting"] == learning.words(r["data"])]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"] in RUN_AS.get(name, (name,)):
            groups.setdefault((row["data"], row["split"], row["method"]), []).append(row)
    return [
        {
            "data": data, "split": split, "method": method, "seeds": len(group),
            "accuracy": round(100 * fmean(r["accuracy"] for r in group), 1),
            "forgetting": round(100 * fmean(r["forgetting"] for r in group), 1),
        }
        for (data, split, method), group in sorted(groups.items())
    ]  # fmt: skip


HEAD = """# Methods

For every method this page lists when to use it, its costs, what leaves a client, and its measured accuracy.
`holdfast methods` prints the table, `holdfast methods fedka` one method. A plus sign combines methods: `fedntd+fedfa`,
`fedfa+ccvr`. [Choose a method](howto/choose-method.md) is a shorter guide.

Some methods are parts of combinations: `ema` (a mean over the rounds is tested and becomes the final model), `balanced`
and `fedlc` (the local loss), `fedavgm` (the server's step) and `ccvr` (a calibration at the end), as in
`balanced:tau=0.5+fedavgm+ema+ccvr`. At most one part of a stack may replace the local loss, the server's step or the
point at which gradients are computed (`fedsam` and those like it); `holdfast run` refuses other combinations and names
the two parts. Server optimisers other than `fedavgm` have a separate learning rate, which must be tuned.

- **work**: a client's matrix products in a round as a multiple of FedAvg's (5 epochs of 100 samples in batches of 50,
  an MLP, ten classes; sums over weights, such as FedProx's term, are not counted);
  **aug.**: the same with augmented inputs, for which a teacher's outputs cannot be cached.
- **up**, **down**, **keeps**: what a client sends and receives in a round and keeps between rounds, as multiples of
  the model (`ntd-cifar`: 2.2 million parameters, 8.63 MB, features of width 512, ten classes).
- **public**: whether the server needs public data. **alone**: whether the server needs each client's upload
  individually; otherwise sums are sufficient, which secure aggregation can provide. *Leaves a client* lists what a
  client sends in addition to its weights, its buffers and its number of samples.
- **digits**, **fashion**(-mnist): accuracy/forgetting in percent with Dirichlet 0.1, defaults, means over the last
  ten rounds and the seeds run (scaffold with `variant=ntd`, ccvr on fedavg and after the last round). Their number
  and the other settings are listed with each method, deviations in [Accuracy and forgetting](learning.md).

All numbers are measured, by `python benchmarks/catalogue.py`, which writes this page.
"""


def markdown() -> str:
    """The text of docs/methods.md."""
    pages = [describe(name) for name in METHODS]
    numbers = [overview(page) for page in pages]
    links = [row | {"method": f"[{row['method']}](#{row['method']})"} for row in numbers]
    lines = [HEAD, *_table(list(numbers[0]), [list(row.values()) for row in links])]
    for page in pages:
        lines += ["", f"## {page['name']}", "", f"**When to use it:** {page['when']}.", ""]
        lines += ["```text", page["about"], "```", ""]
        if page["parameters"]:
            parameters = [[f"`{p['name']}`", f"`{p['default']}`", p["about"]] for p in page["parameters"]]
            lines += [*_table(["hyper-parameter", "default", "meaning"], parameters), ""]
        lines += [*_table(["cost", ""], [list(line) for line in costs_in_words(page).items()]), ""]
        keys = ["method", "data", "split", "accuracy", "forgetting", "seeds"]
        rows = [[str(r[key]) for key in keys] for r in page["results"]]
        lines += _table(["run as", *keys[1:]], rows) if rows else ["Accuracy is not measured."]
    return "\n".join(lines) + "\n"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--missing", action="store_true", help="measure methods without measured costs only")
    only.add_argument("--results", action="store_true", help="update results only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(MEASUREMENTS.read_text())["costs"] if arguments.missing or arguments.results else {}
    measured = costs(name for name in METHODS if name not in known and not arguments.results)
    facts = {name: (known | measured)[name] for name in METHODS if name in known | measured}
    written = {"costs": facts, "results": {name: results(name) for name in METHODS}}
    MEASUREMENTS.write_text(json.dumps(written, indent=1) + "\n")
    (ROOT / "docs/methods.md").write_text(markdown())


if __name__ == "__main__":
    main()
