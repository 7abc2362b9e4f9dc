"""fluke's FedAVG.

pip install fluke-fl==0.8.1 .
python benchmarks/peers/fluke_fl.py [--only W] [--passes 5] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count

import torch
from against import LR, MOMENTUM, Work, main


def rounds_of(work: Work) -> Callable[[], object]:
    from fluke import FlukeENV
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server

    environment = FlukeENV()
    environment.set_device(str(next(work.net.parameters()).device))
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    sgd = OptimizerConfigurator({"name": "SGD", "lr": LR, "momentum": MOMENTUM})
    loss = torch.nn.CrossEntropyLoss()
    clients = [
        Client(
            index=k,
            train_set=FastDataLoader(
                *data, num_labels=10, batch_size=work.batch_size, shuffle=True, skip_singleton=False
            ),
            test_set=None,
            optimizer_cfg=sgd,
            loss_fn=loss,
            local_epochs=work.epochs,
        )
        for k, data in enumerate(work.clients)
    ]
    server = Server(copy.deepcopy(work.net).cpu(), None, clients, weighted=True)
    for client in clients:
        client.set_channel(server.channel)
    rounds = count(1)

    def one_round() -> None:
        """As in fluke.algorithms.CentralizedFL.run, without the test and the progress bars."""
        number, eligible = next(rounds), server.get_eligible_clients(1.0)
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(number)
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))

    return one_round


if __name__ == "__main__":
    main("fluke", rounds_of)
