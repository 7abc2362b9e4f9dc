"""The work that benchmarks time, and the bare PyTorch loop they compare with."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.preprocess import Preprocess


def cifar_shaped(samples: int, classes: int = 10, shape: tuple[int, ...] = (3, 32, 32)) -> Dataset:
    """Random images and labels: timing does not look at pixels."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (samples, *shape), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, samples))
    names = tuple(str(c) for c in range(classes))
    half = (0.5,) * shape[0]
    return Dataset("random", x, y, x[:1000], y[:1000], names, Preprocess(half, half))


def equal_federation(dataset: Dataset, clients: int, each: int) -> Federation:
    """The first ``clients * each`` samples, ``each`` a client."""
    offsets = np.arange(clients + 1, dtype=np.int64) * each
    return Federation(dataset, np.arange(clients * each, dtype=np.int64), offsets)


def sized_federation(dataset: Dataset, sizes: np.ndarray) -> Federation:
    """Clients of the given sizes."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Federation(dataset, np.arange(offsets[-1], dtype=np.int64), offsets)


class BareLoop:
    """What one would write by hand: one client after another, float data on the device, torch.optim.SGD."""

    def __init__(
        self, net: nn.Module, federation: Federation, device: torch.device, *, batch_size: int, epochs: int,
        lr: float, momentum: float, loss: Callable[..., torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.batch_size, self.epochs = device, batch_size, epochs
        self.lr, self.momentum, self.loss = lr, momentum, loss
        self.net = copy.deepcopy(net).to(device)
        self.weights = {k: v.clone() for k, v in self.net.state_dict().items()}
        dataset = federation.dataset
        self.x = dataset.preprocess(dataset.x_train.to(device))
        self.y = dataset.y_train.to(device)
        self.federation = federation
        self.rng = np.random.default_rng(0)

    def round(self, clients: np.ndarray) -> None:
        """Train these clients and average."""
        total = {k: torch.zeros_like(v) for k, v in self.weights.items()}
        samples = 0
        for k in clients:
            ids = torch.from_numpy(self.federation.client(int(k))).to(self.device)
            self.net.load_state_dict(self.weights)
            optimiser = torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=self.momentum)
            for _ in range(self.epochs):
                order = ids[torch.from_numpy(self.rng.permutation(len(ids))).to(self.device)]
                for batch in order.split(self.batch_size):
                    optimiser.zero_grad()
                    x, y = self.x[batch], self.y[batch]
                    out = self.net(x)
                    loss = nn.functional.cross_entropy(out, y)
                    if self.loss is not None:
                        loss = loss + self.loss(out, x, y)
                    loss.backward()
                    optimiser.step()
            for name, value in self.net.state_dict().items():
                total[name] += value * len(ids)
            samples += len(ids)
        self.weights = {k: v / samples for k, v in total.items()}


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of ``work`` in seconds."""
    return seconds_in_turns({"": work}, repeats, device)[""]


def seconds_in_turns(
    works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """The median times of several, in seconds; passes alternate, so that a busy moment meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}
