"""Methods on streams: clients' data arrive in stages, under a long-tailed class distribution.

    python benchmarks/streams.py [--data mnist cifar10] [--seeds 3] [--workers 2] [--device auto]

FedMLP's protocol (20 clients, 10 a round, 5 tasks each of 4 shards, imbalance 0.5; every global epoch runs the
stages 1 to 5) with a shorter schedule. Results go to results/streams.json; ``--page`` writes docs/streams.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from sweeping import sweep

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "results" / "streams.json", ROOT / "docs" / "streams.md"
MODELS = {"mnist": "mlp-cnn5", "cifar10": "ntd-cifar"}
EPOCHS, STAGES, LAST = 20, 5, 5  # global epochs, stages in each, and how many of the last are averaged
SCHEDULE = {"sample": 10, "epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
METHODS = ("fedavg", "fedprox", "fedrep", "fedproto", "fedntd", "creff", "fedmlp")
COLUMNS = ("A_loc", "A_loc_t", "A_glo", "A_glo_t", "average_forgetting")


def run(data: str, method: str, seed: int, device: str) -> dict:
    """Train once; the mean of each metric over the last global epochs."""
    import torch

    torch.set_num_threads(1)
    import holdfast as hf
    from holdfast.methods import parse_method
    from holdfast.models import parse_model

    stream = hf.stream(
        hf.load(data), tasks_per_client=STAGES, partition=hf.ClassShards(s=4), clients=20, seed=seed,
        long_tail=hf.LongTail(ratio=0.5),
    )  # fmt: skip
    began = time.perf_counter()
    outcome = hf.train(
        parse_method(method), parse_model(MODELS[data]), stream, rounds=EPOCHS * STAGES, seed=seed, device=device,
        **SCHEDULE,
    )  # fmt: skip
    tested = [r["stream"] for r in outcome.records if "A_loc" in r["stream"]]
    means = {c: float(np.mean([t[c] for t in tested[-LAST:]])) for c in COLUMNS if c in tested[-1]}
    curve = {c: [round(float(t[c]), 4) for t in tested] for c in ("A_loc", "A_glo")}
    return means | {"curve": curve, "seconds": round(time.perf_counter() - began, 1), "device": device}


def page() -> None:
    rows = json.loads(RESULTS.read_text())
    lines = [
        "# Streams, measured",
        "",
        "Clients that differ from each other and change over time: FedMLP's protocol with a shorter schedule",
        f"({EPOCHS} global epochs of {STAGES} stages, {SCHEDULE['epochs']} local epochs), imbalance 0.5, 4 shards",
        f"a task, 20 clients, 10 a round. Percent, mean ± deviation over seeds of the last {LAST} global epochs.",
        "A_loc: clients' private models, A_glo: the global model, on the balanced test set; -t: minority classes",
        "only. Forgetting: average over clients of what their private models lost of earlier stages. Made by",
        "`python benchmarks/streams.py`.",
    ]
    for data, model in MODELS.items():
        here = [r for r in rows if r["data"] == data]
        if not here:
            continue
        lines += [
            "",
            f"## {data}, {model}",
            "",
            "| method | A_loc | A_loc-t | A_glo | A_glo-t | forgetting | seeds |",
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for method in METHODS:
            found = [r for r in here if r["method"] == method and "A_loc" in r]
            if found:
                values = [100 * np.array([r[c] for r in found]) for c in COLUMNS]
                shown = [f"{v.mean():.1f} ± {v.std(ddof=1) if len(v) > 1 else 0:.1f}" for v in values]
                lines.append(f"| {method} | {' | '.join(shown)} | {len(found)} |")
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--page", action="store_true", help="only write docs/streams.md")
    arguments = parser.parse_args()
    if not arguments.page:
        cells = [(d, m, s) for s in range(arguments.seeds) for d in arguments.data for m in METHODS]
        sweep(
            RESULTS, ("data", "method", "seed"), cells, run, device=arguments.device, workers=arguments.workers,
            limit=arguments.limit,
        )  # fmt: skip
    page()


if __name__ == "__main__":
    main()
