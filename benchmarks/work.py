"""What the benchmarks share: synthetic data, runs without evaluation, and a plain PyTorch loop for comparison."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.preprocess import Preprocess
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods import Method, parse_method
from holdfast.models import parse_model
from holdfast.training.session import Training

MANY = 10**6  # rounds: more than any benchmark runs


def prepare(
    method: Method | str,
    model: str,
    federation: Federation,
    *,
    engine: str = "auto",
    device: str = "cpu",
    parallel_clients: int | None = None,
    ray_address: str | None = None,
    **settings: float | None,
) -> Training:
    """A run that evaluates nothing, so that only training is timed."""
    method = parse_method(method) if isinstance(method, str) else method
    schedule = Settings(
        **{"rounds": MANY, "lr": 0.01, "evaluate_every": MANY, "evaluate_locals": False} | settings
    )
    return Training(
        method, parse_model(model), federation, schedule, engine=engine, device=device,
        parallel_clients=parallel_clients, ray_address=ray_address,
    )  # fmt: skip


def rounds_of(training: Training) -> RoundLoop:
    """The rounds of a run without a directory."""
    return training.loop(StateCache(None, None))


def cifar_shaped(samples: int, classes: int = 10, shape: tuple[int, ...] = (3, 32, 32)) -> Dataset:
    """Random images and labels, since the time of training does not depend on pixels."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (samples, *shape), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, classes, samples))
    names = tuple(str(c) for c in range(classes))
    half = (0.5,) * shape[0]
    return Dataset("random", x, y, x[:1000], y[:1000], names, Preprocess(half, half))


def text_shaped(samples: int, length: int = 80, tokens: int = 80) -> Dataset:
    """Random sequences of tokens, and the next token at each position."""
    text = np.random.default_rng(0).integers(0, tokens, (samples, length + 1))
    x, y = text[:, :-1], text[:, 1:]
    return Dataset.from_arrays(x, y, x[:100], y[:100], task="sequence", name="random text")


def equal_federation(dataset: Dataset, clients: int, each: int) -> Federation:
    """The first ``clients * each`` samples, ``each`` for every client."""
    offsets = np.arange(clients + 1, dtype=np.int64) * each
    return Federation(dataset, np.arange(clients * each, dtype=np.int64), offsets)


class BareLoop:
    """FedAvg in plain PyTorch: one client after another, preprocessed data on the device, torch.optim.SGD."""

    def __init__(
        self, net: nn.Module, federation: Federation, device: torch.device, *, batch_size: int, local_epochs: int,
        lr: float = 0.01, momentum: float = 0.9, optimizer: type[torch.optim.Optimizer] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    ) -> None:  # fmt: skip
        """``optimizer`` is made with its defaults; without one, it is SGD with momentum."""
        self.optimizer, self.loss = optimizer, loss
        self.device, self.batch_size, self.local_epochs = device, batch_size, local_epochs
        self.lr, self.momentum = lr, momentum
        self.net = copy.deepcopy(net).to(device)
        self.weights = {k: v.clone() for k, v in self.net.state_dict().items()}
        dataset = federation.dataset
        self.x = dataset.preprocess(dataset.x_train.to(device))
        self.y = dataset.y_train.to(device)
        self.federation = federation
        self.rng = np.random.default_rng(0)

    def round(self, clients: np.ndarray) -> None:
        """Train these clients and average their weights."""
        total = {k: torch.zeros_like(v) for k, v in self.weights.items()}
        samples = 0
        for k in clients:
            ids = torch.from_numpy(self.federation.client(int(k))).to(self.device)
            self.net.load_state_dict(self.weights)
            if self.optimizer is None:
                optimiser = torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=self.momentum)
            else:
                optimiser = self.optimizer(self.net.parameters())
            for _ in range(self.local_epochs):
                order = ids[torch.from_numpy(self.rng.permutation(len(ids))).to(self.device)]
                for batch in order.split(self.batch_size):
                    optimiser.zero_grad()
                    logits, labels = self.net(self.x[batch]).flatten(0, -2), self.y[batch].flatten()
                    self.loss(logits, labels).backward()
                    optimiser.step()
            for name, value in self.net.state_dict().items():
                total[name] += value * len(ids)
            samples += len(ids)
        self.weights = {k: v / samples for k, v in total.items()}


def kernels_of(work: Callable[[], object], device: torch.device) -> dict[str, tuple[float, int]]:
    """The time of each kernel (on a CPU: operation) in ``work``, in µs, and how often it runs, longest first."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as seen:
        work()
    spent: dict[str, tuple[float, int]] = {}
    for event in seen.events():  # not key_averages, which takes minutes for so many
        taken, times = spent.get(event.name, (0.0, 0))
        spent[event.name] = taken + (event.device_time if on_gpu else event.cpu_time), times + 1
    return dict(sorted(spent.items(), key=lambda kernel: -kernel[1][0]))


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of ``work`` in seconds."""
    return seconds_in_turns({"": work}, repeats, device)[""]


def seconds_in_turns(
    works: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """The median time of each, in seconds. They alternate, so that other load on the machine affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}
