"""A process that searches, to be killed: tune_worker.py FOLDER WORKERS."""

import sys

import holdfast as hf


def search(folder: str, workers: int) -> hf.Tuning:
    experiment = hf.Experiment(
        data="digits",
        clients=5,
        rounds=18,
        model="mlp:16",
        method="fedavg",
        device="cpu",
        checkpoint_seconds=0,
    )
    return hf.tune(
        experiment, space=["lr=0.01..1:log"], budget=9, workers=workers, out=folder, progress=False
    )


if __name__ == "__main__":
    search(sys.argv[1], int(sys.argv[2]))
