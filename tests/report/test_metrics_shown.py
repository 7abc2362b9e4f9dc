"""Every metric of every task, also one's own, from metrics.jsonl to leaderboard, figures and command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.report.loading import group_runs, load_runs
from holdfast.report.page import page_model
from holdfast.report.tables import leaderboard, table
from holdfast.runs import list_runs
from holdfast.tasks.registry import as_task

RNG = np.random.default_rng(0)
N = 60
X = RNG.normal(size=(N, 4)).astype(np.float32)
Z = X @ np.array([1.0, -2, 0.5, 0])
IMAGES = RNG.random((N, 2, 4, 4)).astype(np.float32)
TOKENS = RNG.integers(0, 5, (N, 6))


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.embedding(x.long()))
        return out


TASKS: dict[str, tuple[Any, Any, Any]] = {
    "multiclass": (X, np.digitize(Z, [-1, 1]), "linear"),
    "binary": (X, (Z > 0).astype(int), "linear"),
    "multilabel": (X, np.stack([Z > 0, X[:, 0] > 0], 1), "linear"),
    "regression": (X, Z, "linear"),
    "counts": (X, RNG.poisson(np.exp(Z / 3)).clip(0, 5), "linear"),
    "survival": (X, np.stack([RNG.exponential(np.exp(-Z)) + 0.1, RNG.random(N) < 0.7], 1), "linear"),
    "sequence": (TOKENS, (TOKENS + 1) % 5, NextToken()),
    "segmentation": (IMAGES, (IMAGES[:, 0] > IMAGES[:, 1]).astype(int), nn.Conv2d(2, 2, 1)),
}


def largest_error(outputs: np.ndarray, y: np.ndarray) -> float:
    return float(np.abs(outputs.reshape(len(y), -1)[:, 0] - y.reshape(len(y), -1)[:, 0]).max())


largest_error.less_is_better = True  # type: ignore[attr-defined]


def trained(task: str, out: Path, first: str | None = None, **changes: Any) -> hf.Run:
    x, y, model = TASKS[task]
    site = hf.Group(("a", "b"), np.arange(N) % 2, np.arange(30) % 2)
    data = hf.Dataset.from_arrays(x, y, x[:30], y[:30], task=task, groups={"site": site})
    names: list[Any] = list(as_task(task).metrics)
    names.sort(key=lambda name: name != first)
    own = [largest_error] if task not in ("sequence", "segmentation") else []
    return hf.train(
        "fedavg", model, hf.federate(data, "iid", clients=3), rounds=3, batch_size=10, validation=0.2, patience=3,
        metrics=names + own, out=out, progress=False, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_every_metric_is_shown_wherever_results_are(task: str, tmp_path: Path) -> None:
    run = trained(task, tmp_path / "run")
    names = [*as_task(task).metrics, *([] if task in ("sequence", "segmentation") else ["largest_error"])]
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for name in names:
        assert np.isfinite(record[name]), name
        assert record[f"site_{name}"].keys() == {"a", "b"}
        assert name in record["validation"]
    primary = run.primary
    stored = load_runs([tmp_path / "run"])
    board = leaderboard(group_runs(stored))
    by_name = {column.name: float(board.values[0][place][0]) for place, column in enumerate(board.columns)}
    for name in names:
        title = f"{name} (%)" if name in ("accuracy", "balanced_accuracy") else name
        assert by_name[f"final {title}" if name == primary.name else title] == pytest.approx(record[name])
    values = [r[primary.name] for r in run.records]
    best = min(values) if primary.less_is_better else max(values)
    assert next(v for k, v in by_name.items() if k.startswith("best ")) == pytest.approx(best)
    assert "final" in table([tmp_path / "run"])
    figures = {figure["name"]: figure for figure in page_model(stored)["figures"]}
    shown = {panel["y_label"] for panel in figures["accuracy"]["panels"]}
    assert shown >= set(names)
    (summary,) = list_runs(tmp_path)
    assert (summary.measure, summary.accuracy) == (primary, pytest.approx(record[primary.name]))
    call = CliRunner()
    shown = json.loads(call.invoke(app, ["show", str(tmp_path / "run"), "--json"]).stdout)
    assert [shown[name] for name in names] == pytest.approx([record[name] for name in names])
    printed = call.invoke(app, ["show", str(tmp_path / "run")]).stdout
    assert all(name in printed for name in names)


@pytest.mark.parametrize(("task", "metric"), [("regression", "mae"), ("binary", "auprc"), ("counts", "rmse")])
def test_early_stopping_and_the_best_model_follow_the_first_metric(
    task: str, metric: str, tmp_path: Path
) -> None:
    run = trained(task, tmp_path, metric)
    values = run.validation(metric) * (-1 if metric in ("mae", "rmse") else 1)
    assert run.best_round == int(values.argmax()) + 1


def test_errors_are_compared_the_other_way_round(tmp_path: Path) -> None:
    x, y, _ = TASKS["regression"]
    data = hf.Dataset.from_arrays(x, y, x[:30], y[:30])
    found = hf.compare(
        ["fedavg", "local"], "linear", hf.federate(data, "iid", clients=3), seeds=2, rounds=4, batch_size=10, lr=0.05,
        out=tmp_path, progress=False,
    )  # fmt: skip
    assert found.measure.name == "rmse"
    for row in found.rows:
        curves = [
            [json.loads(line)["rmse"] for line in path.read_text().splitlines()]
            for path in sorted(tmp_path.glob(f"{row.method}/*/metrics.jsonl"))
        ]
        assert row.score == [curve[-1] for curve in curves]
        for reached, curve in zip(row.rounds_to_target, curves, strict=True):
            assert reached == next((t for t, v in enumerate(curve, 1) if v <= found.target), None)
    assert found.target == pytest.approx(
        min(np.mean([best for best in _lowest(tmp_path, m)]) for m in ("fedavg", "local")) / 0.95
    )
    board = leaderboard(group_runs(load_runs([tmp_path])))
    finals = [board.mean(row, [c.name for c in board.columns].index("final rmse")) for row in (0, 1)]
    assert finals == sorted(finals)


def _lowest(out: Path, method: str) -> list[float]:
    files = out.glob(f"{method}/*/metrics.jsonl")
    return [min(json.loads(line)["rmse"] for line in file.read_text().splitlines()) for file in files]


def test_runs_without_a_test_set_are_judged_on_validation_samples(tmp_path: Path) -> None:
    x, y, model = TASKS["regression"]
    data = hf.Dataset.from_arrays(x, y, task="regression")
    data = replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])
    federation = hf.federate(data, "iid", clients=3)
    settings = {"rounds": 3, "validation": 0.2, "evaluate_locals": False, "lr": 0.01}
    compared = hf.compare(["fedavg", "fedprox"], model, federation, seeds=2, out=tmp_path, **settings)
    run = hf.Run.open(tmp_path / "fedavg" / "seed-0")
    assert compared.rows[0].score[0] == run.validation("rmse")[-1] == run.score
    assert str(compared).startswith("method   validation rmse  forgetting")
    assert compared.to_frame()["validation.rmse"][0] == run.score
    assert run.plot().axes[0].get_lines()[0].get_ydata().tolist() == run.validation("rmse").tolist()
    assert "svg" in run._repr_html_()
    assert compared.report().exists()
    board = leaderboard(group_runs(load_runs([tmp_path])))
    names = [column.name for column in board.columns]
    assert board.values[0][names.index("final validation rmse")][0] in compared.rows[0].score


def test_runs_judged_by_different_metrics_make_a_report(tmp_path: Path) -> None:
    for task in ("survival", "regression"):
        trained(task, tmp_path / task)
    groups = group_runs(load_runs([tmp_path]))
    board = leaderboard(groups)
    assert json.dumps(board.to_json(), allow_nan=False)
    assert "nan" not in table([tmp_path])
    assert all(column.name != "personal accuracy (%)" for column in board.columns)
