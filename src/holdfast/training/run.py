"""The result of training: records, model and derived figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast import metrics
from holdfast.core.errors import HoldfastError
from holdfast.core.schema import validate_content
from holdfast.models.registry import model_from
from holdfast.runs import RunDirectory
from holdfast.runs.schemas import TrainedExperiment


@dataclass(eq=False)
class Run:
    """The result of a training run."""

    experiment: dict[str, Any]
    records: list[dict[str, Any]]  # one for each round, as in metrics.jsonl
    model: nn.Module
    path: Path | None = None
    peak_bytes: int | None = None  # peak memory: of the GPU if it was used, else RAM
    interrupted: bool = False  # whether rounds are left out, after an interrupt

    def __repr__(self) -> str:
        where = "" if self.path is None else f", in '{self.path}'"
        summary = f"{len(self.records)} rounds, accuracy {self.accuracy:.2%}"
        return f"Run({self.experiment['method']['name']}, {summary}{where})"

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """A finished run, read from its directory; its model must be one that can be made again by name."""
        directory = RunDirectory.open(path)
        experiment, weights = directory.experiment, directory.load_model()
        validate_content(experiment, TrainedExperiment, f"{directory.path}/experiment.yaml")
        if experiment["model"].get("own"):
            raise HoldfastError(
                f"{path} holds a model of your own, '{experiment['model']['name']}': make it in Python and load "
                f"RunDirectory.open('{path}').load_model() into it (one that is given by reference, net.py:make_net, "
                "is made again here)"
            )
        model = model_from(experiment["model"]).build(
            tuple(experiment["shape"]), len(experiment["classes"]), experiment["seed"]
        )
        try:
            model.load_state_dict(weights)
        except RuntimeError:
            raise HoldfastError(
                f"{path} is damaged: model.safetensors does not have the tensors of the model in experiment.yaml; "
                "restore both from a copy"
            ) from None
        return cls(experiment, directory.records(), model.eval(), directory.path)

    @property
    def accuracy(self) -> float:
        """The final model's accuracy on the test set."""
        return float(self._tested[-1]["accuracy"])

    @property
    def class_accuracy(self) -> np.ndarray:
        """``[tested rounds, classes]``: the global model's accuracy on each class."""
        return np.array([r["class_accuracy"] for r in self._tested], float)

    @property
    def domain_accuracy(self) -> dict[str, np.ndarray]:
        """``[tested rounds]`` for each domain: the global model's accuracy; empty where there are no domains."""
        names = self._tested[-1].get("domain_accuracy", {})
        return {name: np.array([r["domain_accuracy"][name] for r in self._tested], float) for name in names}

    @property
    def forgetting(self) -> float:
        """Mean over classes of (best accuracy ever - final accuracy)."""
        return metrics.backward_transfer_forgetting(self.class_accuracy)

    def rounds_to(self, target: float) -> int | None:
        """The first round whose model reaches this accuracy."""
        tested = self._tested
        return metrics.rounds_to_target([r["accuracy"] for r in tested], target, [r["round"] for r in tested])

    @property
    def _tested(self) -> list[dict[str, Any]]:
        return [r for r in self.records if "accuracy" in r]
