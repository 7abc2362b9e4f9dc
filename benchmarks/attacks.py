"""Attacks, defences and methods: the table of docs/security.md.

    python benchmarks/attacks.py [--workers N] [--limit SECONDS] [--seeds N]    trains what results/attacks.json lacks
    python benchmarks/attacks.py --write                                        writes the tables into the page

20 clients by a Dirichlet partition (α = 1), all in every round, 4 of them hostile. Digits has 1,437 training samples;
of Fashion-MNIST the first 2,000 are used, and the first 2,000 test samples.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

import holdfast as hf
from sweeping import sweep

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "attacks.json", ROOT / "docs" / "security.md"
MARKS = ("<!-- attacks: begin -->", "<!-- attacks: end -->")
NAMES = ("data", "attack", "defence", "method", "seed")
CLIENTS, HOSTILE, ROUNDS = 20, 4, 20

DATA = {"digits": ("mlp:32", 0.1), "fashion-mnist": ("mlp:64", 0.05)}
ATTACKS = {
    "none": None,
    "sign flip": "sign-flip:0.2,scale=3",
    "Gaussian": "gaussian:0.2,std=0.5",
    "a little is enough": "little-is-enough:0.2,z=1.5",
    "label flip": "label-flip:0.2",
    "backdoor": "backdoor:0.2,target=0,scale=5",
}
DEFENCES = {
    "none": {},
    "median": {"robust": "median"},
    "trimmed mean": {"robust": "trimmed-mean:0.2"},
    "Krum": {"robust": f"krum:{HOSTILE}"},
    "multi-Krum": {"robust": f"multi-krum:{HOSTILE}"},
    "Bulyan": {"robust": f"bulyan:{HOSTILE}"},
    "geometric median": {"robust": "geometric-median"},
    "norm bound": {"robust": "norm-bound"},
    "centred clipping": {"robust": "centred-clipping"},
    "max_update_ratio=2": {"max_update_ratio": 2.0},
}
METHODS = ("fedavg", "scaffold")


def run(data: str, attack: str, defence: str, method: str, seed: int, device: str) -> dict:
    """The last round's accuracy, the attack's success, and the share of hostile and honest updates left out."""
    dataset = hf.load(data)
    if data == "fashion-mnist":
        dataset = replace(
            dataset,
            x_train=dataset.x_train[:2000], y_train=dataset.y_train[:2000],
            x_test=dataset.x_test[:2000], y_test=dataset.y_test[:2000],
        )  # fmt: skip
    model, lr = DATA[data]
    trained = hf.train(
        method, model, hf.federate(dataset, hf.Dirichlet(1.0), clients=CLIENTS, seed=seed), rounds=ROUNDS,
        local_epochs=2, batch_size=20, lr=lr, seed=seed, device=device, attack=ATTACKS[attack],
        evaluate_every=ROUNDS, evaluate_locals=False, **DEFENCES[defence],
    )  # fmt: skip
    left_out = {True: 0, False: 0}
    for record in trained.records:
        hostile = set(record.get("attackers", []))
        refused = [i["client"] for i in record["incidents"] if i.get("detail", "").startswith("left out")]
        for client in [*record.get("rejected", []), *refused]:
            left_out[client in hostile] += 1
    hostile_updates = ROUNDS * HOSTILE if ATTACKS[attack] else 0
    return {
        "accuracy": trained.accuracy,
        "attack_success": trained.records[-1].get("attack_success"),
        "hostile_left_out": left_out[True] / hostile_updates if hostile_updates else None,
        "honest_left_out": left_out[False] / (ROUNDS * CLIENTS - hostile_updates),
    }


def tables(rows: list[dict]) -> str:
    """Markdown: for each data set and method a table of defences by attacks, and one of the updates left out."""
    by_cell = defaultdict(list)
    for row in rows:
        if "error" not in row:
            by_cell[row["data"], row["method"], row["defence"], row["attack"]].append(row)
    parts = []
    for data, method in product(DATA, METHODS):
        seeds = min(len(by_cell[data, method, *cell]) for cell in product(DEFENCES, ATTACKS))
        if not seeds:
            continue
        head = ["defence", *ATTACKS, "backdoor's success"]
        lines = []
        for defence in DEFENCES:
            cells = [by_cell[data, method, defence, attack] for attack in ATTACKS]
            shown = [_mean(cell, "accuracy") for cell in cells] + [_mean(cells[-1], "attack_success")]
            lines.append([defence, *shown])
        title = f"**{data}, {method}, {seeds} {'seed' if seeds == 1 else 'seeds'}: accuracy, %**"
        parts += [title, "", *_markdown(head, lines), ""]
    head = ["defence", *(attack for attack in ATTACKS if attack != "none")]
    lines = []
    for defence in ("Krum", "multi-Krum", "Bulyan", "max_update_ratio=2"):
        cells = [
            [row for data, method in product(DATA, METHODS) for row in by_cell[data, method, defence, attack]]
            for attack in head[1:]
        ]
        lines.append(
            [defence, *(f"{_mean(c, 'hostile_left_out')} / {_mean(c, 'honest_left_out')}" for c in cells)]
        )
    parts += [
        "**hostile / honest updates left out, %, all data sets and methods**",
        "",
        *_markdown(head, lines),
    ]
    return "\n".join(parts)


def _mean(rows: list[dict], key: str) -> str:
    """The mean over seeds, in percent, with the standard deviation where there are several."""
    values = [100 * row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "–"
    spread = (
        f" ± {np.std(values, ddof=1):.1f}"
        if len(values) > 1 and key in ("accuracy", "attack_success")
        else ""
    )
    return f"{np.mean(values):.1f}{spread}"


def _markdown(head: list[str], lines: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)]


def write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    found = tables(json.loads(RESULTS.read_text()))
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{found}\n\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        write()
        return
    cells = [
        (data, attack, defence, method, seed)
        for method, seed, data, attack, defence in product(
            METHODS, range(arguments.seeds), DATA, ATTACKS, DEFENCES
        )
    ]
    sweep(RESULTS, NAMES, cells, run, device="cpu", workers=arguments.workers, limit=arguments.limit)


if __name__ == "__main__":
    main()
