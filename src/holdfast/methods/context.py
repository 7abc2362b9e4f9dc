"""The arguments of a method's hooks: the run and the client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from holdfast.core.device import gpu_share_bytes
from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.models.network import Network, Output
from holdfast.tasks.base import Task
from holdfast.tasks.classes import Multiclass

if TYPE_CHECKING:
    from holdfast.methods.base import Tensors, Tree

MEMORY_DIVISOR = 32  # the widest layer's outputs take at most this fraction of a GPU's memory in evaluation
MAX_EVALUATION_BATCH = 1 << 14


@dataclass(frozen=True, eq=False)
class RunContext:
    """The properties of a run that are the same for all clients and rounds."""

    network: Network
    num_classes: int  # C: number of strata, which are the classes if there are any
    num_clients: int  # N: all registered clients
    class_counts: Tensor  # [C] samples of each class (stratum) over all clients
    total_rounds: int
    local_epochs: float  # E: epochs of a client in a round
    local_steps: int | None  # steps of a client in a round, instead of epochs
    seed: int
    batch_size: int
    lr: float  # η of round 1
    lr_at: Callable[[int], float]  # η_t of a round (from 1)
    momentum: float
    weight_decay: float
    device: torch.device
    dtype: torch.dtype
    lowest: Tensor  # [1, ...] the model's input for the smallest possible pixel value
    highest: Tensor  # [1, ...] the model's input for the largest possible pixel value
    public_x: Tensor  # [P, ...] the server's public samples, preprocessed (P may be 0)
    public_y: Tensor  # [P, ...]
    draw_one_of_each: Callable[[], np.ndarray]
    read: Callable[[np.ndarray], tuple[Tensor, Tensor]]  # training samples and labels by id
    stages: int = 1  # number of tasks of every client, for streams
    task: Task = field(default_factory=Multiclass)
    was_read: set[str] = field(default_factory=set)  # "rounds" if a method depends on the number of rounds

    @property
    def rounds(self) -> int:
        """The number of rounds of the run. A run whose method reads it cannot be extended to more rounds."""
        self.was_read.add("rounds")
        return self.total_rounds

    @cached_property
    def one_of_each(self) -> np.ndarray:
        """The ids of one training sample of each class, ``[C]``, drawn with the run's seed; -1 for a class without."""
        return self.draw_one_of_each()

    @cached_property
    def evaluation_batch(self) -> int:
        """The batch size of evaluation: large for a GPU's utilisation, small for a CPU's cache."""
        if self.device.type != "cuda":
            return 128
        sample = self.network.max_activation_size(self.lowest) * self.lowest.element_size()
        return min(max(128, gpu_share_bytes(self.device) // MEMORY_DIVISOR // sample), MAX_EVALUATION_BATCH)

    def whole_epochs(self, method: str) -> int:
        """E, for a method that counts epochs; raises an error if clients train for steps or fractions of an epoch."""
        if self.local_steps is not None or not float(self.local_epochs).is_integer():
            given = f"local_epochs is {self.local_epochs}"
            if self.local_steps is not None:
                given = f"local_steps is {self.local_steps}"
            raise HoldfastError(
                f"{method} needs a whole number of local epochs, but {given}; set local_epochs to a whole "
                "number"
            )
        return int(self.local_epochs)

    def scalar(self, value: float) -> Tensor:
        """A number as a tensor, for payloads, carries, states and sums."""
        return torch.tensor(value, dtype=self.dtype, device=self.device)

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
    """One client in one round: the argument of hooks outside the local steps."""

    context: RunContext
    id: int
    round: int  # t, from 1
    stage: int  # index of the client's task, for streams; 0 otherwise
    read: Callable[[np.ndarray], Tensor]  # training samples by id, preprocessed, not augmented
    ids: np.ndarray  # [n] the samples it trains on
    labels: np.ndarray  # [n] their classes (strata)
    targets: np.ndarray  # [n, ...]
    local_epochs: int  # epochs of this round, of which the last may be incomplete
    steps: int  # K: optimiser steps of this round
    lr: float  # η_t of this round
    global_params: Tensors  # w^{t-1}, the received parameters
    buffers: Tensors  # the client's current buffers of the model
    heldout_ids: np.ndarray  # samples excluded from training; empty unless the method sets ``holdout``
    heldout_targets: np.ndarray
    notes: Tree = field(default_factory=dict)  # values kept for ``client_final``, by method

    @property
    def samples(self) -> int:
        """n_k: the number of its training samples."""
        return len(self.ids)

    @cached_property
    def y(self) -> Tensor:
        """The targets of its training samples, ``[n, ...]``: labels ``[n]`` for a multiclass task."""
        return torch.from_numpy(self.targets).to(self.context.device)

    @cached_property
    def label_counts(self) -> Tensor:
        """n_k^c: the number of its training samples of each class (stratum), ``[C]``."""
        counts = np.bincount(self.labels, minlength=self.context.num_classes)
        return torch.from_numpy(counts).to(self.context.device, self.context.dtype)

    @cached_property
    def x(self) -> Tensor:
        """Its training samples ``[n, ...]``, preprocessed, not augmented."""
        return self.read(self.ids)

    @cached_property
    def heldout_x(self) -> Tensor:
        """The samples excluded from training, for a method with ``holdout``."""
        return self.read(self.heldout_ids)

    @cached_property
    def heldout_y(self) -> Tensor:
        """The targets of those samples."""
        return torch.from_numpy(self.heldout_targets).to(self.context.device)

    @cached_property
    def owned(self) -> Tensor:
        """Which classes its training samples have: bool ``[C]``."""
        return self.label_counts > 0

    def forward(self, params: Tensors, x: Tensor | None = None) -> Output:
        """The outputs at ``params`` for its own samples (or ``x``), in evaluation mode, without gradients."""
        return self.context.forward(params, self.buffers, self.x if x is None else x)

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """A NumPy generator for one of the method's own random choices on this client in this round."""
        return generator(self.context.seed, purpose, self.round, self.id, *counters)
