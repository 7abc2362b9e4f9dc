"""How well: accuracy over rounds, by class, by domain, by stage of a stream."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from holdfast.report.curves import (
    NOTHING,
    Curve,
    NotRecorded,
    Shown,
    curves,
    ends,
    over_seeds,
    recorded,
    with_seed,
)
from holdfast.report.loading import Group, Run, columns, matrix
from holdfast.report.panels import Frame, Grid, Lines, thin

MOST_COLUMNS = 400  # of a heat map


def accuracy(groups: Sequence[Group]) -> Shown:
    """Accuracy and loss of the global model over rounds, and of the clients' own models."""
    lines = recorded(groups, "accuracy")
    if not lines:
        raise NotRecorded("no round was evaluated")
    panels = [Lines("Test accuracy of the global model", "round", "accuracy", lines)]
    personal = recorded(groups, "personal_accuracy")
    if personal:
        panels.append(Lines("Clients' own models on their own classes, mean", "round", "accuracy", personal))
    loss = recorded(groups, "loss")
    if loss:
        panels.append(Lines("Test loss of the global model", "round", "cross-entropy", loss, percent=False))
    return panels, f"Accuracy at the last round: {ends(lines)}."


def classes(groups: Sequence[Group]) -> Shown:
    """Heat maps of class by round, one for each group."""
    panels, told = [], []
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
            told.append(
                f"{group.label}'s weakest class at the end is {run.classes[worst]} ({final[worst]:.1%})"
            )
    if not panels:
        raise NotRecorded("no per-class accuracy was recorded")
    return panels, "; ".join(told) + "."


def domains(groups: Sequence[Group]) -> Shown:
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


STREAM_ACCURACIES = (
    ("A_glo", "A_glo_t", "Global model after each epoch"),
    ("A_loc", "A_loc_t", "Clients' own models after each epoch"),
)


def stages(groups: Sequence[Group]) -> Shown:
    """A stream's accuracies: on the tasks seen so far, by stage, and on all classes, by epoch."""
    seen = curves(groups, _seen_tasks)
    panels = [Lines("Tasks seen so far, mean of the last ten epochs", "stage", "A_sel", seen)] if seen else []
    for key, minority, title in STREAM_ACCURACIES:
        lines = []
        for group in groups:
            whole = over_seeds(group, partial(_by_epoch, key))
            rare = over_seeds(group, partial(_by_epoch, minority), dashed=True, suffix=", minority classes")
            lines += [line for line in (whole, rare) if line is not None]
        if lines:
            panels.append(Lines(title, "epoch", key, lines))
    if not panels:
        raise NotRecorded("these runs did not train on a stream")
    return panels, f"{panels[0].y_label} at the end: {ends(panels[0].lines)}."


def _by_epoch(key: str, run: Run) -> Curve:
    """The last value of every epoch; of every round where all rounds are one epoch."""
    found = [(record, (record.get("stream") or {}).get(key)) for record in run.records]
    epochs = len({record.get("epoch") for record, value in found if value is not None})
    step = "epoch" if epochs > 1 else "round"
    return columns(
        {record[step] + (step == "epoch"): value for record, value in found if value is not None}.items()
    )


def _seen_tasks(run: Run) -> Curve:
    last: dict[tuple[int, int], float] = {}  # of each epoch and stage
    for record in run.records:
        value = (record.get("stream") or {}).get("A_sel")
        if value is not None:
            last[record.get("epoch", 0), record.get("stage", 0)] = value
    if not last:
        return NOTHING
    recent = sorted({epoch for epoch, _ in last})[-10:]
    present = sorted({stage for epoch, stage in last if epoch in recent})
    means = [
        np.mean([v for (epoch, s), v in last.items() if s == stage and epoch in recent]) for stage in present
    ]
    return np.array(present, dtype=np.float64) + 1, np.array(means)
