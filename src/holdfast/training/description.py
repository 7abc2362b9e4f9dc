"""The description of a run in its directory: its federation and its machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from holdfast.data.federation import Federation
from holdfast.data.schedules import describe_schedule
from holdfast.runs import RunDirectory
from holdfast.runs.metrics_file import plain


def describe_federation(federation: Federation) -> dict[str, Any]:
    """The settings of a federation, as in an experiment file."""
    partition = dict(plain(federation.partition))
    stream = partition.pop("stream", None)
    if stream is not None and federation.schedule is not None:
        stream["schedule"] = describe_schedule(federation.schedule)
    setting = {
        "clients": federation.clients,
        "partition_seed": partition.pop("seed", None),
        "public": partition.pop("public", 0.0),
        "long_tail": partition.pop("long_tail", None),
        "skew": partition.pop("skew", None),
        "stream": stream,
    }
    partition.pop("clients", None)
    return {"partition": partition, **setting}


def federation_content(
    federation: Federation, hash: str, validation: np.ndarray | None = None, most: int = 10_000
) -> dict[str, Any]:
    """The content of federation.json: label counts of the first ``most`` clients, for people and for the report.

    ``hash`` is that of the federation before samples were held out, ``validation`` [clients] how many were.
    """
    shown = np.arange(min(federation.clients, most))
    stages = range(federation.stages)
    arriving = replace(federation, cumulative=False)
    counts = [arriving.label_counts(shown, stage).tolist() for stage in stages]
    domains, of_clients = federation.client_domains()
    content: dict[str, Any] = {
        "clients": federation.clients,
        "stages": federation.stages,
        "classes": list(federation.dataset.classes),
        "label_counts": counts if federation.stages > 1 else counts[0],
        "domains": {"names": domains, "clients": of_clients[:most].tolist()} if domains else None,
        "public": len(federation.public),
        "hash": hash,
    }
    if validation is not None:
        content["validation"] = validation[:most].tolist()
    return content


def write_json(directory: RunDirectory, name: str, content: dict[str, Any]) -> None:
    """Write a JSON file of a run."""
    directory.write(name, json.dumps(content).encode() + b"\n")


def machine(device: torch.device) -> str:
    """A short description of the machine."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def audit_start(directory: RunDirectory, event: str, round: int, described: Mapping[str, Any]) -> None:
    """Add an entry to the audit log when a run starts or resumes after ``round``: versions, settings, federation."""
    facts = {key: described[key] for key in ("rounds", "method", "versions")}
    directory.audit_start(event, round, federation=described["hash"], **facts)
