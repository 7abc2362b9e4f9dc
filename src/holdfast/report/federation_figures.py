"""The figure of a federation: samples by client and class, and the clients' sizes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.report.curves import FigureContent, NotRecorded, label_with_seed
from holdfast.report.loading import RunGroup
from holdfast.report.panels import Bar, Bars, Bubbles, Panel, thin

MAX_CLIENTS = 100  # of a bubble plot: with more, the circles are too small to see


def partition(groups: Sequence[RunGroup]) -> FigureContent:
    """The federation of each distinct partition among the runs."""
    distinct: dict[bytes, RunGroup] = {}
    for group in groups:
        counts = group.runs[0].label_counts
        if counts is not None:
            distinct.setdefault(counts.tobytes(), group)
    if not distinct:
        raise NotRecorded("no federation is stored with these runs")
    panels: list[Panel] = []
    sentences = []
    for group in distinct.values():
        run = group.runs[0]
        assert run.label_counts is not None
        title = _title_prefix(group, len(distinct))
        panels += federation_panels(
            run.label_counts, run.classes, _domains(run.federation.get("domains")), title
        )
        sentences.append(title + federation_sentence(run.label_counts))
    return panels, " ".join(sentences)


def _title_prefix(group: RunGroup, partitions: int) -> str:
    """The group and the seed of a partition, where partitions differ between groups or seeds."""
    same = len({run.label_counts.tobytes() for run in group.runs if run.label_counts is not None}) == 1
    if partitions == 1:
        return "" if same else f"Seed {group.runs[0].seed}: "
    return f"{group.label if same else label_with_seed(group)}: "


def federation_panels(
    counts: NDArray[np.int64], classes: Sequence[str], domains: Sequence[str] = (), title: str = ""
) -> list[Panel]:
    """The bubble plot of ``counts`` [stages, clients, C] and the sizes of at most 100 clients."""
    shown = thin(counts.shape[1], MAX_CLIENTS)
    note = "" if len(shown) == counts.shape[1] else f" ({len(shown)} of {counts.shape[1]} clients)"
    clients = [str(client) for client in shown]
    own_domains = [domains[client] for client in shown] if domains else ()
    sizes = counts[:, shown].sum(axis=2).astype(np.float64)
    stages = [
        Bar(f"stage {stage}" if len(sizes) > 1 else "samples", size, stage)
        for stage, size in enumerate(sizes)
    ]
    return [
        Bubbles(
            f"{title}Samples per client and class{note}", clients, classes, counts[:, shown], own_domains
        ),
        Bars(f"{title}Samples per client{note}", "samples", clients, stages, percent=False),
    ]


def federation_sentence(counts: NDArray[np.int64]) -> str:
    """Clients, sizes and numbers of classes of ``counts`` [stages, clients, C] in one sentence."""
    total = counts.sum(axis=0)
    sizes = total.sum(axis=1)
    held = (total > 0).sum(axis=1)
    stages = f" over {len(counts)} stages" if len(counts) > 1 else ""
    each, classes = _range(sizes), _range(held)
    return (
        f"{len(total)} clients{stages} hold {sizes.sum():,} samples, {each} each, "
        f"of {classes} of {total.shape[1]} classes."
    )


def _range(values: NDArray[np.int64]) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _domains(stored: object) -> list[str]:
    """One name per client from ``{"names": […], "clients": […]}``, where clients are indices into names."""
    if not isinstance(stored, dict):
        return []
    names, clients = stored.get("names") or [], stored.get("clients") or []
    return [str(names[index]) if isinstance(index, int) else str(index) for index in clients]
