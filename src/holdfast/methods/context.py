"""What a method is told: the task it runs on, and the client it runs for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import gpu_share_bytes
from holdfast.core.random import generator
from holdfast.models.network import Network, Output

if TYPE_CHECKING:
    from holdfast.methods.base import Tensors, Tree

TEST_PART = 32  # one part in so many of a GPU's memory is what a test's widest layer may fill: several are held at once
TEST_MOST = 1 << 14  # samples, which keep a GPU busy


@dataclass(frozen=True, eq=False)
class RunContext:
    """What is the same for all clients and rounds of a run."""

    network: Network
    num_classes: int
    num_clients: int  # N: all registered clients
    class_counts: Tensor  # [C] samples of each class over all clients
    rounds: int
    local_epochs: int  # E: passes of a client over its samples in a round
    seed: int
    batch_size: int
    lr: float  # η of round 1
    lr_decay: float  # what η is multiplied by from one round to the next
    momentum: float
    weight_decay: float
    device: torch.device
    dtype: torch.dtype
    lowest: Tensor  # [1, ...] the model's input for the smallest value a sample may have (black)
    highest: Tensor  # [1, ...] and for the largest (white)
    public_x: Tensor  # [P, ...] the server's public samples, ready for the model (P may be 0)
    public_y: Tensor  # [P]
    draw_one_of_each: Callable[[], np.ndarray]
    read: Callable[[np.ndarray], tuple[Tensor, Tensor]]  # training samples and labels by id

    @cached_property
    def one_of_each(self) -> np.ndarray:
        """The ids of one training sample of each class, ``[C]``, drawn by the seed; -1 where there is none."""
        return self.draw_one_of_each()

    @cached_property
    def evaluation_batch(self) -> int:
        """Samples forwarded at once in tests: many keep a GPU busy, few stay in a CPU's cache."""
        if self.device.type != "cuda":
            return 128
        sample = self.network.max_activation_size(self.lowest) * self.lowest.element_size()
        return min(max(128, gpu_share_bytes(self.device) // TEST_PART // sample), TEST_MOST)

    def scalar(self, value: float) -> Tensor:
        """A number as a tensor, to be carried or sent."""
        return torch.tensor(value, dtype=self.dtype, device=self.device)

    stages: int = 1  # how many tasks every client meets, on a stream

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """A NumPy generator for one of the method's own random choices on the server."""
        return generator(self.seed, purpose, *counters)

    def forward(self, params: Tensors, buffers: Tensors, x: Tensor) -> Output:
        """The outputs for any number of samples, in evaluation mode and without gradients."""
        network = self.network
        with torch.no_grad():
            inputs = (network.to_fast_layout(part) for part in torch.split(x, self.evaluation_batch))
            parts = [network.apply(params, buffers, part) for part in inputs]
        return Output(torch.cat([p.features for p in parts]), torch.cat([p.logits for p in parts]))


@dataclass(eq=False)
class Client:
    """One client in one round, as its hooks outside the steps see it."""

    context: RunContext
    id: int
    round: int  # t, from 1
    stage: int  # which of the client's tasks, for streams; 0 otherwise
    read: Callable[[np.ndarray], Tensor]  # training samples by id, ready for the model, not augmented
    ids: np.ndarray  # [n] the samples it trains on
    labels: np.ndarray  # [n] their labels
    local_epochs: int
    steps: int  # K: optimiser steps of this round
    lr: float  # η_t of this round
    global_params: Tensors  # w^{t-1}, the parameters the server sent
    buffers: Tensors  # the model's buffers as the client has them now
    heldout_ids: np.ndarray  # those kept out of its training; none but for a method that asks
    heldout_labels: np.ndarray
    notes: Tree = field(default_factory=dict)  # what ``start`` or ``begin`` leaves for ``finish``, by method

    @property
    def samples(self) -> int:
        """n_k: how many samples it trains on."""
        return len(self.ids)

    @cached_property
    def y(self) -> Tensor:
        """The labels of its training samples, ``[n]``."""
        return torch.from_numpy(self.labels).to(self.context.device)

    @cached_property
    def label_counts(self) -> Tensor:
        """n_k^c: how many samples of each class it trains on, ``[C]``."""
        counts = np.bincount(self.labels, minlength=self.context.num_classes)
        return torch.from_numpy(counts).to(self.context.device, self.context.dtype)

    @cached_property
    def x(self) -> Tensor:
        """Its training samples ``[n, ...]``, ready for the model, not augmented."""
        return self.read(self.ids)

    @cached_property
    def heldout_x(self) -> Tensor:
        """The samples a method with ``holdout`` keeps out of training."""
        return self.read(self.heldout_ids)

    @cached_property
    def heldout_y(self) -> Tensor:
        """The labels of those samples."""
        return torch.from_numpy(self.heldout_labels).to(self.context.device)

    @cached_property
    def owned(self) -> Tensor:
        """Which classes it holds: bool ``[C]``."""
        return self.label_counts > 0

    def forward(self, params: Tensors, x: Tensor | None = None) -> Output:
        """The outputs at ``params`` for its own samples (or ``x``), in evaluation mode, without gradients."""
        return self.context.forward(params, self.buffers, self.x if x is None else x)

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """A NumPy generator for one of the method's own random choices on this client in this round."""
        return generator(self.context.seed, purpose, self.round, self.id, *counters)
