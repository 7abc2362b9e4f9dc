"""The model card of a run: a README in Markdown with the model, the data, the settings and the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from holdfast import metrics
from holdfast.core.measures import Measure, primary_measure, score_measure
from holdfast.core.settings import DEFAULTS, SCHEDULE_SETTINGS
from holdfast.data.preprocess import Preprocess
from holdfast.report.round_table import by_class
from holdfast.training.prediction import preprocess_of, task_of

ALWAYS = (
    "rounds",
    "clients_per_round",
    "local_epochs",
    "local_steps",
    "batch_size",
    "optimizer",
    "lr",
    "seed",
)
"""Settings that a card lists even if they have their default."""
SHOWN_CLASSES = 20
MB = 1e6


def model_card(
    experiment: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    federation: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> str:
    """The card of a run with these records."""
    sections = (
        f"# {_name(experiment.get('method'))} on {_name(experiment.get('data'))}",
        _introduction(experiment, records),
        "## Model\n\n" + _table(_model(experiment, weights)),
        "## Federation\n\n" + _table(_federation(experiment, federation)),
        "## Training\n\n" + _table(_training(experiment)),
        "## Results\n\n" + _results(experiment, records),
        "## Loading\n\n" + _loading(experiment),
        "## Versions\n\n" + _table(_versions(experiment)),
    )
    return "\n\n".join(section.rstrip() for section in sections) + "\n"


def _introduction(experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    rounds = len(records)
    return (
        f"A model trained by federated learning with [Holdfast](https://pypi.org/project/holdfast-fl/): "
        f"{_described(experiment.get('method'))}, {experiment.get('clients', '?')} clients, {rounds} "
        f"round{'s' * (rounds != 1)}."
    )


def _model(experiment: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    task = task_of(experiment)
    classes = experiment.get("classes") or []
    return [
        ("architecture", _described(experiment.get("model"))),
        ("tensors", f"{len(weights)}, {sum(tensor.numel() for tensor in weights.values()):,} numbers"),
        ("task", _described(task.describe())),
        (
            "samples",
            f"shape {list(experiment.get('shape', []))}, {experiment.get('sample_dtype', 'float32')}",
        ),
        ("preprocessing", _preprocessing(preprocess_of(experiment), experiment.get("sample_dtype"))),
        (_strata(experiment), _listed(classes)),
    ]


def _has_classes(experiment: Mapping[str, Any]) -> bool:
    return task_of(experiment).name in ("multiclass", "binary")


def _strata(experiment: Mapping[str, Any]) -> str:
    return "classes" if _has_classes(experiment) else "strata"


def _preprocessing(preprocess: Preprocess, kind: str | None) -> str:
    if kind == "int64":
        return "none"
    steps = ["divide by 255"] if kind == "uint8" else []
    if preprocess.mean:
        mean, std = (
            list(values) if len(values) > 1 else values[0] for values in (preprocess.mean, preprocess.std)
        )
        steps.append(f"subtract {mean}, divide by {std}")
    return ", ".join(steps) or "none"


def _federation(experiment: Mapping[str, Any], federation: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("data", _described(experiment.get("data"))),
        ("clients", str(federation.get("clients", experiment.get("clients", "?")))),
        ("partition", _described(experiment.get("partition"))),
    ]
    counts = np.asarray(federation.get("label_counts") or [], np.int64)
    if counts.size:
        sizes = (counts if counts.ndim == 2 else counts.sum(0)).sum(1)
        spread = f"{sizes.min()} to {sizes.max()}, median {np.median(sizes):g}, in all {sizes.sum()}"
        rows.append(("training samples of a client", spread))
    if federation.get("stages", 1) > 1:
        rows.append(("stages of the stream", str(federation["stages"])))
    if federation.get("public"):
        rows.append(("public samples", str(federation["public"])))
    return [*rows, ("hash", f"`{experiment.get('hash', 'unknown')}`")]


def _training(experiment: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("method", _described(experiment.get("method")))]
    for key in dict.fromkeys((*ALWAYS, *SCHEDULE_SETTINGS)):
        value = experiment.get(key)
        if value is not None and (key in ALWAYS or value != DEFAULTS.get(key)):
            rows.append((key, _described(value)))
    for key in ("batchnorm", "classifier"):
        if experiment.get(key) not in (None, DEFAULTS[key]):
            rows.append((key, _described(experiment[key])))
    return rows


def _results(experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    primary, score = primary_measure(experiment), score_measure(experiment)
    stratum = "class" if _has_classes(experiment) else "stratum"
    tested = [record for record in records if record.get(primary.name) is not None]
    rows = []
    if tested:
        last = tested[-1]
        names = [_metric_name(metric) for metric in experiment.get("metrics") or [primary.name]]
        for name in dict.fromkeys((*names, score.name, "loss")):
            if isinstance(value := last.get(name), int | float):
                rows.append((f"{name} of the final model", _number(value, Measure(name))))
        best = (min if primary.less_is_better else max)(record[primary.name] for record in tested)
        rows.append((f"best {primary.name} of any round", _number(best, primary)))
        by_round = [record.get(f"class_{score.name}") for record in tested]
        if len(tested) > 1 and all(by_round):
            lost = metrics.backward_transfer_forgetting(score.sign * np.array(by_round, float))
            rows.append(
                (f"forgetting, mean over {_strata(experiment)} of best minus final", _number(lost, score))
            )
        scores = by_class(experiment, last)
        if len(scores) > 1:
            worst = (max if score.less_is_better else min)(scores, key=lambda name: scores[name])
            rows.append((f"weakest {stratum}, {score.name}", f"{worst}: {_number(scores[worst], score)}"))
    validated = [record["validation"] for record in records if record.get("validation")]
    if validated and isinstance(value := validated[-1].get(primary.name), int | float):
        rows.append((f"{primary.name} on the clients' validation samples", _number(value, primary)))
    if records:
        last = records[-1]
        if last.get("epsilon") is not None:
            rows.append(("ε of the clients' differential privacy", f"{last['epsilon']:.4g}"))
        sent = sum(record.get("bytes_up", 0) + record.get("bytes_down", 0) for record in records)
        rows.append(("sent to and by clients", f"{sent / MB:.4g} MB"))
        seconds = sum((record.get("seconds") or {}).get("total") or 0.0 for record in records)
        rows.append(("training time", f"{seconds:.3g} s"))
    return _table(rows) if rows else "No round was finished."


def _loading(experiment: Mapping[str, Any]) -> str:
    model = experiment.get("model") or {}
    own = isinstance(model, Mapping) and model.get("own")
    opened = 'hf.Run.open("RUN", model=Net())' if own else 'hf.Run.open("RUN")'
    return f"""With Holdfast, from the run's directory:

```python
import holdfast as hf

run = {opened}
run.predict(x)          # x: samples as in the data set, before preprocessing
```

Without it, from an exported file; samples are preprocessed as above:

```python
torch.export.load("model.pt2").module()(x)                            # holdfast export RUN model.pt2
onnxruntime.InferenceSession("model.onnx").run(None, {{"x": x}})        # holdfast export RUN model.onnx
net.load_state_dict(torch.load("model.pt", weights_only=True))        # holdfast export RUN model.pt
net.load_state_dict(safetensors.torch.load_file("model.safetensors"))
```"""


def _versions(experiment: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, str(version)) for name, version in (experiment.get("versions") or {}).items()]
    for key in ("engine", "device", "precision", "machine"):
        if key in experiment:
            rows.append((key, str(experiment[key])))
    return rows


def _name(described: Any) -> str:
    return str(described.get("name", "?") if isinstance(described, Mapping) else described or "?")


def _metric_name(metric: Any) -> str:
    return str(metric["name"] if isinstance(metric, Mapping) else metric)


def _described(value: Any) -> str:
    """A setting as text; for a mapping, its name and then its other entries."""
    if isinstance(value, Mapping):
        ignored = ("name", "file", "sha256", "own")
        others = {key: one for key, one in value.items() if key not in ignored and one is not None}
        rest = ", ".join(f"{key} {_described(one)}" for key, one in others.items())
        name = str(value.get("name", ""))
        if value.get("own"):
            name += " (own)"
        elif "sha256" in value:
            name += f" (SHA-256 {str(value['sha256'])[:12]}…)"
        return ": ".join(filter(None, (name, rest))) or "none"
    if isinstance(value, list | tuple):
        return f"[{_listed(value)}]"
    return str(value)


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(map(_described, values[:SHOWN_CLASSES]))
    left_out = len(values) - SHOWN_CLASSES
    return f"{shown} and {left_out} more" if left_out > 0 else shown


def _number(value: float, measure: Measure) -> str:
    return f"{value:.2%}" if measure.is_share else f"{value:.4g}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = ["| | |", "|---|---|"]
    for row in rows:
        cells = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
