"""FedAvg in Flower's simulation, with one client per core in processes of Ray.

pip install 'flwr[simulation]==1.42.*' .
python benchmarks/peers/flower_simulation.py [--only W] [--passes 5] [--json FILE]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from against import LR, MOMENTUM, Work, main
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset

CLIENTS = 10

server, client = ServerApp(), ClientApp()


@cache
def _work(path: str) -> Work:
    """The workload of a client process, read once."""
    return torch.load(path, weights_only=False)


@client.train()
def train(message: Message, context: Context) -> Message:
    work = _work(str(message.content["config"]["work"]))
    net, data = work.net, work.clients[int(context.node_config["partition-id"])]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(net.parameters(), LR, momentum=MOMENTUM)
    for _ in range(work.epochs):
        for x, y in DataLoader(TensorDataset(*data), work.batch_size, shuffle=True):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
    trained = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(data[1])}),
    }
    return Message(RecordDict(trained), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    folder = tempfile.TemporaryDirectory()

    def rounds_of(work: Work) -> Callable[[], object]:
        path = Path(folder.name) / f"{len(list(Path(folder.name).iterdir()))}.pt"
        torch.save(work, path)
        strategy = FedAvg(fraction_train=1.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        arrays, config, number = ArrayRecord(work.net.state_dict()), ConfigRecord({"work": str(path)}), 0

        def one_round() -> None:
            """As in flwr.serverapp.strategy.Strategy.start, without the evaluation."""
            nonlocal arrays, number
            number += 1
            messages = strategy.configure_train(number, arrays, config, grid)
            replies = grid.send_and_receive(messages)
            arrays, _ = strategy.aggregate_train(number, replies)

        return one_round

    with folder:
        main("Flower", rounds_of)


if __name__ == "__main__":
    import flower_simulation as again  # as a module that Ray's processes can import, which keeps the cache

    cores = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(again.server, again.client, CLIENTS, backend_config=cores)
