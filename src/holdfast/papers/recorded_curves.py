"""What the papers' figures need of a run besides what the tables do, by name, and how it follows from the records.

``local-in``, ``local-out``: by round, the mean accuracy of the local models in and out of their clients' distribution.
``A_sel-by-task``, ``A_sel_t-by-task``: by stage of a stream, the mean over the last ten epochs.
``before@K``, ``after@K``: by round and class, the accuracy of the model that client K gets and of the one it returns.
``label-counts``: by client and class, the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.metrics.summary import mean_and_deviation
from holdfast.papers.measures import LAST_EPOCHS
from holdfast.papers.published import FigureContent

OF_LOCALS = {"local-in": "local_in", "local-out": "local_out"}  # keys of a record
BY_TASK = {"A_sel-by-task": "A_sel", "A_sel_t-by-task": "A_sel_t"}  # keys of a record of a stream
LABEL_COUNTS = "label-counts"

Record = Mapping[str, Any]


def needed_curves(drawing: FigureContent) -> tuple[str, ...]:
    """The names of what a figure needs of each of its runs."""
    of_panels = [name for name in drawing.panels if name in OF_LOCALS or name in BY_TASK]
    if drawing.client is not None:
        of_panels += [f"before@{drawing.client}", f"after@{drawing.client}", LABEL_COUNTS]
    return tuple(of_panels)


def record_curves(
    names: Iterable[str], records: Sequence[Record], federation: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """These curves of a run, from its records and the content of its federation.json."""
    return {name: list(_curve(name, records, federation)) for name in names}


def _curve(name: str, records: Sequence[Record], federation: Mapping[str, Any]) -> Iterable[Any]:
    if name == LABEL_COUNTS:
        counts = federation["label_counts"]
        return counts[0] if federation["stages"] > 1 else counts  # type: ignore[no-any-return]
    if name in OF_LOCALS:
        return (mean_and_deviation(record.get(OF_LOCALS[name], ()))[0] for record in records)
    if name in BY_TASK:
        return _by_task(records, BY_TASK[name])
    kind, _, client = name.partition("@")
    return _of_client(records, int(client), before=kind == "before")


def _by_task(records: Sequence[Record], key: str) -> list[float | None]:
    by_stage: dict[int, list[float | None]] = {}
    for record in records:
        by_stage.setdefault(record["stage"], []).append(record["stream"].get(key))
    return [mean_and_deviation(by_stage[stage][-LAST_EPOCHS:])[0] for stage in sorted(by_stage)]


def _of_client(records: Sequence[Record], client: int, before: bool) -> Iterator[list[float | None]]:
    """The class accuracies of each round; unknown ones for rounds in which the client did not take part."""
    for record in records:
        known: Sequence[float | None] = record["locals"]["global_before"]
        if client not in record["participants"]:
            known = [None] * len(known)
        elif not before:
            known = record["locals"]["class_accuracy"][record["participants"].index(client)]
        yield list(known)
