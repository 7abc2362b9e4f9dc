"""The code published with FedNTD: its FedAvg.

git clone https://github.com/Lee-Gihun/FedNTD && pip install wandb .
PYTHONPATH=FedNTD python benchmarks/peers/fedntd_code.py [--only W] [--passes 5] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count

import torch
from against import LR, MOMENTUM, Work, main
from torch.utils.data import DataLoader, TensorDataset


def rounds_of(work: Work) -> Callable[[], object]:
    from algorithms.fedavg import Server

    def client(x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        loader = DataLoader(TensorDataset(x, y), work.batch_size, shuffle=True)
        return {"datasize": len(y), "train": loader}

    net = copy.deepcopy(work.net)
    server = Server(
        algo_params=None,
        model=net,
        data_distributed={
            "num_classes": 10,
            "global": {"test": None},
            "local": {k: client(*data) for k, data in enumerate(work.clients)},
        },
        optimizer=torch.optim.SGD(net.parameters(), LR, momentum=MOMENTUM),
        scheduler=None,
        sample_ratio=1.0,
        local_epochs=work.epochs,
        device=str(next(net.parameters()).device),
    )
    server.client._get_local_stats = dict  # skip the evaluation of local models, which is not measured here
    rounds = count()

    def one_round() -> None:
        """As in algorithms.BaseServer.BaseServer.run, without the test."""
        weights, sizes, _ = server._clients_training(server._client_sampling(next(rounds)))
        server.model.load_state_dict(server._aggregation(weights, sizes))

    return one_round


if __name__ == "__main__":
    main("FedNTD's code", rounds_of)
