"""Prediction with a trained model: samples as in the run's data set, scores by the method, the task's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tree, leaves, unflatten
from holdfast.data.dataset import Dataset, as_samples
from holdfast.data.preprocess import Preprocess, preprocess_for
from holdfast.models.network import Output, find_classifier
from holdfast.tasks.base import Task
from holdfast.tasks.registry import task_from

BATCH = 256  # samples that pass through the model at once


class ScoringModel(nn.Module):
    """A model with the scores that a method computes from its outputs and from a state, such as class prototypes.

    The inputs are preprocessed samples, as those of the model.
    """

    def __init__(
        self, net: nn.Module, classifier: str | None, scores: Callable[[Output, Tree], Tensor], state: Tree
    ) -> None:
        super().__init__()
        self.net, self._scores = net, scores
        found = find_classifier(net, classifier)
        self._classifier = None if found is None else found[0]
        self._paths: dict[str, str] = {}  # by the buffer's name
        for number, (path, value) in enumerate(leaves(state)):
            self.register_buffer(f"state{number}", value.detach().clone())
            self._paths[f"state{number}"] = path
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The scores: ``[B, ...]``."""
        state = unflatten({path: self.get_buffer(name) for name, path in self._paths.items()})
        if self._classifier is None:
            logits = self.net(x)
            return self._scores(Output(logits.flatten(1)[:, :0], logits), state)
        inputs: list[Tensor] = []
        layer = self.net.get_submodule(self._classifier)
        hook = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        try:
            logits = self.net(x)
        finally:
            hook.remove()
        return self._scores(Output(inputs[-1].flatten(1), logits), state)


def task_of(experiment: Mapping[str, Any]) -> Task:
    """The task of a run, without a user-defined loss, which predictions do not need."""
    described = dict(experiment.get("task") or {"name": "multiclass"})
    if isinstance(described.get("loss"), Mapping):
        del described["loss"]
    return task_from(described)


def preprocess_of(experiment: Mapping[str, Any]) -> Preprocess:
    """The preprocessing of a run, without augmentation."""
    recorded = experiment.get("sample_preprocess") or experiment.get("preprocess") or "plain"
    if isinstance(recorded, str):
        data = experiment.get("data")
        return preprocess_for(str(data["name"] if isinstance(data, Mapping) else data), recorded)
    known: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in recorded.items()
    }
    return Preprocess(**known)


def stored_samples(x: Any, experiment: Mapping[str, Any]) -> Tensor:
    """Samples in the type and shape of the run's samples; raises an error if they do not fit."""
    samples = x.x_test if isinstance(x, Dataset) else as_samples(x, "x")
    shape = tuple(experiment["shape"])
    if tuple(samples.shape[1:]) != shape:
        one = "; a single sample is x[None]" if tuple(samples.shape) == shape else ""
        raise HoldfastError(
            f"x has samples of shape {tuple(samples.shape[1:])}, but those of the run have shape {shape}{one}"
        )
    kind = experiment.get("sample_dtype")
    if kind is None or kind == _kind(samples):
        return samples
    if kind == "float32":
        return samples.float()
    if kind == "int64" and not (samples.is_floating_point() and bool((samples != samples.round()).any())):
        return samples.long()
    expected = "images of whole numbers from 0 to 255" if kind == "uint8" else "whole numbers"
    raise HoldfastError(f"x holds {_kind(samples)}, but the samples of the run are {expected}")


def _kind(samples: Tensor) -> str:
    return str(samples.dtype).removeprefix("torch.")


def outputs_of(model: nn.Module, samples: Tensor, preprocess: Preprocess) -> Tensor:
    """A model's outputs for stored samples, in evaluation mode, batch by batch, on the CPU."""
    first = next(model.parameters())
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [
                model(preprocess(batch.to(first.device), dtype=first.dtype)).cpu()
                for batch in torch.split(samples, BATCH)
            ]
    except IndexError:
        raise HoldfastError(
            f"the model does not accept x: it holds numbers from {samples.min().item()} to "
            f"{samples.max().item()}, at least one of which is not a valid index, such as an unknown token"
        ) from None
    finally:
        model.train(training)
    return torch.cat(parts)
