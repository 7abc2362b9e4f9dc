"""``run``, ``resume``, ``compare``: train models."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import INTERRUPTED
from holdfast.cli.options import Changes, File, Json, experiment_from, with_settings
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.errors import HoldfastError, HoldfastWarning

if TYPE_CHECKING:
    from holdfast.report.trackers import Tracker
    from holdfast.training.comparison import Comparison
    from holdfast.training.experiment import Experiment
    from holdfast.training.run import Run

Track = Annotated[
    list[str] | None, typer.Option(help="Also log to a tracker: csv, tensorboard, wandb or mlflow.")
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

    Example:  holdfast run --data digits --partition dirichlet:0.1 --clients 10 --clients-per-round 5
    --method fedntd --rounds 50 --seed 1 --out runs/x

    Example:  holdfast run experiment.yaml --set method.beta=0.5
    """
    experiment = experiment_from(file, settings, changes)
    directory = out or _new_directory(experiment)
    _train(experiment, directory, as_json, trackers=_trackers(track, directory))


def resume(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    rounds: Annotated[int | None, typer.Option(help="New total number of rounds.")] = None,
    device: Annotated[str | None, typer.Option(help="Continue on another device: cpu or cuda.")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run, or train a finished run for more rounds.

    On the same machine the result has the same bits as without the interruption, and with --rounds from the beginning.

    Example:  holdfast resume runs/x

    Example:  holdfast resume runs/x --rounds 60
    """
    from holdfast.runs import RunDirectory
    from holdfast.training.experiment import Experiment

    experiment = Experiment.from_mapping(RunDirectory.open(run).experiment)
    given = {"rounds": rounds, "device": device}
    changes = [f"{name}={value}" for name, value in given.items() if value is not None]
    trackers = _trackers(track, run)
    _train(experiment.with_settings(changes), run, as_json, resume=True, trackers=trackers)


@with_settings(hidden=("method",))
def compare(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="The methods; the first is the baseline.")
    ],
    experiment: Annotated[
        Path | None, typer.Option(help="An experiment file; options override its settings.")
    ] = None,
    changes: Changes = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from --seed on.")] = 3,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy to which rounds are counted, such as 0.5 (default: 0.95 of the best)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the comparison.")] = Path("runs/comparison"),
    report: Annotated[bool, typer.Option("--report", help="Also write OUT/report.html.")] = False,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train every method with every seed, and test which differ significantly from the first.

    When the command is repeated, finished runs are read and interrupted ones continue.

    Example:  holdfast compare fedavg fedntd --data digits --clients 10 --model mlp --rounds 20 --seeds 3
    """
    from holdfast.training.comparison import compare as compare_methods

    _refuse_method_setting(methods, settings, changes)
    shared = experiment_from(experiment, settings, changes)
    with advice_on_interrupt("the same command continues from there"):
        comparison = compare_methods(methods, shared, seeds, out=out, target=target)
    page = None
    if report:
        from holdfast.report import write_report

        page = out / "report.html"
        write_report(comparison.paths, page)
    if as_json:
        print_json(comparison.to_json())
    else:
        _print_comparison(comparison, shared)
        console().print(f"Runs: {out}" if page is None else f"Report: {page}", soft_wrap=True)


def _refuse_method_setting(methods: list[str], settings: dict[str, Any], changes: list[str] | None) -> None:
    """Raise if an option sets the method, which would have no effect on the list of methods to compare."""
    of_method = [change for change in changes or [] if re.match(r"\s*method\b", change)]
    if "method" in settings or of_method:
        given = f"--set {of_method[0]}" if of_method else f"--method {settings['method']}"
        raise HoldfastError(
            f"'{given}' cannot be given with compare; write methods with their parameters as arguments, such as "
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
    with advice_on_interrupt(f"continue with: holdfast resume {shlex.quote(str(out))}", out):
        run = experiment.run(out, resume=resume, trackers=trackers)
        if run.interrupted:
            raise KeyboardInterrupt
    if as_json:
        print_json(_summary(run))
    else:
        _print_run(run)


def _summary(run: Run) -> dict[str, Any]:
    from holdfast.core.measures import measures

    tested = any(measure.name in record for record in run.records for measure in measures(run.experiment))
    return {
        "run": str(run.path),
        "method": run.experiment["method"]["name"],
        "rounds": len(run.records),
        **(_tests(run) if tested else _validation(run)),
        "seconds": sum(record["seconds"]["total"] for record in run.records),
        "engine": run.experiment["engine"],
        "peak_bytes": run.peak_bytes,
        "hash": run.experiment["hash"],
    }


def _tests(run: Run) -> dict[str, Any]:
    """The final results on the test set."""
    from holdfast.core.measures import measures, score_measure

    domains, score = run.domain_accuracy, score_measure(run.experiment).name
    return {
        **{measure.name: float(run.metric(measure.name)[-1]) for measure in measures(run.experiment)},
        "forgetting": run.forgetting if len(run.class_score) > 1 else None,
        f"class_{score}": run.class_score[-1].tolist(),
        **({"domain_accuracy": {k: float(v[-1]) for k, v in domains.items()}} if domains else {}),
    }


def _validation(run: Run) -> dict[str, Any]:
    """The final results on the clients' validation samples, of a run without a test set."""
    from holdfast.core.measures import measures

    return {"validation": {m.name: float(run.validation(m.name)[-1]) for m in measures(run.experiment)}}


def _print_run(run: Run) -> None:
    from holdfast.core.measures import measures, score_measure

    summary = _summary(run)
    prefix, values = ("validation ", summary["validation"]) if "validation" in summary else ("", summary)
    tested = "  ".join(f"{prefix}{m.name} {m.text(values[m.name])}" for m in measures(run.experiment))
    forgetting = ""
    if summary.get("forgetting") is not None:
        forgetting = f"  forgetting {score_measure(run.experiment).text(summary['forgetting'])}"
    peak = "" if run.peak_bytes is None else f", {run.peak_bytes / 2**30:.1f} GiB at most"
    out = console()
    out.print(
        f"{summary['method']}  {tested}{forgetting}  "
        f"{summary['rounds']} rounds in {summary['seconds']:.1f} s on {summary['engine']}{peak}",
        style="bold",
        soft_wrap=True,
    )
    out.print(f"Run: {summary['run']}   (holdfast show, report, export)", soft_wrap=True)


def _print_comparison(comparison: Comparison, experiment: Experiment) -> None:
    header, rows = comparison.cells()
    columns = [header[0], *(f" {name}" for name in header[1:])]
    title = (
        f"{experiment.data_name}, {experiment.rounds} rounds, {len(comparison.rows[0].seeds)} seeds: mean ± deviation; "
        f"{comparison.units}rounds to the target, seconds and MB sent in a run"
    )
    print_table(title, columns, rows)
    for note in comparison.notes:
        console().print(note, style="dim", soft_wrap=True)


def _new_directory(experiment: Experiment) -> Path:
    """A path in runs/ that does not exist yet, named after data, method and seed."""
    described = experiment.describe()
    data, method = Path(experiment.data_name.replace(":", "-")).stem, described["method"]["name"]
    name = f"{data}-{method.replace(':', '-')}-seed{experiment.seed}"
    paths = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(path for path in paths if not path.exists())


@contextmanager
def advice_on_interrupt(advice: str, run: Path | None = None) -> Iterator[None]:
    """On Ctrl-C, exit with a sentence on how to continue, unless the directory ``run`` holds no run yet."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "interrupted after round", HoldfastWarning)
            yield
    except KeyboardInterrupt:
        begun = run is None or (run / "experiment.yaml").exists()
        print(
            f"holdfast: stopped; {advice}" if begun else "holdfast: stopped before the first round",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None
