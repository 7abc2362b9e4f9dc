"""``recommend``: choose a method for a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Changes, Json, experiment_from, with_settings
from holdfast.cli.printing import console, print_json, print_table
from holdfast.cli.train import advice_on_interrupt
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.training.experiment import Experiment
    from holdfast.tuning.recommend import Recommendation


@with_settings(hidden=("method",))
def recommend(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FEDERATION", help="A saved federation (.json), an experiment (.yaml) or a run."
        ),
    ] = None,
    changes: Changes = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from --seed on.")] = 5,
    workers: Annotated[int, typer.Option(help="Number of parallel processes on the device.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory of the runs.")] = Path("runs/recommend"),
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train a few methods briefly on a federation, and print the best one with its confidence.

    The candidates are the recipe, FedAvg, and the three best methods of measured settings with similar label counts.
    They are trained for 30 rounds unless --rounds is given, and compared on validation samples: a share of each
    client's samples (--validation, 0.1 by default) that depends on the seed. Repeat an interrupted command to continue
    it.

    Example:  holdfast recommend --data digits --partition dirichlet:0.1 --clients 5 --model linear
    --rounds 20 --seeds 2
    """
    from holdfast.report.progress_display import log_line
    from holdfast.tuning.recommend import recommend as compared

    if "method" in settings:
        raise HoldfastError(
            f"--method {settings['method']} cannot be given, because recommend chooses the methods; compare "
            f"others with holdfast compare fedavg {settings['method']}"
        )
    experiment = _experiment(file, settings, changes)
    with advice_on_interrupt("the same command continues from there"):
        found = compared(experiment, seeds=seeds, workers=workers, out=out, log=log_line)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found, experiment, out)


def _experiment(file: Path | None, settings: Mapping[str, Any], changes: list[str] | None) -> Experiment:
    """The experiment of a file of either kind and the options."""
    from holdfast.core import files
    from holdfast.training.experiment_entries import read_yaml
    from holdfast.tuning.recommend import ROUNDS

    if file is not None and file.is_dir():
        file = file / "experiment.yaml"  # of a run
    if file is None or file.suffix != ".json":
        written = {} if file is None else read_yaml(file)
        return experiment_from(file, {"rounds": written.get("rounds", ROUNDS), **settings}, changes)
    content = files.read_json(file)
    if not isinstance(content, dict) or "dataset" not in content:
        raise HoldfastError(
            f"'{file}' is not a federation; create one with `holdfast partition --save {file}`"
        )
    partition = content.get("partition")
    seed = partition.get("seed", 0) if isinstance(partition, dict) else 0
    given = {"rounds": ROUNDS, "data": content["dataset"], "seed": seed, "federation": str(file), **settings}
    return experiment_from(None, given, changes)


def _print(found: Recommendation, experiment: Experiment, out: Path) -> None:
    from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation

    scale = 100 if found.measure.is_share else 1
    rows = []
    for row in found.table:
        failed = any(map(math.isnan, row.values))
        mean = format_mean(*mean_and_deviation([scale * value for value in row.values]))
        rows.append(
            [
                row.method,
                "diverged" if failed else mean,
                "" if row.difference is None else f"{scale * row.difference:+.2f}",
                "" if row.p_value is None else f"{row.p_value:.3f}",
                f"{fmean(row.seconds):.1f}",
                f"{fmean(row.megabytes):.1f}" if row.megabytes else UNKNOWN,
                row.reason,
            ]
        )
    unit = " in %" if found.measure.is_share else ""
    seeds = len(found.table[0].values)
    title = (
        f"{experiment.data_name}, {experiment.rounds} rounds, {seeds} seeds: {found.measure.name}{unit} on validation "
        "samples, mean of the last rounds ± deviation over seeds"
    )
    print_table(
        title, ["method", f" {found.measure.name}", " behind by", " p", " s", " MB", "tried as"], rows
    )
    text = console()
    for sentence in found.left_out:
        text.print(sentence, style="dim", soft_wrap=True)
    text.print(found.sentence, style="bold", soft_wrap=True)
    text.print(f"Runs: {out / 'runs'}", soft_wrap=True)
