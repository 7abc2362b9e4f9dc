"""``run``, ``resume``, ``compare``: training."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import INTERRUPTED
from holdfast.cli.options import Changes, File, Json, experiment_from, with_settings
from holdfast.cli.printing import bar, console, print_json, print_table
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.report.trackers import Tracker
    from holdfast.training.comparison import Comparison
    from holdfast.training.experiment import Experiment
    from holdfast.training.run import Run

Track = Annotated[
    list[str] | None, typer.Option(help="Also tell a tracker: csv, tensorboard, wandb or mlflow.")
]


@with_settings()
def run(
    file: File = None,
    changes: Changes = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run (default: a new one in runs/).")
    ] = None,
    track: Track = None,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train one model with one method.

    Example:  holdfast run --data cifar10 --partition dirichlet:0.1 --clients 100 --clients-per-round 10
    --method fedntd --rounds 200 --seed 1 --out runs/x

    Example:  holdfast run experiment.yaml --set method.beta=0.5
    """
    experiment = experiment_from(file, settings, changes)
    directory = out or _new_directory(experiment)
    _train(experiment, directory, as_json, trackers=_trackers(track, directory))


def resume(
    run: Annotated[Path, typer.Argument(help="The directory of an interrupted run.")],
    device: Annotated[str | None, typer.Option(help="Continue on another device: cpu or cuda.")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run; on the same machine it ends with the same bits as one never interrupted.

    Example:  holdfast resume runs/x
    """
    from holdfast.runs import RunDirectory
    from holdfast.training.experiment import Experiment

    experiment = Experiment.from_mapping(RunDirectory.open(run).experiment)
    changes = [] if device is None else [f"device={device}"]
    trackers = _trackers(track, run)
    _train(experiment.with_settings(changes), run, as_json, resume=True, trackers=trackers)


@with_settings(hidden=("method",))
def compare(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="The first is compared with.")],
    experiment: Annotated[Path | None, typer.Option(help="An experiment file; options add to it.")] = None,
    changes: Changes = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from --seed on.")] = 3,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy that rounds are counted to, such as 0.5 (default: 0.95 of the best)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the comparison.")] = Path("runs/comparison"),
    report: Annotated[bool, typer.Option("--report", help="Also write OUT/report.html.")] = False,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train every method with every seed, and tell who is better and by more than chance.

    Called again, finished runs are read and interrupted ones go on.

    Example:  holdfast compare fedavg fedntd fedntd+fedprox --data digits --clients 10 --seeds 3
    """
    from holdfast.training.comparison import compare as compare_methods

    _refuse_method(methods, settings, changes)
    one = experiment_from(experiment, settings, changes)
    with _stoppable("the same command goes on from there"), bar(one.rounds, len(methods) * seeds) as shown:
        found = compare_methods(
            methods,
            one,
            seeds,
            out=out,
            target=target,
            on_start=lambda method, seed: shown.start(f"{method}, seed {seed}"),
            on_round=shown.update,
        )
    page = None
    if report:
        from holdfast.report import write_report

        page = out / "report.html"
        write_report(found.paths, page)
    if as_json:
        print_json(asdict(found) | {"paths": [str(path) for path in found.paths]})
    else:
        _print_comparison(found, one)
        console().print(f"Runs: {out}" if page is None else f"Report: {page}", soft_wrap=True)


def _refuse_method(methods: list[str], settings: dict[str, Any], changes: list[str] | None) -> None:
    """A comparison's methods are its list: what names another one beside it would have no effect."""
    written = [change for change in changes or [] if re.match(r"\s*method\b", change)]
    if "method" in settings or written:
        given = f"--set {written[0]}" if written else f"--method {settings['method']}"
        raise HoldfastError(
            f"'{given}' has no place in a comparison: write methods with their parameters in its list, such as "
            f"holdfast compare {methods[0]} fedntd:beta=0.5"
        )


def _trackers(names: list[str] | None, directory: Path) -> list[Tracker]:
    if not names:
        return []
    from holdfast.report import tracker

    return [tracker(name, directory) for name in names]


def _train(
    experiment: Experiment, out: Path, as_json: bool, resume: bool = False, trackers: Sequence[Tracker] = ()
) -> None:
    label = f"{experiment.describe()['method']['name']} on {Path(experiment.data).stem}"
    with (
        _stoppable(f"continue with: holdfast resume {shlex.quote(str(out))}"),
        bar(experiment.rounds) as shown,
    ):
        shown.start(label)
        done = experiment.run(out, resume=resume, trackers=trackers, on_round=shown.update)
    if as_json:
        print_json(_summary(done))
    else:
        _print_run(done)


def _summary(done: Run) -> dict[str, Any]:
    domains = done.domain_accuracy
    return {
        "run": str(done.path),
        "method": done.experiment["method"]["name"],
        "rounds": len(done.records),
        "accuracy": done.accuracy,
        "forgetting": done.forgetting if len(done.class_accuracy) > 1 else None,
        "class_accuracy": done.class_accuracy[-1].tolist(),
        **({"domain_accuracy": {k: float(v[-1]) for k, v in domains.items()}} if domains else {}),
        "seconds": sum(record["seconds"]["total"] for record in done.records),
        "engine": done.experiment["engine"],
        "peak_bytes": done.peak_bytes,
        "hash": done.experiment["hash"],
    }


def _print_run(done: Run) -> None:
    told = _summary(done)
    forgetting = "" if told["forgetting"] is None else f"  forgetting {told['forgetting']:.2%}"
    out = console()
    out.print(
        f"{told['method']}  accuracy {told['accuracy']:.2%}{forgetting}  "
        f"{told['rounds']} rounds in {told['seconds']:.1f} s on {told['engine']}, "
        f"{told['peak_bytes'] / 2**30:.1f} GiB at most",
        style="bold",
        soft_wrap=True,
    )
    out.print(f"Run: {told['run']}   (holdfast show, report, export)", soft_wrap=True)


def _print_comparison(found: Comparison, experiment: Experiment) -> None:
    rows = []
    for row in found.rows:
        against = "" if row.difference is None else f"{100 * row.difference:+.2f}"
        rows.append(
            [
                row.method,
                _mean([100 * value for value in row.accuracy]),
                _mean([100 * value for value in row.forgetting]),
                _reached(row.rounds_to_target),
                f"{sum(row.seconds) / len(row.seconds):.1f}",
                f"{sum(row.megabytes) / len(row.megabytes):.1f}",
                against,
                "" if row.p_value is None else f"{row.p_value:.3f}",
            ]
        )
    columns = ["method", " accuracy", " forgetting", " rounds", " s", " MB", " vs first", " p"]
    title = (
        f"{experiment.data}, {experiment.rounds} rounds, {len(found.rows[0].seeds)} seeds: mean ± deviation; "
        "accuracy and forgetting in %, rounds to target, seconds and MB sent of a run"
    )
    print_table(title, columns, rows)
    for note in found.notes:
        console().print(note, style="dim", soft_wrap=True)


def _reached(rounds: Sequence[int | None]) -> str:
    """Rounds to a target over seeds, of which some may never reach it: ``14 ± 1``, ``15 (2/3)``, ``–``."""
    known = [one for one in rounds if one is not None]
    share = f" ({len(known)}/{len(rounds)})" if 0 < len(known) < len(rounds) else ""
    return _mean(known, digits=0) + share


def _mean(values: Sequence[float], digits: int = 2) -> str:
    """``87.31 ± 0.42``; a dash where a value is unknown."""
    from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation

    unknown = any(math.isnan(value) for value in values)
    return UNKNOWN if unknown else format_mean(*mean_and_deviation(values), digits)


def _new_directory(experiment: Experiment) -> Path:
    """A directory in runs/ that does not exist yet."""
    described = experiment.describe()
    name = (
        f"{Path(experiment.data.replace(':', '-')).stem}-{described['method']['name']}-seed{experiment.seed}"
    )
    paths = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(path for path in paths if not path.exists())


@contextmanager
def _stoppable(advice: str) -> Iterator[None]:
    """Ctrl-C ends the command with advice on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"holdfast: stopped; {advice}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
