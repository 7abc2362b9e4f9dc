"""Construction of the `RunContext` from local samples: all samples in a simulation, the site's in a deployment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.engine.clients import DeviceData
from holdfast.methods.context import RunContext
from holdfast.models.network import Network
from holdfast.tasks.base import Task


def device_data(dataset: Dataset, device: torch.device, dtype: torch.dtype) -> DeviceData:
    """The training samples of a data set on a device."""
    x, y, _, _ = dataset.on(device)
    targets = dataset.y_train
    if y.is_floating_point():
        y, targets = y.to(dtype), targets.to(dtype)
    return DeviceData(x, y, dataset.strata_train, targets.numpy(), dataset.preprocess, dtype)


def make_run_context(
    network: Network,
    data: DeviceData,
    settings: Settings,
    *,
    num_clients: int,
    class_counts: np.ndarray,
    bounds: tuple[float, float],
    public: np.ndarray,
    draw_one_of_each: Callable[[], np.ndarray],
    stages: int,
    read: Callable[[np.ndarray], tuple[Tensor, Tensor]],
    task: Task,
) -> RunContext:
    """The `RunContext` of a run.

    ``bounds`` are the smallest and the largest value of stored samples; ``public`` are the ids of public samples. The
    other arguments are fields of `RunContext`.
    """
    device = data.x.device

    def constant_input(value: float) -> Tensor:
        return data.preprocess(data.x.new_full((1, *data.x.shape[1:]), value), dtype=data.dtype)

    return RunContext(
        network=network,
        num_classes=len(class_counts),
        num_clients=num_clients,
        class_counts=torch.from_numpy(class_counts).to(device, data.dtype),
        total_rounds=settings.rounds,
        local_epochs=settings.local_epochs,
        local_steps=settings.local_steps,
        seed=settings.seed,
        batch_size=settings.batch_size,
        lr=settings.lr,
        lr_at=settings.lr_at,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        device=device,
        dtype=data.dtype,
        lowest=constant_input(bounds[0]),
        highest=constant_input(bounds[1]),
        public_x=data.read(public),
        public_y=data.y[torch.from_numpy(public).to(device)],
        draw_one_of_each=draw_one_of_each,
        stages=stages,
        read=read,
        task=task.with_counts(torch.from_numpy(class_counts)),
    )
