"""The result of training: records, model, predictions, figures, files."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from holdfast import metrics
from holdfast.core import files
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.measures import Measure, primary_measure, score_measure
from holdfast.core.schema import validate_content
from holdfast.core.spec import Count, named, validate
from holdfast.core.trees import Tree, unflatten
from holdfast.methods.base import Method, Server
from holdfast.methods.registry import method_from
from holdfast.models.network import Output
from holdfast.models.registry import model_from
from holdfast.report import notebook
from holdfast.report.loading import StoredRun, group_runs, read_federation, read_probe
from holdfast.report.page import write_report
from holdfast.report.printing import plot
from holdfast.report.round_table import round_rows
from holdfast.runs import Checkpoint, RunDirectory
from holdfast.runs.comparison import is_baseline
from holdfast.runs.directory import BEST_MODEL, EXPERIMENT, FEDERATION, LOCK, METRICS, MODEL, PROBE
from holdfast.runs.metrics_file import plain, to_line
from holdfast.runs.schemas import TrainedExperiment
from holdfast.runs.tensors import State
from holdfast.tasks.base import Task
from holdfast.training.best_round import BestRound
from holdfast.training.checkpointing import close
from holdfast.training.description import audit_start, write_json
from holdfast.training.export import Exported, export
from holdfast.training.prediction import ScoringModel, outputs_of, preprocess_of, stored_samples, task_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

NO_PERSONAL = "use run.model, or train with a method such as ditto, fedrep or fedbabu"


@dataclass(eq=False, repr=False)
class Run:
    """The result of a training run.

    A notebook shows it as a small table. `Run.save` and `Run.open` write and read it; a run that was trained with
    ``out`` is on the disk already.
    """

    experiment: dict[str, Any]
    records: list[dict[str, Any]]  # one for each round, as in metrics.jsonl
    model: nn.Module
    path: Path | None = None
    peak_bytes: int | None = None  # peak memory: of the GPU if it was used, else RAM
    interrupted: bool = False  # whether rounds are left out, after an interrupt
    best_round: int | None = None  # the round with the best primary metric on the clients' validation samples
    best_model: nn.Module | None = None  # the global model after that round
    method: Method | None = None  # None for a run read from a directory; its method is created when needed
    federation: dict[str, Any] = field(default_factory=dict)  # as in federation.json
    probe: dict[str, Any] = field(default_factory=dict)  # as in probe.json
    checkpoint: Checkpoint | None = None  # the last state of a run without a directory

    def __repr__(self) -> str:
        where = "" if self.path is None else f", in '{self.path}'"
        return f"Run({self._method_name}, {self._rounds}, {self._result}{where})"

    def _repr_html_(self) -> str:
        experiment, seconds = self.experiment, self._total("seconds")
        data, model = (_name(experiment.get(key)) for key in ("data", "model"))
        score = self.primary.name
        curve = self.metric(score) if self._tested else np.array(self._validated(score))
        rows = {
            "data": f"{data}, {experiment.get('clients', '?')} clients",
            "model": model,
            "rounds": self._rounds,
            "result": self._result,
        }
        if len(self._tested) > 1:
            rows["forgetting"] = score_measure(experiment).text(self.forgetting)
        if seconds:
            rows["time"] = f"{seconds:.3g} s on {experiment.get('machine', 'an unknown machine')}"
        if self.path is not None:
            rows["directory"] = str(self.path)
        drawn = notebook.sparkline(curve.tolist(), f"{score} over rounds")
        return notebook.properties(self._method_name, rows, drawn)

    @property
    def _method_name(self) -> str:
        return _name(self.experiment.get("method"))

    @property
    def _rounds(self) -> str:
        done, asked = len(self.records), self.experiment.get("rounds", len(self.records))
        if self.interrupted or self.stopped_early:
            return f"{done} of {asked} rounds"
        return f"{done} round{'s' * (done != 1)}"

    def _validated(self, name: str) -> list[float]:
        """A metric on the clients' validation samples in every round that has it."""
        return [record["validation"][name] for record in self.records if name in record.get("validation", ())]

    @property
    def _result(self) -> str:
        """The primary metric with its value, or a note that it was not measured."""
        if not self._tested and not self._validated(self.primary.name):
            return "not tested"
        where = "" if self._tested else "validation "
        return f"{where}{self.primary.name} {self.primary.text(self.score)}"

    def _total(self, key: str) -> float:
        return sum((record.get(key) or {}).get("total") or 0.0 for record in self.records)

    # Files ----------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path, *, model: nn.Module | None = None, method: Method | None = None) -> Run:
        """A finished run, read from its directory.

        ``model`` and ``method`` are needed only for a run with a user-defined model or method that has no reference.
        ``model`` is a module of the same architecture, which is copied; ``method`` is used for predictions.
        """
        directory = RunDirectory.open(path)
        experiment, weights = directory.experiment, directory.load_model()
        validate_content(experiment, TrainedExperiment, f"{directory.path}/experiment.yaml")
        if model is None and experiment["model"].get("own"):
            raise HoldfastError(
                f"{path} holds a custom model, '{experiment['model']['name']}'; create it in Python and pass it, "
                f"Run.open('{path}', model=...) (models given by reference, such as net.py:make_net, are "
                "created automatically)"
            )
        if model is not None and not isinstance(model, nn.Module):
            raise HoldfastError(f"model is {named(model)}; it must be a torch.nn.Module like that of the run")
        outputs = experiment.get("outputs", len(experiment["classes"]))
        shape = tuple(experiment["shape"])
        spec = None if model is not None else model_from(experiment["model"])

        def load(name: str, weights: State) -> nn.Module:
            made = copy.deepcopy(model) if spec is None else spec.build(shape, outputs, experiment["seed"])
            assert made is not None
            try:
                made.load_state_dict(weights)
            except RuntimeError:
                if model is not None:
                    raise HoldfastError(
                        f"model does not have the tensors of the run in {path}; pass a model of the same "
                        "architecture"
                    ) from None
                raise HoldfastError(
                    f"{path} is damaged: {name} does not have the tensors of the model in experiment.yaml; restore "
                    "both from a copy"
                ) from None
            return made.eval()

        run = cls(experiment, directory.records(), load(MODEL, weights), directory.path, method=method)
        run.federation, run.probe = read_federation(directory.path), read_probe(directory.path)
        if (best := directory.load_best_model()) is not None:
            run.best_model = load(BEST_MODEL, best)
            run.best_round = BestRound(run.primary, run.records).round
        return run

    def save(self, path: str | Path) -> Path:
        """Write the run to a new directory, with the same content as ``out=path``; returns the path.

        An unfinished run can be resumed there. A run that has a directory is copied.
        """
        path = Path(path)
        if self.path is not None:
            if any((path / name).exists() for name in (EXPERIMENT, METRICS)):
                raise HoldfastError(f"{path} already holds a run; choose another path")
            RunDirectory.open(self.path)
            left_out = shutil.ignore_patterns(f"{LOCK}*", "scratch")
            with files.writing(path):
                shutil.copytree(self.path, path, ignore=left_out, dirs_exist_ok=True)
            return path
        checkpoint = self._checkpoint
        directory = RunDirectory.create(path, self.experiment)
        with ExitStack() as stack:
            stack.enter_context(directory.lock())
            write_json(directory, FEDERATION, self.federation)
            for record in self.records:
                directory.append(record)
            audit_start(directory, "saved", len(self.records), self.experiment)
            if self.probe:
                write_json(directory, PROBE, self.probe)
            last = (checkpoint.round, checkpoint.tensors, checkpoint.meta, checkpoint.clients)
            if self.interrupted:
                directory.save_checkpoint(*last)
                directory.audit("stopped", round=len(self.records))
            else:
                best = None if self.best_model is None else self.best_model.state_dict()
                close(directory, last, self.model.state_dict(), best, stack.pop_all())
        return path

    def export(self, path: str | Path, format: str | None = None) -> Path:
        """Write the final model, the metrics or a model card to a file for other programs; returns the path.

        Formats, by default that of the file's ending: ``state_dict`` (.pt), ``safetensors``, ``torch.export`` (.pt2)
        and ``onnx``, programs from preprocessed samples to scores with any batch size, ``metrics`` (.csv), and
        ``card`` (.md), a description in Markdown.
        """
        what = Exported(
            self.experiment, self.records, self.federation, self.model.state_dict, lambda: self.scoring_model
        )
        return export(what, path, format)

    # Tables and figures ---------------------------------------------------------------------------------

    def to_frame(self) -> pandas.DataFrame:
        """A pandas table with a row for each round and a column for each number of its record.

        Scores by class and domain have columns such as ``accuracy_7``.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise HoldfastError("to_frame needs pandas: pip install pandas") from None
        return pandas.DataFrame(round_rows(self.experiment, self.records))

    def plot(self, name: str | None = None) -> Figure:
        """A matplotlib figure of the run, which notebooks show.

        ``name`` is one of ``holdfast.report.FIGURES``, such as ``"accuracy"``, ``"classes"`` or ``"forgetting"``, or a
        metric of the records, such as ``"loss"``, ``"train_loss"`` or ``"class_accuracy"``; by default the primary
        metric.
        """
        runs = self.stored_runs()
        return plot(runs[0].measures[0].name if name is None else name, group_runs(runs))

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's page, one HTML file, and return its path.

        By default it is ``report.html`` in the run's directory, or in a temporary one for a run without a directory.
        """
        return write_report(self, default_page(self.path) if path is None else path)

    def stored_runs(self) -> list[StoredRun]:
        """The run in the form that figures and tables use."""
        if not self.records:
            raise HoldfastError("the run has no finished round, so there is nothing to show")
        seed = self.experiment.get("seed")
        name = f"{self._method_name}-seed-{seed}" if self.path is None else self.path.resolve().name
        records = [json.loads(to_line(record)) for record in self.records]
        probe = self.probe or ({} if self.path is None else read_probe(self.path))
        baseline = self.path is not None and is_baseline(self.path)
        return [StoredRun(name, plain(self.experiment), records, self.federation, probe, baseline)]

    # Prediction -----------------------------------------------------------------------------------------

    def predict(self, x: Any, client: int | None = None) -> np.ndarray:
        """The predictions for each sample, in the form of the task's targets.

        Classes are indices into ``run.experiment["classes"]``.

        Args:
            x: a NumPy array or a torch tensor of samples as they were given to the data set, ``[N, ...]``, which are
                preprocessed like the run's test samples; or a `Dataset`, whose test samples are used.
                `Dataset.transform` converts the rows of a table to samples.
            client: predict with this client's `personal_model` instead of the global model.
        """
        task, outputs = self._outputs(x, client)
        predicted: np.ndarray = task.predicted(outputs).numpy()
        return predicted

    def predict_proba(self, x: Any, client: int | None = None) -> np.ndarray:
        """The probability of each class or label, as ``[N, C]``; arguments as of `predict`."""
        task, outputs = self._outputs(x, client)
        probabilities: np.ndarray = task.probabilities(outputs).numpy()
        return probabilities

    def _outputs(self, x: Any, client: int | None) -> tuple[Task, Tensor]:
        task, samples = task_of(self.experiment), stored_samples(x, self.experiment)
        model = self.scoring_model if client is None else self.personal_model(client)
        return task, outputs_of(model, samples, preprocess_of(self.experiment))

    def personal_model(self, client: int) -> nn.Module:
        """A client's own model, with its state after its last round; its inputs are preprocessed samples.

        It consists of the final global parameters and the client's own, and predicts by the method's rule for clients.
        """
        method, batchnorm = self._made_method, self.experiment.get("batchnorm")
        own_parts = method.overrides("personal_params") or method.overrides("personal_logits")
        if not own_parts and batchnorm != "local":
            if method.overrides("initial_params"):
                raise HoldfastError(
                    f"{method.name} has its own initial_params, but no personal_params, the hook that gives a client's "
                    "own model after training; define it"
                )
            raise HoldfastError(
                f"{method.name} trains one model for all clients and no personal models; {NO_PERSONAL}"
            )
        validate("client", client, Count)
        if not any(client in record["participants"] for record in self.records):
            count = self.experiment.get("clients")
            range_ = "" if count is None else f" (clients are numbered from 0 to {count - 1})"
            raise HoldfastError(
                f"client {client} took part in no round, so it has no model of its own{range_}"
            )
        stored = self._checkpoint.client(client)
        if stored is None and (method.overrides("init_client_state") or method.overrides("personal_logits")):
            raise HoldfastError(
                f"the state of client {client} was not kept after the last round, so its model cannot be "
                "restored; only simulations keep states, and earlier versions did not"
            )
        state: Tree = unflatten(dict(stored or {}))
        server, own = self._server, state.get("method", {})
        net = copy.deepcopy(self.model).cpu()
        params = method.personal_params(server, own, client)
        net.load_state_dict({**server.buffers, **params, **state.get("norm", {})}, strict=False)
        if not method.overrides("personal_logits"):
            return net.eval()
        return ScoringModel(net, self.experiment.get("classifier"), method.personal_logits, own)

    @cached_property
    def _made_method(self) -> Method:
        if self.method is not None:
            return self.method
        described = self.experiment["method"]
        if described.get("own"):
            raise HoldfastError(
                f"{self.path} was trained with a custom method, '{described['name']}', which defines its "
                f"predictions; pass the method: Run.open('{self.path}', method=...)"
            )
        return method_from(described)

    @property
    def scoring_model(self) -> nn.Module:
        """The final model with the method's own rule for predictions, if it has one, as in tests."""
        method = self._made_method
        if not method.overrides("global_logits"):
            return self.model
        server = self._server

        def scores(out: Output, state: Tree) -> Tensor:
            return method.global_logits(out, replace(server, state=state))

        return ScoringModel(
            copy.deepcopy(self.model), self.experiment.get("classifier"), scores, server.state
        )

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        """The state after the last round."""
        if self.checkpoint is not None:
            return self.checkpoint
        found = None if self.path is None else RunDirectory.open(self.path).load_checkpoint()
        if found is None:
            raise HoldfastError(
                f"{self.path or 'this run'} has no checkpoint, which contains the states of the clients and "
                "of the server"
            )
        return found

    @property
    def _server(self) -> Server:
        checkpoint = self._checkpoint
        tree = unflatten(dict(checkpoint.tensors))
        params, buffers, state = (tree.get(key, {}) for key in ("params", "buffers", "state"))
        return Server(params, buffers, state, checkpoint.round)

    # Results --------------------------------------------------------------------------------------------

    @property
    def primary(self) -> Measure:
        """The primary metric of the run, the first of its ``metrics``, and its direction."""
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
        """Whether early stopping on the validation samples ended the run before its last round."""
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
        self._require_tests()
        if "class_accuracy" not in self._tested[-1]:
            raise HoldfastError(
                f"this run has no accuracy by class, but {score_measure(self.experiment).name}: see `class_score`"
            )
        return self.class_score

    @property
    def class_score(self) -> np.ndarray:
        """``[tested rounds, classes]``: the accuracy, or the task's measure in its place, by class, bin or site."""
        self._require_tests()
        key = f"class_{score_measure(self.experiment).name}"
        return np.array([r[key] for r in self._tested], float)

    @property
    def domain_accuracy(self) -> dict[str, np.ndarray]:
        """``[tested rounds]`` for each domain: the global model's accuracy; empty without domains."""
        names = self._tested[-1].get("domain_accuracy", {}) if self._tested else {}
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

    def _require_tests(self) -> None:
        if not self._tested:
            raise HoldfastError("this run has no test on a test set; see `validation`")

    @property
    def _tested(self) -> list[dict[str, Any]]:
        return [r for r in self.records if self.primary.name in r]


def default_page(directory: Path | None) -> Path:
    """The default path of a report."""
    return (Path(mkdtemp(prefix="holdfast-")) if directory is None else directory) / "report.html"


def _name(described: Any) -> str:
    return str(described.get("name", "?") if isinstance(described, Mapping) else described)
