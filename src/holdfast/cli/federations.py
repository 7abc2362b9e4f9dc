"""``partition``, ``stream``, ``diagnose``: who holds what."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.count_table import read_counts
from holdfast.cli.options import FEDERATION_OPTIONS, File, Json, experiment_from, with_settings
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    import numpy as np

    from holdfast.data.federation import Federation
    from holdfast.papers.measured import Measured

Save = Annotated[Path | None, typer.Option(help="Write the federation, to use it again with --federation.")]
Draw = Annotated[Path | None, typer.Option(help="Draw it: a .png, .svg or .pdf file.")]

FAR = 0.3  # distance beyond which a published setting says little of a federation

MEASURES = {
    "label_skew": "label skew (0: all clients alike, 1: nothing in common)",
    "quantity_gini": "Gini coefficient of the clients' sizes",
    "imbalance_ratio": "commonest class / rarest class",
    "missing_classes": "classes a client lacks, on average",
}


@with_settings(FEDERATION_OPTIONS)
def partition(
    file: File = None,
    save: Save = None,
    draw: Draw = None,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print, draw or save who holds what.

    Example:  holdfast partition --data digits --partition dirichlet:0.1 --clients 10 --draw who.png
    """
    _show(experiment_from(file, settings).build_federation(), save, draw, as_json)


@with_settings(FEDERATION_OPTIONS)
def stream(
    file: File = None,
    save: Save = None,
    draw: Draw = None,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print, draw or save who gets what when: data that arrives in stages.

    Example:  holdfast stream --data digits --stream 5 --partition iid --clients 10
    """
    if file is None and "federation" not in settings:
        settings.setdefault("stream", "5")
    _show(experiment_from(file, settings).build_federation(), save, draw, as_json)


def diagnose(
    file: Annotated[
        Path,
        typer.Argument(help="An experiment (.yaml), a federation (.json), label counts (.csv) or a run."),
    ],
    as_json: Json = False,
) -> None:
    """Say how heterogeneous a federation is, which published setting it is most like, and what did best there.

    A .csv file has one row per client and one column per class: numbers of samples. A first row of classes' names
    (0, 1, 2, … too) is passed over, and so is a first column of clients' names: one of words, one called client,
    site, id or nothing, or one with a name of its own that counts 0, 1, 2, …  Methods are named by measured
    tables alone.

    Example:  holdfast diagnose label_counts.csv
    """
    from holdfast.data.diagnosis import diagnose as measure
    from holdfast.data.diagnosis import nearest_regime
    from holdfast.papers.measured import ALIKE, measured_like

    counts, streaming = _label_counts(file)
    measures, nearest = measure(counts), nearest_regime(counts, streaming=streaming)
    measured = measured_like(nearest["measures"], streaming=streaming)
    in_regime = bool(measured) and measured[0][0] <= ALIKE
    if not in_regime:
        measured = measured_like(measures, streaming=streaming)
    if as_json:
        told = [{"in_regime": in_regime, "distance": apart, **asdict(found)} for apart, found in measured]
        print_json({"measures": measures, "nearest": nearest, "measured": told})
        return
    here, there = measures, nearest["measures"]
    rows = [[text, f"{here[key]:.3g}", f"{there[key]:.3g}"] for key, text in MEASURES.items()]
    head = f"{measures['clients']} clients, {measures['classes']} classes, {measures['samples']} samples"
    print_table(head, ["", " here", f" {nearest['regime']}"], rows)
    out = console()
    far = ", which is far: no paper has its like" if nearest["distance"] > FAR else ""
    out.print(
        f"Most like: {nearest['regime']} ({nearest['source']}), at distance {nearest['distance']:.2f}{far}.",
        soft_wrap=True,
    )
    if not in_regime:
        other = f"; of what has, most like yours, at distance {measured[0][0]:.2f}:" if measured else "."
        out.print(f"What does best in that regime has not been measured yet{other}", soft_wrap=True)
    for _, found in measured:
        out.print(f"{found.score} in {found.table}: {_best(found)}", soft_wrap=True)


def _best(found: Measured, most: int = 3) -> str:
    """The best methods of a table, and FedAvg's place among them."""
    shown = [(place, score) for place, score in enumerate(found.scores, 1) if place <= most]
    shown += [(p, s) for p, s in enumerate(found.scores, 1) if s.method == "fedavg" and p > most]
    told = []
    for place, score in shown:
        spread = "one seed" if score.deviation is None else f"± {score.deviation:.1f}, {score.seeds} seeds"
        told.append(f"{place}. {score.method} {score.mean:.1f} ({spread})")
    return f"{', '.join(told)}; of {len(found.scores)} methods."


def _show(federation: Federation, save: Path | None, draw: Path | None, as_json: bool) -> None:
    from holdfast.data.diagnosis import diagnose as measure
    from holdfast.report import draw_federation, federation_text

    counts, domains = _counts(federation), _domains(federation)
    if save is not None:
        federation.save(save)
    if draw is not None:
        draw_federation(counts, federation.dataset.classes, domains, out=draw)
    measures = measure(federation.label_counts())
    if as_json:
        described = {
            "data": federation.dataset.name,
            "partition": federation.partition,
            "clients": federation.clients,
            "stages": federation.stages,
            "public": len(federation.public),
            "hash": federation.hash,
            "measures": measures,
            "label_counts": counts,
        }
        print_json(described)
        return
    out = console()
    out.print(federation_text(counts, federation.dataset.classes, domains))
    print_table("", ["", " "], [[text, f"{measures[key]:.3g}"] for key, text in MEASURES.items()])
    out.print(f"hash {federation.hash}", soft_wrap=True)
    for path, what in ((save, "Saved"), (draw, "Drawn")):
        if path is not None:
            out.print(f"{what}: {path}", soft_wrap=True)


def _counts(federation: Federation) -> np.ndarray:
    """Samples per client and class ``[K, C]``; in a stream what arrives at each stage ``[T, K, C]``."""
    import numpy as np

    arriving = replace(federation, cumulative=False)
    if federation.stages == 1:
        return arriving.label_counts()
    return np.stack([arriving.label_counts(stage=stage) for stage in range(federation.stages)])


def _domains(federation: Federation) -> list[str] | None:
    """The name of each client's domain, where there are domains."""
    names, clients = federation.client_domains()
    return [names[place] for place in clients] if names else None


def _label_counts(file: Path) -> tuple[np.ndarray, bool]:
    """Samples per client and class, from whatever describes a federation, and whether it is a stream."""
    import numpy as np

    from holdfast.training.experiment import Experiment

    file = file / "federation.json" if file.is_dir() else file
    if file.suffix in (".yaml", ".yml"):
        federation = Experiment.from_file(file).build_federation()
        return federation.label_counts(), federation.stages > 1
    if file.exists() and file.suffix not in (".json", ".csv"):
        raise HoldfastError(
            f"cannot tell what '{file}' is by its ending; it must be an experiment (.yaml), a federation (.json), "
            "label counts (.csv) or a run's directory"
        )
    try:
        text = file.read_text(encoding="utf-8-sig")  # Excel begins its .csv files with a mark
        content = None if file.suffix == ".csv" else json.loads(text)
    except OSError as error:
        raise HoldfastError(f"cannot read '{file}': {error.strerror}") from None
    except ValueError as error:
        raise HoldfastError(f"'{file}' is not what its ending says: {error}") from None
    if file.suffix == ".csv":
        try:
            return read_counts(text), False
        except (HoldfastError, csv.Error) as error:
            raise HoldfastError(f"'{file}' holds no label counts: {error}") from None
    if isinstance(content, dict) and "label_counts" in content:
        counts = np.asarray(content["label_counts"])
        return (counts.sum(0), True) if counts.ndim == 3 else (counts, False)
    if not isinstance(content, dict) or "dataset" not in content:
        raise HoldfastError(f"'{file}' is not a federation: make one with `holdfast partition --save {file}`")
    federation = _saved(file, str(content["dataset"]), content.get("partition"))
    return federation.label_counts(), federation.stages > 1


def _saved(file: Path, data: str, partition: object) -> Federation:
    """A saved federation, with the data that it names."""
    from holdfast.data.sources import DATASETS
    from holdfast.training.experiment import MIXED_DIGITS, Experiment

    if data not in DATASETS and data.partition(":")[0] != MIXED_DIGITS:
        raise HoldfastError(
            f"'{file}' is of data called '{data}', which is not known by name; diagnose an experiment (.yaml) with "
            f"two lines instead, 'data:' with its path and 'federation: {file}'"
        )
    seed = partition.get("seed", 0) if isinstance(partition, dict) else 0
    return Experiment(data=data, federation=str(file), seed=seed).build_federation()
