"""``show``, ``export``, ``report``, ``figure``, ``table``, ``ui``: inspect runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.defaults import DASHBOARD_PORT
from holdfast.core.measures import Measure, measures, primary_measure, score_measure

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run directories, or directories of runs.")
]

SPARK_BLOCKS = "▁▂▃▄▅▆▇█"
FIGURES = (  # repeated here because importing holdfast.report would make help slow
    "accuracy, classes, domains, strip, forgetting, forgetting-degree, in-out-local, consistency, partition, "
    "divergence, feature-drift, alignment, features, stages"
)


def show(run: RunArgument, as_json: Json = False) -> None:
    """Print a run's settings, state and results.

    Example:  holdfast show runs/x
    """
    from holdfast.report.round_table import by_class
    from holdfast.runs import RunDirectory, list_runs

    directory = RunDirectory.open(run)
    experiment, records = directory.experiment, directory.records()
    summary = list_runs(run)[0]
    primary, score = primary_measure(experiment), score_measure(experiment)
    tested = [record for record in records if record.get(primary.name) is not None]
    outcome = _outcome(tested, experiment)
    if as_json:
        state = {"run": str(run), "state": summary.state, "rounds": len(records)}
        print_json(state | outcome | {"experiment": experiment})
        return
    out = console()
    total = f" of {experiment['rounds']}" if "rounds" in experiment else ""
    out.print(f"{summary.method}: {summary.state} after {len(records)}{total} rounds", style="bold")
    settings = {
        key: value
        for key, value in experiment.items()
        if key not in ("classes", "shape", "sample_preprocess")
    }
    print_table(
        "", ["", ""], [[f"  {key}", _short(value)] for key, value in settings.items() if value is not None]
    )
    if not tested:
        return
    out.print()
    for measure in measures(experiment):
        values = (
            f"{measure.text(outcome[measure.name])}   best {measure.text(outcome[f'best_{measure.name}'])}"
        )
        out.print(f"{measure.name:<11} {values}   {_spark(tested, measure)}")
    if outcome["forgetting"] is not None:
        of = "gained error" if score.less_is_better else f"best minus final {score.name}"
        out.print(f"forgetting  {score.text(outcome['forgetting'])}   (mean over classes of {of})")
    scores = by_class(experiment, tested[-1])
    if scores:
        worst = sorted(scores.items(), key=lambda pair: score.sign * pair[1])[:3]
        text = "   ".join(
            f"{label}: {value:.1%}" if score.is_share else f"{label}: {score.text(value)}"
            for label, value in worst
        )
        out.print(f"worst       {text}", soft_wrap=True)
    domains = tested[-1].get("domain_accuracy", {})
    if domains:
        text = "   ".join(f"{name}: {value:.1%}" for name, value in domains.items() if value is not None)
        out.print(f"domains     {text}", soft_wrap=True)


def export(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="state_dict, safetensors, torch.export, onnx, metrics or card (default: by the file's ending)."
        ),
    ] = None,
) -> None:
    """Write a run's model, its metrics or a model card to a file for other programs.

    .pt, .safetensors: the final weights.  .pt2, .onnx: the final model as a program of torch.export or ONNX, from
    preprocessed samples to scores with any batch size, which runs without Holdfast.  .csv: one line for each round.
    .md: a model card with the data, the settings and the results.

    Example:  holdfast export runs/x model.pt2
    """
    from holdfast.report.loading import read_federation
    from holdfast.runs import RunDirectory
    from holdfast.training.export import Exported
    from holdfast.training.export import export as write
    from holdfast.training.run import Run

    directory = RunDirectory.open(run)
    what = Exported(
        directory.experiment,
        directory.records(),
        read_federation(directory.path),
        directory.load_model,
        lambda: Run.open(directory.path).scoring_model,
    )
    write(what, file, format)
    console().print(f"Written: {file}", soft_wrap=True)


def report(
    runs: RunsArgument,
    out: Annotated[
        Path | None, typer.Option(help="The page (default: report.html in the first directory).")
    ] = None,
) -> None:
    """Write a self-contained HTML report of one run, or a comparison of several.

    Example:  holdfast report runs/fedavg runs/fedntd --out report.html
    """
    from holdfast.report import write_report

    page = out or runs[0] / "report.html"
    write_report(runs, page)
    console().print(f"Report: {page}", soft_wrap=True)


def figure(
    name: Annotated[str, typer.Argument(help=f"Which figure: {FIGURES}.")],
    runs: RunsArgument,
    out: Annotated[Path, typer.Option(help="A .pdf, .png or .svg file.")] = Path("figure.pdf"),
) -> None:
    """Draw one figure of runs, for a paper.

    Example:  holdfast figure accuracy runs/fedavg runs/fedntd --out accuracy.pdf
    """
    from holdfast.report import figure as draw

    draw(name, runs, out)
    console().print(f"Figure: {out}", soft_wrap=True)


def table(
    runs: RunsArgument,
    format: Annotated[str, typer.Option(help="markdown, latex or csv.")] = "markdown",
) -> None:
    """Print a table of runs, best first, for a paper.

    Example:  holdfast table runs/comparison --format latex
    """
    from holdfast.report import table as as_text

    print(as_text(runs, format))


def ui(
    root: Annotated[Path, typer.Argument(help="The directory of the runs.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = DASHBOARD_PORT,
    token: Annotated[str | None, typer.Option(help="The token for access from other machines.")] = None,
) -> None:
    """Serve a read-only dashboard that shows runs while they train.

    Example:  holdfast ui runs
    """
    from holdfast.report import serve

    serve(root, host, port, token, ready=lambda address: console().print(f"Open {address}", soft_wrap=True))


def _outcome(tested: list[dict[str, Any]], experiment: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the last tested model and their best values, and forgetting."""
    import numpy as np

    from holdfast import metrics

    shown, score = measures(experiment), score_measure(experiment)
    values = {measure: _values(tested, measure) for measure in shown}
    known = {
        "": {m.name: of[-1] if of else None for m, of in values.items()},
        "best_": {m.name: m.sign * max(m.sign * v for v in of) if of else None for m, of in values.items()},
    }
    found: dict[str, Any] = {f"{prefix}{name}": v for prefix, of in known.items() for name, v in of.items()}
    if not tested:
        return found | {"forgetting": None}
    key = f"class_{score.name}"
    by_class = np.array([record[key] for record in tested if key in record], float)
    forgetting = metrics.backward_transfer_forgetting(score.sign * by_class) if len(by_class) > 1 else None
    return found | {
        "forgetting": forgetting,
        **{name: tested[-1][name] for name in (key, "domain_accuracy") if name in tested[-1]},
    }


def _values(tested: list[dict[str, Any]], measure: Measure) -> list[float]:
    return [record[measure.name] for record in tested if record.get(measure.name) is not None]


def _short(value: Any) -> str:
    """A setting on one line; a mapping as its name and its other entries."""
    if isinstance(value, dict):
        rest = ", ".join(f"{k}={_short(v)}" for k, v in value.items() if k != "name" and v is not None)
        return f"{value.get('name', '')} {rest}".strip()
    return str(value)


def _spark(tested: list[dict[str, Any]], measure: Measure, width: int = 40) -> str:
    """A metric over rounds as a line of blocks, between 0 and 1, or 0 and its largest value where that is more."""
    values = _values(tested, measure)
    most = max(1.0, *values)
    step = max(1, len(values) // width)
    return "".join(SPARK_BLOCKS[max(0, min(7, int(8 * value / most)))] for value in values[::step])
