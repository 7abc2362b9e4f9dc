"""How well every method learns and how much it forgets: accuracy and forgetting on two data sets and two splits.

    python benchmarks/learning.py [--data digits fashion-mnist] [--seeds 3] [--workers 2] [--device auto]

Results go to results/learning.json as they come (what is there is not run again); ``--page`` writes
docs/learning.md from them. All methods of one seed share federation, weights, clients and batches.
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

DATA = {
    "digits": {
        "clients": 20, "sample": 5, "model": "mlp:64", "rounds": 40, "epochs": 5, "batch_size": 32,
        "lr": 0.05, "momentum": 0.9,
    },
    "fashion-mnist": {
        "clients": 100, "sample": 10, "model": "fa-fmnist", "rounds": 40, "epochs": 5, "batch_size": 50,
        "lr": 0.01, "momentum": 0.9,
    },
}  # fmt: skip
SPLITS = {"Dirichlet 0.1": "dirichlet:0.1", "2 classes a client": "class-shards:2"}
PUBLIC = 0.025
BASELINES = [
    "fedavg", "fedprox", "fedavgm", "scaffold:variant=ntd", "fednova", "fedcurv", "moon", "feddyn", "fedproc",
    "feddf", "fedreg", "fedrep", "fedproto", "creff", "fedavg+ccvr", "fedala", "fedrod", "fedfomo", "fedpac",
]  # fmt: skip
FIVE = ["fedntd", "fedka", "flashback", "fedfa", "fedmlp", "fedmlp:head=shared"]
STACKS = ["fedntd+fedfa", "fedfa+ccvr"]


def run(data: str, split: str, method: str, seed: int, device: str) -> dict:
    """Train once and return what the table needs."""
    import torch

    torch.set_num_threads(1)
    import holdfast as hf
    from holdfast.data.partitions import parse_partition
    from holdfast.methods import parse_method
    from holdfast.models import parse_model

    setting = dict(DATA[data])
    clients, model = setting.pop("clients"), parse_model(setting.pop("model"))
    federation = hf.federate(
        hf.load(data), parse_partition(SPLITS[split]), clients=clients, seed=seed, public=PUBLIC
    )
    began = time.perf_counter()
    outcome = hf.train(
        parse_method(method), model, federation, seed=seed, device=device, evaluate_locals=False, **setting
    )
    return {
        "accuracy": outcome.accuracy,
        "forgetting": outcome.forgetting,
        "curve": [round(float(r["accuracy"]), 4) for r in outcome.records],
        "seconds": round(time.perf_counter() - began, 1),
        "device": device,
    }


def page() -> None:
    """docs/learning.md: one table a data set and split."""
    rows = json.loads(RESULTS.read_text())
    lines = [
        "# What each method learns, and forgets",
        "",
        "Accuracy and forgetting (B1: mean over classes of best accuracy ever minus final accuracy) in percent,",
        "mean ± deviation over seeds, after the last round. Made by `python benchmarks/learning.py`; all methods",
        "of a seed share federation, initial weights, sampled clients and batches, and run with their defaults.",
    ]
    for data, setting in DATA.items():
        for split in SPLITS:
            here = [r for r in rows if r["data"] == data and r["split"] == split]
            if not here:
                continue
            what = ", ".join(f"{k} {v}" for k, v in setting.items() if v is not None)
            lines += ["", f"## {data}, {split}", "", f"{what}, public {PUBLIC:.1%}.", ""]
            lines += ["| method | accuracy | forgetting | seeds |", "|---|---|---|---|"]
            table = []
            for method in dict.fromkeys(r["method"] for r in here):
                found = [r for r in here if r["method"] == method and "accuracy" in r]
                if not found:
                    error = next(r["error"] for r in here if r["method"] == method)
                    table.append((-1.0, f"| {method} | failed: {error} | | |"))
                    continue
                accuracy, forgetting = (
                    100 * np.array([r[k] for r in found]) for k in ("accuracy", "forgetting")
                )
                deviation = [v.std(ddof=1) if len(v) > 1 else 0.0 for v in (accuracy, forgetting)]
                bold = "**" if any(part in FIVE for part in method.split("+")) else ""
                table.append((
                    float(accuracy.mean()),
                    f"| {bold}{method}{bold} | {accuracy.mean():.1f} ± {deviation[0]:.1f} "
                    f"| {forgetting.mean():.1f} ± {deviation[1]:.1f} | {len(found)} |",
                ))  # fmt: skip
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
            (data, split, method, seed)
            for data in arguments.data
            for seed in range(arguments.seeds)
            for split in SPLITS
            for method in arguments.methods
        ]
        sweep(
            RESULTS, ("data", "split", "method", "seed"), cells, run, device=arguments.device,
            workers=arguments.workers, limit=arguments.limit,
        )  # fmt: skip
    page()


if __name__ == "__main__":
    main()
