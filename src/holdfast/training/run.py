"""The result of training: records, model and derived figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast import metrics
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.measures import Measure, primary_measure, score_measure
from holdfast.core.schema import validate_content
from holdfast.models.registry import model_from
from holdfast.runs import RunDirectory
from holdfast.runs.directory import BEST_MODEL, MODEL
from holdfast.runs.schemas import TrainedExperiment
from holdfast.runs.tensors import State
from holdfast.training.best_round import BestRound


@dataclass(eq=False)
class Run:
    """The result of a training run."""

    experiment: dict[str, Any]
    records: list[dict[str, Any]]  # one for each round, as in metrics.jsonl
    model: nn.Module
    path: Path | None = None
    peak_bytes: int | None = None  # peak memory: of the GPU if it was used, else RAM
    interrupted: bool = False  # whether rounds are left out, after an interrupt
    best_round: int | None = None  # the round with the best primary metric on the clients' validation samples
    best_model: nn.Module | None = None  # the global model after that round

    def __repr__(self) -> str:
        where = "" if self.path is None else f", in '{self.path}'"
        measure = self.primary
        where_measured = "" if self._tested else "validation "
        summary = f"{len(self.records)} rounds, {where_measured}{measure.name} {measure.text(self.score)}"
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
        outputs = experiment.get("outputs", len(experiment["classes"]))
        spec, shape = model_from(experiment["model"]), tuple(experiment["shape"])

        def load(name: str, weights: State) -> nn.Module:
            model = spec.build(shape, outputs, experiment["seed"])
            try:
                model.load_state_dict(weights)
            except RuntimeError:
                raise HoldfastError(
                    f"{path} is damaged: {name} does not have the tensors of the model in experiment.yaml; restore "
                    "both from a copy"
                ) from None
            return model.eval()

        run = cls(experiment, directory.records(), load(MODEL, weights), directory.path)
        if (best := directory.load_best_model()) is not None:
            run.best_model = load(BEST_MODEL, best)
            run.best_round = BestRound(run.primary, run.records).round
        return run

    @property
    def primary(self) -> Measure:
        """The metric by which the run is judged, the first of its ``metrics``, and its direction."""
        return primary_measure(self.experiment)

    @property
    def score(self) -> float:
        """The primary metric of the final model on the test set; without one, on the clients' validation samples."""
        name = self.primary.name
        return float(self.metric(name)[-1] if self._tested else self.validation(name)[-1])

    def metric(self, name: str) -> np.ndarray:
        """``[tested rounds]``: a metric of the global model on the test set, NaN where it was not defined."""
        tested = self._tested
        if not tested:
            raise HoldfastError("no round of this run was tested on a test set; see `validation`")
        if name not in tested[-1]:
            known = [key for key, value in tested[-1].items() if isinstance(value, float)]
            raise unknown("metric of this run", name, known)
        return np.array([record.get(name) for record in tested], float)

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended before its last round, since no better model on the validation samples was found."""
        return bool(self.records) and "stopped_early" in self.records[-1]

    def validation(self, name: str | None = None) -> np.ndarray:
        """``[validated rounds]``: a metric of the global model on the clients' validation samples, by samples.

        By default the primary one.
        """
        found = [record["validation"] for record in self.records if "validation" in record]
        if not found:
            raise HoldfastError("this run has no validation samples; train with validation=0.1")
        name = self.primary.name if name is None else name
        if name not in found[-1]:
            known = [key for key, value in found[-1].items() if not isinstance(value, (list, dict))]
            raise unknown("validation metric of this run", name, known)
        return np.array([each[name] for each in found], float)

    @property
    def accuracy(self) -> float:
        """The final model's accuracy on the test set."""
        return float(self.metric("accuracy")[-1])

    @property
    def class_accuracy(self) -> np.ndarray:
        """``[tested rounds, classes]``: the global model's accuracy on each class."""
        if "class_accuracy" not in self._tested[-1]:
            raise HoldfastError(
                f"this run has no accuracy by class, but {score_measure(self.experiment).name}: see `class_score`"
            )
        return self.class_score

    @property
    def class_score(self) -> np.ndarray:
        """``[tested rounds, classes]``: by class, bin or site, the accuracy or what the task has in its place."""
        key = f"class_{score_measure(self.experiment).name}"
        return np.array([r[key] for r in self._tested], float)

    @property
    def domain_accuracy(self) -> dict[str, np.ndarray]:
        """``[tested rounds]`` for each domain: the global model's accuracy; empty where there are no domains."""
        names = self._tested[-1].get("domain_accuracy", {})
        return {name: np.array([r["domain_accuracy"][name] for r in self._tested], float) for name in names}

    @property
    def forgetting(self) -> float:
        """Mean over classes of (best accuracy ever - final accuracy), or of the error gained since its least."""
        sign = score_measure(self.experiment).sign
        return metrics.backward_transfer_forgetting(sign * self.class_score)

    def rounds_to(self, target: float) -> int | None:
        """The first round whose model reaches this value of the primary metric."""
        sign, rounds = self.primary.sign, [r["round"] for r in self._tested]
        return metrics.rounds_to_target(sign * self.metric(self.primary.name), sign * target, rounds)

    @property
    def _tested(self) -> list[dict[str, Any]]:
        return [r for r in self.records if self.primary.name in r]
