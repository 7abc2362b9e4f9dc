"""Apple's pfl-research, in one process, or with torchrun in several processes of one thread each.

pip install 'pfl[pytorch]==0.6.0' .
python benchmarks/peers/pfl_research.py [--only W] [--passes 5] [--device cuda] [--json FILE]
torchrun --nproc-per-node 2 benchmarks/peers/pfl_research.py --threads 2
"""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable

import numpy as np
import torch
from against import LR, MOMENTUM, Work, main
from torch.nn import functional as F


def rounds_of(work: Work) -> Callable[[], object]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    net = copy.deepcopy(work.net)
    net.loss = types.MethodType(lambda self, x, y, is_eval=False: F.cross_entropy(self(x), y), net)
    net.metrics = types.MethodType(lambda self, x, y: {}, net)
    model = PyTorchModel(
        net,
        local_optimizer_create=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=MOMENTUM),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    rng = np.random.default_rng(0)

    def client(k: int) -> Dataset:
        x, y = work.clients[k]
        order = torch.from_numpy(rng.permutation(len(y))).to(y.device)
        return Dataset(raw_data=(x[order], y[order]), user_id=str(k))

    data = FederatedDataset(client, get_user_sampler("minimize_reuse", list(range(len(work.clients)))))
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    one_round = NNAlgorithmParams(
        central_num_iterations=1,
        evaluation_frequency=10**6,
        train_cohort_size=len(work.clients),
        val_cohort_size=None,
    )
    local = NNTrainHyperParams(
        local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch_size
    )

    def one() -> None:
        FederatedAveraging().run(one_round, backend, model, local, send_metrics_to_platform=False)

    def together() -> None:
        torch.distributed.barrier()  # the other processes wait here while the first measures the other programs
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        one()
        torch.set_num_threads(threads)

    return together if "WORLD_SIZE" in os.environ else one


if __name__ == "__main__":
    main("pfl-research", rounds_of, peer_only=os.environ.get("RANK", "0") != "0")
