"""A process that runs small cells, to be killed: sweep_worker.py RESULTS WORK ROUNDS SEEDS WORKERS."""

import sys
from pathlib import Path

from holdfast.papers.cells import Cell
from holdfast.papers.sweep import Sweep


def cells(rounds: int, seeds: int) -> list[Cell]:
    settings = {
        "data": "digits",
        "partition": "dirichlet:0.5",
        "clients": 5,
        "model": "mlp:64",
        "method": "fedavg",
        "rounds": rounds,
        "checkpoint_seconds": 0.0,
        "evaluate_locals": False,
    }
    return [Cell("fedntd/made-up", "digits", "fedavg", seed, settings) for seed in range(seeds)]


if __name__ == "__main__":
    results, work, rounds, seeds, workers = sys.argv[1:]
    sweep = Sweep(Path(results), Path(work), "cpu")
    sweep.run(cells(int(rounds), int(seeds)), int(workers), print)
