"""PFLlib's FedAvg.

git clone https://github.com/TsingZ0/PFLlib && pip install h5py scikit-learn .
PYTHONPATH=PFLlib/system python benchmarks/peers/pfllib.py [--only W] [--passes 5] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from against import LR, MOMENTUM, Work, main

DATASET = "Work"
FOLDER = tempfile.TemporaryDirectory()


def _write(work: Work) -> Path:
    """Write the clients' samples where PFLlib reads them; returns the working directory that it expects."""
    root = Path(tempfile.mkdtemp(dir=FOLDER.name))
    for part in ("train", "test"):
        (root / "dataset" / DATASET / part).mkdir(parents=True)
        for k, (x, y) in enumerate(work.clients):
            data = {"x": x.cpu().numpy(), "y": y.cpu().numpy()}
            np.savez(root / "dataset" / DATASET / part / f"{k}.npz", data=np.array(data, dtype=object))
    working_directory = root / "system"
    working_directory.mkdir()
    return working_directory


def rounds_of(work: Work) -> Callable[[], object]:
    from flcore.servers.serveravg import FedAvg

    class Arguments(defaultdict[str, object]):
        """Options that are not listed default to 0: slow clients, new clients, attacks, few shots."""

        __getattr__ = defaultdict.__getitem__

    arguments = Arguments(
        int,
        model=copy.deepcopy(work.net),
        device=str(next(work.net.parameters()).device),
        dataset=DATASET,
        num_classes=10,
        num_clients=len(work.clients),
        join_ratio=1.0,
        batch_size=work.batch_size,
        local_epochs=work.epochs,
        local_learning_rate=LR,
        learning_rate_decay_gamma=1.0,
        time_threthold=10**9,
    )
    working_directory = _write(work)
    with contextlib.chdir(working_directory):
        server = FedAvg(arguments, 0)
    for client in server.clients:
        client.optimizer = torch.optim.SGD(client.model.parameters(), LR, momentum=MOMENTUM)

    def one_round() -> None:
        """As in flcore.servers.serveravg.FedAvg.train, without the test."""
        with contextlib.chdir(working_directory):
            server.selected_clients = server.select_clients()
            server.send_models()
            for client in server.selected_clients:
                client.train()
            server.receive_models()
            server.aggregate_parameters()

    return one_round


if __name__ == "__main__":
    main("PFLlib", rounds_of)
