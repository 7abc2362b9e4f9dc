"""``partition``, ``stream``, ``diagnose``: who holds what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import FEDERATION_OPTIONS, File, Json, experiment_from, with_settings
from holdfast.cli.printing import console, print_json, print_table
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    import numpy as np

    from holdfast.data.federation import Federation

Save = Annotated[Path | None, typer.Option(help="Write the federation, to use it again with --federation.")]
Draw = Annotated[Path | None, typer.Option(help="Draw it: a .png, .svg or .pdf file.")]

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
        Path, typer.Argument(help="An experiment (.yaml), a federation (.json) or label counts (.csv).")
    ],
    as_json: Json = False,
) -> None:
    """Say how heterogeneous a federation is, and which published setting it is most like.

    A .csv file has one row per client and one column per class: numbers of samples.

    Example:  holdfast diagnose label_counts.csv
    """
    from holdfast.data.diagnosis import diagnose as measure
    from holdfast.data.diagnosis import nearest_regime

    counts = _label_counts(file)
    measures, nearest = measure(counts), nearest_regime(counts)
    if as_json:
        print_json({"measures": measures, "nearest": nearest})
        return
    here, there = measures, nearest["measures"]
    rows = [[text, f"{here[key]:.3g}", f"{there[key]:.3g}"] for key, text in MEASURES.items()]
    head = f"{measures['clients']} clients, {measures['classes']} classes, {measures['samples']} samples"
    print_table(head, ["", " here", f" {nearest['regime']}"], rows)
    told = f"Most like: {nearest['regime']} ({nearest['source']}), at distance {nearest['distance']:.2f}."
    best = nearest["methods"]
    console().print(f"{told} Best there: {best}." if best else told, soft_wrap=True)


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
    """Samples per client and class ``[K, C]``, per stage ``[T, K, C]`` in a stream."""
    import numpy as np

    if federation.stages == 1:
        return federation.label_counts()
    return np.stack([federation.label_counts(stage=stage) for stage in range(federation.stages)])


def _domains(federation: Federation) -> list[str] | None:
    """The name of each client's domain, where there are domains."""
    names, clients = federation.client_domains()
    return [names[place] for place in clients] if names else None


def _label_counts(file: Path) -> np.ndarray:
    """Samples per client and class, from whatever describes a federation."""
    import numpy as np

    from holdfast.data.federation import Federation
    from holdfast.data.sources import load
    from holdfast.experiment import Experiment

    if file.suffix in (".yaml", ".yml"):
        return Experiment.from_file(file).build_federation().label_counts()
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".csv":
            return np.loadtxt(text.splitlines(), delimiter=",", ndmin=2)
        content = json.loads(text)
    except OSError as error:
        raise HoldfastError(f"cannot read '{file}': {error.strerror}") from None
    except ValueError as error:
        raise HoldfastError(f"'{file}' is not what its ending says: {error}") from None
    if isinstance(content, dict) and "label_counts" in content:
        counts = np.asarray(content["label_counts"])
        return counts.sum(0) if counts.ndim == 3 else counts
    if not isinstance(content, dict) or "dataset" not in content:
        raise HoldfastError(f"'{file}' is not a federation: make one with `holdfast partition --save {file}`")
    return Federation.load(file, load(content["dataset"])).label_counts()
