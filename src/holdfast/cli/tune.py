"""``tune``: search for settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Changes, Json, experiment_from, with_settings
from holdfast.cli.printing import console, print_json, print_table
from holdfast.cli.train import advice_on_interrupt
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.tuning.tune import Tuning

Workers = Annotated[int, typer.Option(help="Number of parallel processes on the device.")]
SETTING = re.compile(r"^[\w.]+=")  # a method's text has a colon before its first equals sign


@with_settings(hidden=("method",))
def tune(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD [KEY=VALUES...]", help="The method; further arguments extend --space."
        ),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES", help="A setting to vary: lr=0.003..0.1:log or method.beta=[0.5,1]."
        ),
    ] = None,
    experiment: Annotated[
        Path | None, typer.Option(help="An experiment file; options override its settings.")
    ] = None,
    changes: Changes = None,
    budget: Annotated[int, typer.Option(help="Number of settings to try.")] = 30,
    final_seeds: Annotated[
        int,
        typer.Option(
            help="Number of runs with the best settings on all training samples, tested on the test set."
        ),
    ] = 0,
    workers: Workers = 1,
    out: Annotated[Path, typer.Option(help="Directory of the search.")] = Path("runs/tune"),
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Search for the best settings of a method, judged on validation samples.

    All settings are trained for a ninth of the rounds, the best third of them for a third of the rounds, and the best
    third of these for all rounds. They are compared on validation samples, a share --validation of each client's
    samples (0.1 by default). Only --final-seeds uses the test set. Repeat an interrupted command to continue it.

    Example:  holdfast tune fedntd --space method.beta=0.1..10:log lr=0.03..1:log
    --data digits --clients 5 --model linear --rounds 18 --budget 9
    """
    from holdfast.report.progress_display import log_line
    from holdfast.tuning.tune import tune as search

    method, more = _method_and_space(words or ())
    if method is not None:
        if "method" in settings:
            raise HoldfastError(
                f"the method is given twice, as {method} and as --method {settings['method']}"
            )
        settings["method"] = method
    given = experiment_from(experiment, settings, changes)
    with advice_on_interrupt("the same command continues from there"):
        tuning = search(
            given,
            space=[*(space or []), *more],
            budget=budget,
            final_seeds=final_seeds,
            workers=workers,
            out=out,
            log=log_line,
        )
    if as_json:
        described = [asdict(row) | {"path": str(row.path)} for row in tuning.table]
        final = [asdict(run) | {"path": str(run.path)} for run in tuning.final]
        print_json({"measure": tuning.measure.name, "table": described, "final": final})
    else:
        _print(tuning, out)


def _method_and_space(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The method among the words before or after the options, and the settings of the space."""
    methods = [word for word in words if not SETTING.match(word)]
    if len(methods) > 1:
        raise HoldfastError(f"{methods[0]} and {methods[1]} are two methods; a search tunes one method")
    return next(iter(methods), None), [word for word in words if SETTING.match(word)]


def _print(tuning: Tuning, out: Path) -> None:
    from holdfast.tuning.jobs import format_value

    measure = tuning.measure
    keys = list(dict.fromkeys(key for row in tuning.table for key in row.settings))
    rows = [
        [
            str(row.trial),
            *(_short(row.settings[key]) if key in row.settings else "as given" for key in keys),
            str(row.rounds),
            "diverged" if row.failed else format_value(measure, row.value),
            f"{row.seconds:.1f}",
        ]
        for row in tuning.table
    ]
    title = (
        f"{len(rows)} trials, the best first: {measure.name} on validation samples, mean of the last rounds"
    )
    print_table(title, [" trial", *(f" {key}" for key in keys), " rounds", f" {measure.name}", " s"], rows)
    best, text = tuning.best, console()
    settings = (
        ", ".join(f"{key}={_short(value)}" for key, value in best.settings.items()) or "the settings as given"
    )
    text.print(f"Best: {settings}", style="bold", soft_wrap=True)
    text.print(f"Run: {best.path}   (holdfast show, report, export)", soft_wrap=True)
    text.print(f"Experiment: {out / 'best.yaml'}   (holdfast run)", soft_wrap=True)
    if tuning.final:
        from holdfast.metrics.summary import format_mean, mean_and_deviation

        scale = 100 if measure.is_share else 1
        mean = format_mean(*mean_and_deviation([scale * run.value for run in tuning.final]))
        unit = " %" if measure.is_share else ""
        seeds = ", ".join(str(run.seed) for run in tuning.final)
        text.print(
            f"On the test set, trained on all samples with seeds {seeds}: {measure.name} {mean}{unit}", style="bold",
            soft_wrap=True,
        )  # fmt: skip


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
