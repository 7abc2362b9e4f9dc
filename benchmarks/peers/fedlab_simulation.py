"""FedLab's standalone simulation.

pip install fedlab==1.3.0 torchvision .
python benchmarks/peers/fedlab_simulation.py [--only W] [--passes 5] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from against import LR, MOMENTUM, Work, main
from torch.utils.data import DataLoader, TensorDataset


def rounds_of(work: Work) -> Callable[[], object]:
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler

    class Clients:
        def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
            return DataLoader(TensorDataset(*work.clients[client]), batch_size, shuffle=True)

    net = copy.deepcopy(work.net)
    cuda = next(net.parameters()).is_cuda
    handler = SyncServerHandler(net, 10**9, 1.0, cuda=cuda)
    trainer = SGDSerialClientTrainer(net, len(work.clients), cuda=cuda)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(work.epochs, work.batch_size, LR)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), LR, momentum=MOMENTUM)
    handler.num_clients = trainer.num_clients

    def one_round() -> None:
        """As in fedlab.core.standalone.StandalonePipeline.main, without the test."""
        trainer.local_process(handler.downlink_package, handler.sample_clients())
        for pack in trainer.uplink_package:
            handler.load(pack)

    return one_round


if __name__ == "__main__":
    main("FedLab", rounds_of)
