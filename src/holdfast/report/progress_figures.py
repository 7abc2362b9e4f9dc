"""Figures of accuracy: over rounds, by class, by domain, by stage of a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.core.measures import score_measure
from holdfast.metrics.arrays import mean_measured
from holdfast.report.curves import (
    FigureContent,
    NotRecorded,
    final_values,
    label_with_seed,
    line_over_seeds,
    lines_over_seeds,
    recorded_curve,
    recorded_lines,
)
from holdfast.report.loading import Curve, RunGroup, StoredRun, columns, common_measures, matrix, vector
from holdfast.report.panels import Bar, Bars, Heatmap, HeatmapStep, Lines, Panel, thin

MAX_COLUMNS = 400  # of a heat map
MAX_CLIENTS = 40  # of a panel of bars

TRANSFER = {
    "average_forgetting": "forgetting",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
}

STREAM_ACCURACIES = (
    ("A_glo", "Global model, all test classes"),
    ("A_loc", "Clients' own models, all test classes"),
)


def accuracy(groups: Sequence[RunGroup]) -> FigureContent:
    """Metrics and loss of the global model over rounds, and accuracy of the clients' own models."""
    found = [(measure, recorded_lines(groups, measure.name)) for measure in common_measures(groups)]
    panels = [
        Lines(f"Test {m.name} of the global model", "round", m.name, lines, percent=m.is_share)
        for m, lines in found
        if lines
    ]
    if not panels:
        raise NotRecorded("no round was evaluated")
    personal = recorded_lines(groups, "local_in")
    if personal and all(score_measure(run.experiment).is_share for group in groups for run in group.runs):
        panels.append(Lines("Personal accuracy, mean of clients", "round", "accuracy", personal))
    loss = recorded_lines(groups, "loss")
    if loss:
        tasks = {
            (run.experiment.get("task") or {}).get("name", "multiclass") for g in groups for run in g.runs
        }
        unit = "cross-entropy" if tasks == {"multiclass"} else "loss"
        panels.append(Lines("Test loss of the global model", "round", unit, loss, percent=False))
    last = "; ".join(
        f"{m.name} at the last round: {final_values(lines, m.is_share)}" for m, lines in found if lines
    )
    return panels, f"{last[0].upper()}{last[1:]}."


def classes(groups: Sequence[RunGroup]) -> FigureContent:
    """Heat maps of class by round, one for each group."""
    panels, weakest, lost = [], [], []
    for group in groups:
        run = group.runs[0]
        if not len(run.rounds):
            continue
        kept = thin(len(run.rounds), MAX_COLUMNS)
        step = HeatmapStep("", run.classes, run.class_accuracy[kept].T)
        rounds = [f"{number:.0f}" for number in run.rounds[kept]]
        label = label_with_seed(group)
        panels.append(Heatmap(label, "round", "class", rounds, [step]))
        final = run.class_accuracy[-1]
        if np.isfinite(final).any():
            worst = int(np.nanargmin(final))
            weakest.append(f"{label}: {run.classes[worst]} ({final[worst]:.1%})")
            lost += [f"{label}: {text}" for text in _most_forgotten(run)]
    if not panels:
        raise NotRecorded("no per-class accuracy was recorded")
    forgotten = f"Forgotten most: {'; '.join(lost)}. " if lost else ""
    return panels, f"{forgotten}Weakest class at the end: {'; '.join(weakest)}."


def _most_forgotten(run: StoredRun) -> list[str]:
    """The class with the largest loss from its best round to the last, as text; empty without a loss."""
    drop = run.class_accuracy.max(axis=0) - run.class_accuracy[-1]
    if not np.nanmax(drop) > 0:
        return []
    worst = int(np.nanargmax(drop))
    own = run.class_accuracy[:, worst]
    best = int(own.argmax())
    return [
        f"{run.classes[worst]} ({own[best]:.1%} in round {run.rounds[best]:.0f}, {own[-1]:.1%} at the end)"
    ]


def domains(groups: Sequence[RunGroup]) -> FigureContent:
    """Heat maps of domain by round, one for each group."""
    panels, finals = [], []
    for group in groups:
        run = group.runs[0]
        found = [record for record in run.records if record.get("domain_accuracy")]
        if not found:
            continue
        names = list(found[-1]["domain_accuracy"])
        found = [found[index] for index in thin(len(found), MAX_COLUMNS)]
        values = matrix([[record["domain_accuracy"].get(name) for name in names] for record in found])
        rounds = [str(record["round"]) for record in found]
        step = HeatmapStep("", names, values.T)
        panels.append(Heatmap(label_with_seed(group), "round", "domain", rounds, [step]))
        finals.append(
            f"{group.label}: " + ", ".join(f"{n} {v:.1%}" for n, v in zip(names, values[-1], strict=True))
        )
    if not panels:
        raise NotRecorded("the data has no domains, so no per-domain accuracy was recorded")
    return panels, f"At the last round: {'; '.join(finals)}."


def stages(groups: Sequence[RunGroup]) -> FigureContent:
    """A stream's accuracies: on the tasks seen so far, on all classes, and on each task after each stage."""
    seen = lines_over_seeds(groups, _seen_tasks)
    if not seen:
        staged = any(record.get("stage") for group in groups for run in group.runs for record in run.records)
        untested = "the clients' models were not tested on their tasks (train with --evaluate-locals)"
        raise NotRecorded(untested if staged else "these runs did not train on a stream")
    panels: list[Panel] = [Lines("Tasks seen so far, mean of the last ten epochs", "stage", "A_sel", seen)]
    for key, title in STREAM_ACCURACIES:
        lines = []
        for group in groups:
            every = line_over_seeds(group, recorded_curve(f"stream.{key}"))
            minority = line_over_seeds(
                group, recorded_curve(f"stream.{key}_t"), dashed=True, suffix=", minority"
            )
            lines += [line for line in (every, minority) if line is not None]
        if lines:
            panels.append(Lines(title, "round", key, lines))
    for build in (_task_matrix, _transfer):
        panels += [panel for group in groups if (panel := build(group)) is not None]
    return panels, f"A_sel at the last stage: {final_values(seen)}."


def _stream_records(run: StoredRun) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """(epoch, stage, stream record) of each round; a smaller stage than in the round before begins an epoch."""
    epoch = previous = 0
    for record in run.records:
        stage = int(record.get("stage") or 0)
        epoch += stage < previous
        previous = stage
        yield epoch, stage, record.get("stream") or {}


def _seen_tasks(run: StoredRun) -> Curve:
    last = {
        (epoch, stage): stream["A_sel"]
        for epoch, stage, stream in _stream_records(run)
        if stream.get("A_sel") is not None
    }
    recent = sorted({epoch for epoch, _ in last})[-10:]
    by_stage: dict[int, list[float]] = {}
    for (epoch, stage), value in last.items():
        if epoch in recent:
            by_stage.setdefault(stage, []).append(value)
    return columns((stage, float(np.mean(by_stage[stage]))) for stage in sorted(by_stage))


def _task_matrix(group: RunGroup) -> Heatmap | None:
    """Mean accuracy of the participants on each of their tasks after each stage of the last complete epoch."""
    run = group.runs[0]
    tested = [
        (epoch, stage, stream["task_accuracy"])
        for epoch, stage, stream in _stream_records(run)
        if stream.get("task_accuracy")
    ]
    if not tested:
        return None
    tasks = len(tested[0][2][0])
    complete = [epoch for epoch, stage, _ in tested if stage == tasks - 1]
    chosen = complete[-1] if complete else tested[-1][0]
    by_stage = {stage: matrix(accuracy) for epoch, stage, accuracy in tested if epoch == chosen}
    stages = sorted(by_stage)
    values = np.array([mean_measured(by_stage[stage].T) for stage in stages])
    step = HeatmapStep("", [f"stage {stage}" for stage in stages], values)
    title = f"{label_with_seed(group)}: accuracy on each task"
    return Heatmap(title, "task", "after", [str(task) for task in range(tasks)], [step])


def _transfer(group: RunGroup) -> Bars | None:
    """Forgetting and transfer of each client at the end of the last epoch."""
    recorded = [(record.get("stream") or {}).get("transfer") for record in group.runs[0].records]
    last = next((values for values in reversed(recorded) if values), None)
    if last is None:
        return None
    shown = [last[index] for index in thin(len(last), MAX_CLIENTS)]
    bars = [
        Bar(label, vector([values[key] for values in shown]), number)
        for number, (key, label) in enumerate(TRANSFER.items())
    ]
    clients = [str(values["client"]) for values in shown]
    return Bars(f"{label_with_seed(group)}: each client's own tasks", "points of accuracy", clients, bars)
