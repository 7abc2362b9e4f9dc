"""Full fine-tuning, LoRA and a linear probe of a pretrained sentence model over four sites: docs/pretrained.md.

    HF_HUB_OFFLINE=1 python benchmarks/pretrained.py vaderSentiment-0.5.zip [--seeds N]    trains what results/ lacks
    python benchmarks/pretrained.py --write                                    writes the table into the page

The model and the texts are those of examples/pretrained_text.py. A seed draws the texts, the weights of classifier and
adapters, and the batches. Learning rates are usual ones for AdamW, not the results of a search.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "pretrained.json", ROOT / "docs" / "pretrained.md"
MARKS = ("<!-- pretrained: begin -->", "<!-- pretrained: end -->")
SETTINGS = {"rounds": 4, "local_epochs": 1, "batch_size": 16, "optimizer": "adamw"}
MODELS = {"full": ("full fine-tuning", 1e-4), "lora": ("LoRA, rank 8", 1e-3), "probe": ("linear probe", 1e-2)}


def train(model: str, archive: str, seed: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    import pretrained_text

    federation = pretrained_text.load_sites(archive, seed=seed)
    run = hf.train(
        "fedavg", getattr(pretrained_text, model), federation, lr=MODELS[model][1], seed=seed, evaluate_locals=False,
        engine="sequential", **SETTINGS,
    )  # fmt: skip
    last = run.records[-1]
    return {
        "model": model,
        "seed": seed,
        "accuracy": [r["accuracy"] for r in run.records],
        "site_accuracy": last["site_accuracy"],
        "bytes_up": last["bytes_up"] // federation.clients,
        "bytes_down": last["bytes_down"] // federation.clients,
        "trained": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
    }


def table(results: list[dict[str, Any]]) -> str:
    sites = list(results[0]["site_accuracy"])
    lines = [
        f"| | trained parameters | bytes up, a site and round | accuracy | {' | '.join(sites)} |",
        f"|---|---:|---:|---:|{'---:|' * len(sites)}",
    ]
    for model, (name, _) in MODELS.items():
        runs = [r for r in results if r["model"] == model]
        last = 100 * np.array([r["accuracy"][-1] for r in runs])
        by_site = [100 * np.mean([r["site_accuracy"][site] for r in runs]) for site in sites]
        cells = [f"{last.mean():.1f} ± {last.std(ddof=1):.1f}", *(f"{value:.1f}" for value in by_site)]
        lines.append(f"| {name} | {runs[0]['trained']:,} | {runs[0]['bytes_up']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", nargs="?", help="the source archive of vaderSentiment 0.5")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(r["model"], r["seed"]) for r in results}
    for seed in range(args.seeds) if args.archive else ():
        for model in MODELS:
            if (model, seed) not in done:
                results.append(train(model, args.archive, seed))
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(results[-1], flush=True)
    if args.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
