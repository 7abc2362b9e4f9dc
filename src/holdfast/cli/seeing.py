"""``show``, ``export``, ``report``, ``figure``, ``table``, ``ui``: what came of runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.runs import RunDirectory

One = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Many = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run directories, or directories of runs.")
]

SPARKS = "▁▂▃▄▅▆▇█"


def show(run: One, as_json: Json = False) -> None:
    """Print what a run is and what it came to.

    Example:  holdfast show runs/x
    """
    from holdfast.runs import RunDirectory, list_runs

    directory = RunDirectory.open(run)
    experiment, records = directory.experiment, directory.records()
    state = list_runs(run)[0].state
    tested = [record for record in records if "accuracy" in record]
    told = {"run": str(run), "state": state, "rounds": len(records), **_outcome(tested)}
    if as_json:
        print_json(told | {"experiment": experiment})
        return
    out = console()
    name = experiment["method"]["name"] if isinstance(experiment["method"], dict) else experiment["method"]
    out.print(f"{name}: {state} after {len(records)} of {experiment['rounds']} rounds", style="bold")
    settings = {key: value for key, value in experiment.items() if key not in ("classes", "shape")}
    print_table(
        "", ["", ""], [[f"  {key}", _short(value)] for key, value in settings.items() if value is not None]
    )
    if not tested:
        return
    out.print(f"\naccuracy    {told['accuracy']:.2%}   best {told['best_accuracy']:.2%}   {_spark(tested)}")
    if told["forgetting"] is not None:
        out.print(f"forgetting  {told['forgetting']:.2%}   (mean over classes of best minus final accuracy)")
    by_class = zip(experiment["classes"], tested[-1]["class_accuracy"], strict=True)
    known = [(str(label), value) for label, value in by_class if value is not None]
    worst = sorted(known, key=lambda pair: pair[1])[:3]
    out.print("worst       " + "   ".join(f"{label}: {value:.1%}" for label, value in worst), soft_wrap=True)
    domains = tested[-1].get("domain_accuracy", {})
    if domains:
        told_by = "   ".join(f"{name}: {value:.1%}" for name, value in domains.items() if value is not None)
        out.print(f"domains     {told_by}", soft_wrap=True)


def export(
    run: One,
    file: Annotated[Path, typer.Argument(help="What to write: .safetensors, .pt2 or .csv.")],
) -> None:
    """Write a run's model or its metrics to a file others can read.

    .safetensors: the final weights.  .pt2: the final model as a torch.export program, from preprocessed
    inputs to logits, which runs without Holdfast.  .csv: one line a round.

    Example:  holdfast export runs/x model.pt2
    """
    from holdfast.runs import RunDirectory, files

    writers = {".safetensors": _weights, ".pt2": _program, ".csv": _rounds}
    if file.suffix not in writers:
        raise HoldfastError(f"cannot tell what to export from '{file}'; it must end in {', '.join(writers)}")
    directory = RunDirectory.open(run)
    with files.writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        writers[file.suffix](directory, file)
    console().print(f"Written: {file}", soft_wrap=True)


def report(
    runs: Many,
    out: Annotated[Path | None, typer.Option(help="The page (default: report.html in the first).")] = None,
) -> None:
    """Write one self-contained HTML page about one run, or a comparison of many.

    Example:  holdfast report runs/fedavg runs/fedntd --out report.html
    """
    from holdfast.report import write_report

    page = out or runs[0] / "report.html"
    write_report(_found(runs), page)
    console().print(f"Report: {page}", soft_wrap=True)


def figure(
    name: Annotated[str, typer.Argument(help="Which figure; an unknown name lists them.")],
    runs: Many,
    out: Annotated[Path, typer.Option(help="A .pdf, .png or .svg file.")] = Path("figure.pdf"),
) -> None:
    """Draw one figure of runs for print.

    Example:  holdfast figure accuracy runs/fedavg runs/fedntd --out accuracy.pdf
    """
    from holdfast.report import figure as draw

    draw(name, _found(runs), out)
    console().print(f"Figure: {out}", soft_wrap=True)


def table(
    runs: Many,
    format: Annotated[str, typer.Option(help="markdown, latex or csv.")] = "markdown",
) -> None:
    """Print the leaderboard of runs as text for a paper.

    Example:  holdfast table runs/comparison --format latex
    """
    from holdfast.report import table as as_text

    print(as_text(_found(runs), format))


def ui(
    root: Annotated[Path, typer.Argument(help="The directory that holds the runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need a token.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8642,
    token: Annotated[str | None, typer.Option(help="What visitors from elsewhere must know.")] = None,
) -> None:
    """Serve a dashboard of runs, live while they train. It changes nothing.

    Example:  holdfast ui runs
    """
    from holdfast.report import serve

    serve(root, host, port, token, ready=lambda address: console().print(f"Open {address}", soft_wrap=True))


def _found(paths: list[Path]) -> list[Path]:
    """The runs meant: directories of runs stand for the runs in them that have something to show."""
    from holdfast.runs import list_runs

    found = []
    for path in paths:
        inside = [run.path for run in list_runs(path) if run.rounds and run.state != "corrupt"]
        if not inside:
            raise HoldfastError(f"{path} holds no run with a finished round")
        found += sorted(inside)
    return found


def _outcome(tested: list[dict[str, Any]]) -> dict[str, Any]:
    import numpy as np

    from holdfast import metrics

    if not tested:
        return {"accuracy": None, "best_accuracy": None, "forgetting": None}
    last = tested[-1]
    by_class = np.array([record["class_accuracy"] for record in tested], float)
    return {
        "accuracy": last["accuracy"],
        "best_accuracy": max(record["accuracy"] for record in tested),
        "forgetting": metrics.backward_transfer_forgetting(by_class) if len(tested) > 1 else None,
        **{key: last[key] for key in ("class_accuracy", "domain_accuracy") if key in last},
    }


def _short(value: Any) -> str:
    if isinstance(value, dict):
        rest = ", ".join(f"{k}={_short(v)}" for k, v in value.items() if k != "name" and v is not None)
        return f"{value.get('name', '')} {rest}".strip()
    return str(value)


def _spark(tested: list[dict[str, Any]], width: int = 40) -> str:
    """Accuracy over rounds as a line of blocks, from 0 to 100 %."""
    step = max(1, len(tested) // width)
    return "".join(SPARKS[min(7, int(8 * record["accuracy"]))] for record in tested[::step])


def _weights(directory: RunDirectory, file: Path) -> None:
    from safetensors.torch import save_file

    save_file(directory.load_model(), file)


def _program(directory: RunDirectory, file: Path) -> None:
    import torch

    from holdfast.outcome import Run

    run = Run.open(directory.path)
    example = torch.zeros(2, *run.experiment["shape"])
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(run.model, (example,), dynamic_shapes=({0: batch},)), file)


def _rounds(directory: RunDirectory, file: Path) -> None:
    """The numbers of every round; accuracies of classes and domains as one column each."""
    rows = []
    for record in directory.records():
        row = {key: value for key, value in record.items() if isinstance(value, (int, float))}
        row |= {f"seconds_{key}": value for key, value in record["seconds"].items()}
        names = directory.experiment["classes"]
        values = record.get("class_accuracy", [])
        row |= {f"accuracy_{name}": value for name, value in zip(names, values, strict=False)}
        row |= {f"accuracy_{name}": value for name, value in record.get("domain_accuracy", {}).items()}
        rows.append(row | {"clients": len(record["participants"]), "incidents": len(record["incidents"])})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, columns)
        writer.writeheader()
        writer.writerows(rows)
