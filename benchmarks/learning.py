"""Accuracy and forgetting of every method on two data sets and two partitions.

    python benchmarks/learning.py [--data digits fashion-mnist] [--seeds 3] [--workers 2] [--device auto]

Each result is stored in results/learning.json as soon as it is available, and is not run again for the same
settings. ``--page`` writes docs/learning.md from the results and from learning_notes.md. All methods of a seed share
the federation, the initial weights, the sampled clients and the batches.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from sweeping import sweep

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "learning.json"
PAGE = ROOT / "docs" / "learning.md"
NOTES = Path(__file__).with_name("learning_notes.md")

DATA = {
    "digits": {
        "clients": 20,
        "clients_per_round": 5,
        "model": "cnn",
        "rounds": 30,
        "local_epochs": 5,
        "batch_size": 32,
        "lr": 0.1,
        "momentum": 0.0,
    },
    "fashion-mnist": {
        "clients": 100,
        "clients_per_round": 10,
        "model": "fa-fmnist",
        "rounds": 40,
        "local_epochs": 5,
        "batch_size": 50,
        "lr": 0.01,
        "momentum": 0.9,
    },
}
SPLITS = {"Dirichlet 0.1": "dirichlet:0.1", "2 classes a client": "class-shards:2"}
PUBLIC = 0.025
RECENT = 10  # last rounds over which accuracy and forgetting are averaged
BASELINES = [
    "fedavg", "fedprox", "fedavgm", "scaffold:variant=ntd", "fednova", "fedcurv", "moon", "feddyn", "fedproc",
    "feddf", "fedreg", "fedrep", "fedproto", "creff", "fedavg+ccvr", "fedala", "fedrod", "fedfomo", "fedpac",
]  # fmt: skip
FIVE = [
    "fedntd", "fedka", "fedka:discard=dominant", "fedka:discard=dominant,beta=0.01",
    "fedka:discard=dominant,logits=centred,beta=0.01", "fedka:discard=dominant,logits=centred,beta=0.1",
    "flashback", "fedfa", "fedmlp", "fedmlp:head=shared",
]  # fmt: skip
STACKS = ["fedntd+fedfa", "fedfa+ccvr"]


def words(data: str) -> str:
    """The settings of a data set as text, which is stored with each result."""
    return ", ".join(f"{name} {value}" for name, value in DATA[data].items()) + f", public {PUBLIC:.1%}"


def run(data: str, setting: str, split: str, method: str, seed: int, device: str) -> dict:
    """Train once and return the numbers of the table."""
    import torch

    torch.set_num_threads(1)
    import holdfast as hf
    from holdfast.data.partitions import parse_partition
    from holdfast.methods import parse_method
    from holdfast.models import parse_model

    settings = dict(DATA[data])
    clients, model = settings.pop("clients"), parse_model(settings.pop("model"))
    federation = hf.federate(
        hf.load(data), parse_partition(SPLITS[split]), clients=clients, seed=seed, public=PUBLIC
    )
    start = time.perf_counter()
    trained = hf.train(
        parse_method(method), model, federation, seed=seed, device=device, evaluate_locals=False, **settings
    )
    rounds = len(trained.records)
    recent = 1 if "ccvr" in method else RECENT  # CCVR changes the model after the last round only
    ends = range(rounds - recent + 1, rounds + 1)
    forgetting = [hf.metrics.backward_transfer_forgetting(trained.class_accuracy[:end]) for end in ends]
    return {
        "final": trained.accuracy,
        "accuracy": float(np.mean([r["accuracy"] for r in trained.records[-recent:]])),
        "forgetting": float(np.mean(forgetting)),
        "curve": [round(float(r["accuracy"]), 4) for r in trained.records],
        "seconds": round(time.perf_counter() - start, 1),
        "device": device,
    }


def page() -> None:
    """Write docs/learning.md: the notes and a table for each data set and partition."""
    from holdfast.metrics.summary import format_mean, mean_and_deviation

    rows = [r for r in json.loads(RESULTS.read_text()) if r["setting"] == words(r["data"])]
    lines = NOTES.read_text().splitlines()
    for data in DATA:
        for split in SPLITS:
            selected = [r for r in rows if r["data"] == data and r["split"] == split]
            if not selected:
                continue
            lines += ["", f"## {data}, {split}", "", f"{words(data)}.", ""]
            lines += ["| method | accuracy | forgetting | final | seeds |", "|---|---|---|---|---|"]
            table = []
            for method in dict.fromkeys(r["method"] for r in selected):
                runs = [r for r in selected if r["method"] == method]
                completed = [r for r in runs if "accuracy" in r]
                if not completed:
                    table.append((-1.0, f"| {method} | failed: {runs[0]['error']} | | | |"))
                    continue
                accuracy, forgetting, final = (
                    100 * np.array([r[key] for r in completed]) for key in ("accuracy", "forgetting", "final")
                )
                bold = "**" if set(method.split("+")) & set(FIVE) else ""
                numbers = [
                    format_mean(*mean_and_deviation(values), 1) for values in (accuracy, forgetting, final)
                ]
                failed = f", {len(runs) - len(completed)} failed" if len(runs) > len(completed) else ""
                cells = [f"{bold}{method}{bold}", *numbers, f"{len(completed)}{failed}"]
                table.append((float(accuracy.mean()), f"| {' | '.join(cells)} |"))
            lines += [line for _, line in sorted(table, key=lambda entry: -entry[0])]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--methods", nargs="+", default=BASELINES + FIVE + STACKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--page", action="store_true", help="only write docs/learning.md")
    arguments = parser.parse_args()
    if not arguments.page:
        cells = [
            (data, words(data), split, method, seed)
            for data in arguments.data
            for seed in range(arguments.seeds)
            for split in SPLITS
            for method in arguments.methods
        ]
        sweep(
            RESULTS, ("data", "setting", "split", "method", "seed"), cells, run, device=arguments.device,
            workers=arguments.workers, limit=arguments.limit,
        )  # fmt: skip
    page()


if __name__ == "__main__":
    main()
