"""Consistency checks of the files of a run: numbers of classes, participants and clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError

BY_CLIENT = (
    "samples", "local_in", "local_out", "weight_divergence", "local_forgetting", "distribution_distance",
)  # fmt: skip
Mapped = Mapping[str, Any]


def check_records(file: Path, records: Sequence[Mapped], classes: int | None = None) -> int | None:
    """Raise a `HoldfastError` if the records in ``file`` contradict each other or the number of classes.

    Returns the number of classes, None if no record has a value for each class.
    """
    before = -1
    for record in records:
        name = f"{file} is damaged: round {record['round']}"
        if record["round"] <= before:
            raise HoldfastError(f"{name} follows round {before}; restore the file from a copy")
        before = record["round"]
        classes = _check_record(name, record, classes)
    return classes


def _check_record(name: str, record: Mapped, classes: int | None) -> int | None:
    """Check one record against the number of classes, which is returned as far as it is known."""
    local = record.get("locals") or {}
    rows = local.get("class_accuracy")
    by_class = {
        "class_accuracy": record.get("class_accuracy"),
        "locals.global_before": local.get("global_before"),
        "locals.global_after": local.get("global_after"),
        "a row of locals.class_accuracy": rows[0] if rows else None,
    }
    for key, values in by_class.items():
        if values is not None:
            classes = len(values) if classes is None else classes
            _need_length(f"{name}: {key}", values, classes, "class")
    participants = record.get("participants")
    by_client = {key: record.get(key) for key in BY_CLIENT}
    by_client |= {f"locals.{key}": local.get(key) for key in ("class_accuracy", "accuracy")}
    by_client |= {
        f"locals.domain_accuracy.{key}": v for key, v in (local.get("domain_accuracy") or {}).items()
    }
    for key, values in by_client.items():
        if values is not None and participants is not None:
            _need_length(f"{name}: {key}", values, len(participants), "participant")
    if any(client < 0 for client in participants or ()):
        raise HoldfastError(f"{name}: a participant has a negative number; restore the file from a copy")
    return classes


def check_federation(file: Path, federation: Mapped, classes: int | None) -> None:
    """Raise a `HoldfastError` if the federation in ``file`` contradicts itself or the number of classes."""
    name = f"{file} is damaged"
    counts, domains = federation.get("label_counts"), federation.get("domains")
    if not counts:
        return
    stage = counts if not isinstance(counts[0][0] if counts[0] else 0, list) else counts[0]
    clients = len(stage)
    if not clients or not stage[0]:
        raise HoldfastError(f"{name}: label_counts is empty; restore it from a copy")
    if classes is not None:
        _need_length(f"{name}: a row of label_counts", stage[0], classes, "class")
    if domains:
        _need_length(f"{name}: domains.clients", domains["clients"], clients, "client")
        _need_indices(f"{name}: domains.clients", domains["clients"], len(domains["names"]))


def check_probe(file: Path, probe: Mapped, classes: int | None) -> None:
    """Raise a `HoldfastError` if the probe in ``file`` contradicts itself or the number of classes."""
    name = f"{file} is damaged"
    places = probe.get("tsne")
    if not places:
        return
    _need_length(f"{name}: a row of tsne", places[0], 2, "coordinate")
    for key in ("labels", "clients", "pairs"):
        if key not in probe:
            raise HoldfastError(f"{name}: {key} is missing; restore it from a copy")
    for key in ("labels", "clients"):
        _need_length(f"{name}: {key}", probe[key], len(places), "feature")
    _need_indices(f"{name}: labels", probe["labels"], classes)
    for key in ("positive", "negative"):
        _need_length(f"{name}: pairs.{key}", probe["pairs"][key], len(probe["pairs"]["edges"]) - 1, "bin")


def _need_length(name: str, values: Sequence[Any], length: int, unit: str) -> None:
    if len(values) != length:
        raise HoldfastError(
            f"{name} has {len(values)} entries; it must have one for each {unit}, {length}; restore the file from "
            "a copy"
        )


def _need_indices(name: str, values: Sequence[int], length: int | None) -> None:
    if any(value < 0 or (length is not None and value >= length) for value in values):
        raise HoldfastError(f"{name} refers to an entry that does not exist; restore the file from a copy")
