"""How well: accuracy over rounds, by class, by domain, by stage of a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.report.curves import (
    Curve,
    NotRecorded,
    Shown,
    curves,
    ends,
    over_seeds,
    recorded,
    recording,
    with_seed,
)
from holdfast.report.loading import RunGroup, StoredRun, columns, matrix, vector
from holdfast.report.panels import Bar, Bars, Frame, Grid, Lines, Panel, thin

MOST_COLUMNS = 400  # of a heat map


def accuracy(groups: Sequence[RunGroup]) -> Shown:
    """Accuracy and loss of the global model over rounds, and of the clients' own models."""
    lines = recorded(groups, "accuracy")
    if not lines:
        raise NotRecorded("no round was evaluated")
    panels = [Lines("Test accuracy of the global model", "round", "accuracy", lines)]
    personal = recorded(groups, "personal_accuracy")
    if personal:
        panels.append(Lines("Own models on own classes, mean", "round", "accuracy", personal))
    loss = recorded(groups, "loss")
    if loss:
        panels.append(Lines("Test loss of the global model", "round", "cross-entropy", loss, percent=False))
    return panels, f"Accuracy at the last round: {ends(lines)}."


def classes(groups: Sequence[RunGroup]) -> Shown:
    """Heat maps of class by round, one for each group."""
    panels, weakest, lost = [], [], []
    for group in groups:
        run = group.runs[0]
        if not len(run.rounds):
            continue
        kept = thin(len(run.rounds), MOST_COLUMNS)
        frame = Frame("", run.classes, run.class_accuracy[kept].T)
        rounds = [f"{number:.0f}" for number in run.rounds[kept]]
        panels.append(Grid(with_seed(group), "round", "class", rounds, [frame]))
        final = run.class_accuracy[-1]
        if np.isfinite(final).any():
            worst = int(np.nanargmin(final))
            weakest.append(f"{with_seed(group)}: {run.classes[worst]} ({final[worst]:.1%})")
            lost += [f"{with_seed(group)}: {told}" for told in _most_forgotten(run)]
    if not panels:
        raise NotRecorded("no per-class accuracy was recorded")
    forgotten = f"Forgotten most: {'; '.join(lost)}. " if lost else ""
    return panels, f"{forgotten}Weakest class at the end: {'; '.join(weakest)}."


def _most_forgotten(run: StoredRun) -> list[str]:
    """The class that ends furthest below its best, and when it was there; none where all end at their best."""
    drop = run.class_accuracy.max(axis=0) - run.class_accuracy[-1]
    if not np.nanmax(drop) > 0:
        return []
    worst = int(np.nanargmax(drop))
    own = run.class_accuracy[:, worst]
    best = int(own.argmax())
    return [
        f"{run.classes[worst]} ({own[best]:.1%} in round {run.rounds[best]:.0f}, {own[-1]:.1%} at the end)"
    ]


def domains(groups: Sequence[RunGroup]) -> Shown:
    """Heat maps of domain by round, one for each group."""
    panels, told = [], []
    for group in groups:
        run = group.runs[0]
        found = [record for record in run.records if record.get("domain_accuracy")]
        if not found:
            continue
        names = list(found[-1]["domain_accuracy"])
        found = [found[place] for place in thin(len(found), MOST_COLUMNS)]
        values = matrix([[record["domain_accuracy"].get(name) for name in names] for record in found])
        rounds = [str(record["round"]) for record in found]
        panels.append(Grid(with_seed(group), "round", "domain", rounds, [Frame("", names, values.T)]))
        told.append(
            f"{group.label}: " + ", ".join(f"{n} {v:.1%}" for n, v in zip(names, values[-1], strict=True))
        )
    if not panels:
        raise NotRecorded("the data has no domains, so no per-domain accuracy was recorded")
    return panels, "At the last round: " + "; ".join(told) + "."


MOST_CLIENTS = 40  # of a panel of bars

TRANSFER = {
    "average_forgetting": "forgetting",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
}

STREAM_ACCURACIES = (
    ("A_glo", "Global model, all test classes"),
    ("A_loc", "Clients' own models, all test classes"),
)


def stages(groups: Sequence[RunGroup]) -> Shown:
    """A stream's accuracies: on the tasks seen so far, on all classes, and on each task after each stage."""
    seen = curves(groups, _seen_tasks)
    if not seen:
        staged = any(record.get("stage") for group in groups for run in group.runs for record in run.records)
        untested = "the clients' models were not tested on their tasks (train with --evaluate-locals)"
        raise NotRecorded(untested if staged else "these runs did not train on a stream")
    panels: list[Panel] = [Lines("Tasks seen so far, mean of the last ten epochs", "stage", "A_sel", seen)]
    for key, title in STREAM_ACCURACIES:
        lines = []
        for group in groups:
            whole = over_seeds(group, recording(f"stream.{key}"))
            rare = over_seeds(group, recording(f"stream.{key}_t"), dashed=True, suffix=", minority")
            lines += [line for line in (whole, rare) if line is not None]
        if lines:
            panels.append(Lines(title, "round", key, lines))
    for build in (_task_matrix, _transfer):
        panels += [panel for group in groups if (panel := build(group)) is not None]
    return panels, f"A_sel at the last stage: {ends(seen)}."


def _visits(run: StoredRun) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """(epoch, stage, what the stream recorded) of each round; a stage before the last one begins an epoch."""
    epoch = before = 0
    for record in run.records:
        stage = int(record.get("stage") or 0)
        epoch += stage < before
        before = stage
        yield epoch, stage, record.get("stream") or {}


def _seen_tasks(run: StoredRun) -> Curve:
    last = {
        (epoch, stage): told["A_sel"] for epoch, stage, told in _visits(run) if told.get("A_sel") is not None
    }
    recent = sorted({epoch for epoch, _ in last})[-10:]
    by_stage: dict[int, list[float]] = {}
    for (epoch, stage), value in last.items():
        if epoch in recent:
            by_stage.setdefault(stage, []).append(value)
    return columns((stage, float(np.mean(by_stage[stage]))) for stage in sorted(by_stage))


def _task_matrix(group: RunGroup) -> Grid | None:
    """Mean accuracy of the participants on each of their tasks after each stage of the last whole epoch."""
    run = group.runs[0]
    visits = [
        (epoch, stage, told["task_accuracy"])
        for epoch, stage, told in _visits(run)
        if told.get("task_accuracy")
    ]
    if not visits:
        return None
    tasks = len(visits[0][2][0])
    whole = [epoch for epoch, stage, _ in visits if stage == tasks - 1]
    chosen = whole[-1] if whole else visits[-1][0]
    rows = {stage: matrix(accuracy) for epoch, stage, accuracy in visits if epoch == chosen}
    known = [np.isfinite(rows[stage]) for stage in sorted(rows)]
    sums = np.array([np.nansum(rows[stage], axis=0) for stage in sorted(rows)])
    counts = np.array([here.sum(axis=0) for here in known])
    values = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    names = [f"stage {stage}" for stage in sorted(rows)]
    title = f"{with_seed(group)}: accuracy on each task"
    return Grid(title, "task", "after", [str(task) for task in range(tasks)], [Frame("", names, values)])


def _transfer(group: RunGroup) -> Bars | None:
    """Forgetting and transfer of each client at the end of the last epoch."""
    told = [(record.get("stream") or {}).get("transfer") for record in group.runs[0].records]
    last = next((values for values in reversed(told) if values), None)
    if last is None:
        return None
    shown = [last[place] for place in thin(len(last), MOST_CLIENTS)]
    bars = [
        Bar(label, vector([values[key] for values in shown]), number)
        for number, (key, label) in enumerate(TRANSFER.items())
    ]
    clients = [str(values["client"]) for values in shown]
    return Bars(f"{with_seed(group)}: each client's own tasks", "points of accuracy", clients, bars)
