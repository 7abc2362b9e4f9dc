"""``partition``, ``stream``, ``diagnose``: build, draw and describe federations."""

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
    from holdfast.papers.rankings import Ranking

Save = Annotated[Path | None, typer.Option(help="Save the federation, for use with --federation.")]
Draw = Annotated[Path | None, typer.Option(help="Draw it to a .png, .svg or .pdf file.")]

FAR = 0.3  # distance above which a published setting is not comparable with a federation

MEASURES = {
    "label_skew": "label skew (0: all clients equal, 1: nothing in common)",
    "quantity_gini": "Gini coefficient of the clients' sizes",
    "imbalance_ratio": "commonest class / rarest class",
    "missing_classes": "classes missing from a client, on average",
}
"""What `diagnose` measures, with its names in print."""


@with_settings(FEDERATION_OPTIONS)
def partition(
    file: File = None,
    save: Save = None,
    draw: Draw = None,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print, draw or save the data of each client.

    Example:  holdfast partition --data digits --partition dirichlet:0.1 --clients 10 --draw who.png
    """
    _output(experiment_from(file, settings).build_federation(), save, draw, as_json)


@with_settings(FEDERATION_OPTIONS)
def stream(
    file: File = None,
    save: Save = None,
    draw: Draw = None,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print, draw or save the data of each client by stage, for data that arrives in stages.

    Example:  holdfast stream --data digits --stream 5 --partition iid --clients 10
    """
    if file is None and "federation" not in settings:
        settings.setdefault("stream", "5")
    _output(experiment_from(file, settings).build_federation(), save, draw, as_json)


def diagnose(
    file: Annotated[
        Path,
        typer.Argument(help="An experiment (.yaml), a federation (.json), label counts (.csv) or a run."),
    ],
    as_json: Json = False,
) -> None:
    """Measure how heterogeneous a federation is, and print the most similar published setting and its best methods.

    A .csv file has one row per client and one column per class; cells are numbers of samples. A header row is skipped,
    also if it is 0, 1, 2, …  A first column of client names is skipped, too: one of words, one with the header client,
    site, id or none, or one that counts 0, 1, 2, …  Methods are ranked by measured results only.

    Example:  holdfast diagnose label_counts.csv
    """
    from holdfast.data.diagnosis import diagnose as measure
    from holdfast.data.diagnosis import nearest_regime
    from holdfast.papers.rankings import SAME_REGIME, similar_rankings

    counts, streaming = _label_counts(file)
    measures, nearest = measure(counts), nearest_regime(counts, streaming=streaming)
    ranked = similar_rankings(nearest["measures"], streaming=streaming)
    in_regime = bool(ranked) and ranked[0][0] <= SAME_REGIME
    if not in_regime:
        ranked = similar_rankings(measures, streaming=streaming)
    if as_json:
        measured = [{"in_regime": in_regime, "distance": away, **asdict(one)} for away, one in ranked]
        print_json({"measures": measures, "nearest": nearest, "measured": measured})
        return
    rows = [
        [text, f"{measures[key]:.3g}", f"{nearest['measures'][key]:.3g}"] for key, text in MEASURES.items()
    ]
    title = f"{measures['clients']} clients, {measures['classes']} classes, {measures['samples']} samples"
    print_table(title, ["", " here", f" {nearest['regime']}"], rows)
    out = console()
    far = ", which is far: no paper has a similar setting" if nearest["distance"] > FAR else ""
    out.print(
        f"Most similar: {nearest['regime']} ({nearest['source']}), at distance {nearest['distance']:.2f}{far}.",
        soft_wrap=True,
    )
    if not in_regime:
        other = (
            f"; the most similar setting with measurements, at distance {ranked[0][0]:.2f}:"
            if ranked
            else "."
        )
        out.print(f"No methods have been measured in that regime{other}", soft_wrap=True)
    for _, one in ranked:
        out.print(f"{one.score} in {one.table}: {_best(one)}", soft_wrap=True)


def _best(ranking: Ranking, count: int = 3) -> str:
    """The best methods of a ranking, and FedAvg if it is not among them, each with its rank."""
    texts = []
    for place, score in enumerate(ranking.scores, 1):
        if place <= count or score.method == "fedavg":
            spread = (
                "one seed" if score.deviation is None else f"± {score.deviation:.1f}, {score.seeds} seeds"
            )
            texts.append(f"{place}. {score.method} {score.mean:.1f} ({spread})")
    return f"{', '.join(texts)}; of {len(ranking.scores)} methods."


def _output(federation: Federation, save: Path | None, draw: Path | None, as_json: bool) -> None:
    """Print a federation, and save and draw it if paths are given."""
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
    for path, action in ((save, "Saved"), (draw, "Drawn")):
        if path is not None:
            out.print(f"{action}: {path}", soft_wrap=True)


def _counts(federation: Federation) -> np.ndarray:
    """Samples per client and class ``[K, C]``; for a stream, those that arrive at each stage ``[T, K, C]``."""
    import numpy as np

    arriving = replace(federation, cumulative=False)
    if federation.stages == 1:
        return arriving.label_counts()
    return np.stack([arriving.label_counts(stage=stage) for stage in range(federation.stages)])


def _domains(federation: Federation) -> list[str] | None:
    """The name of each client's domain; None if the data has no domains."""
    names, domains = federation.client_domains()
    return [names[domain] for domain in domains] if names else None


def _label_counts(file: Path) -> tuple[np.ndarray, bool]:
    """Samples per client and class in a file of any supported kind, and whether it describes a stream."""
    import numpy as np

    from holdfast.training.experiment import Experiment

    file = file / "federation.json" if file.is_dir() else file
    if file.suffix in (".yaml", ".yml"):
        federation = Experiment.from_file(file).build_federation()
        return federation.label_counts(), federation.stages > 1
    if file.exists() and file.suffix not in (".json", ".csv"):
        raise HoldfastError(
            f"unknown type of file '{file}'; it must be an experiment (.yaml), a federation (.json), "
            "label counts (.csv) or a run's directory"
        )
    try:
        text = file.read_text(encoding="utf-8-sig")  # Excel writes a byte order mark
        content = None if file.suffix == ".csv" else json.loads(text)
    except OSError as error:
        raise HoldfastError(f"cannot read '{file}': {error.strerror}") from None
    except ValueError as error:
        raise HoldfastError(f"'{file}' is not a valid {file.suffix} file: {error}") from None
    if file.suffix == ".csv":
        try:
            return read_counts(text), False
        except (HoldfastError, csv.Error) as error:
            raise HoldfastError(f"'{file}' contains no label counts: {error}") from None
    if isinstance(content, dict) and "label_counts" in content:
        counts = np.asarray(content["label_counts"])
        return (counts.sum(0), True) if counts.ndim == 3 else (counts, False)
    if not isinstance(content, dict) or "dataset" not in content:
        raise HoldfastError(
            f"'{file}' is not a federation; create one with `holdfast partition --save {file}`"
        )
    federation = _load_saved(file, str(content["dataset"]), content.get("partition"))
    return federation.label_counts(), federation.stages > 1


def _load_saved(file: Path, data: str, partition: object) -> Federation:
    """Load a saved federation together with the data set that it names."""
    from holdfast.data.sources import DATASETS
    from holdfast.training.experiment import Experiment
    from holdfast.training.experiment_entries import MIXED_DIGITS

    if data not in DATASETS and data.partition(":")[0] != MIXED_DIGITS:
        raise HoldfastError(
            f"'{file}' belongs to the data set '{data}', which cannot be loaded by name; diagnose an experiment "
            f"(.yaml) instead, with 'data:' and the path of the data, and 'federation: {file}'"
        )
    seed = partition.get("seed", 0) if isinstance(partition, dict) else 0
    return Experiment(data=data, federation=str(file), seed=seed).build_federation()
