"""The page of the recipe: its choice, an ablation of its parts, fluctuation between rounds, and its losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.papers.measures import accuracies, mean_of_last_rounds
from holdfast.papers.published import RECIPE, Table, load_tables
from holdfast.papers.recipe_choice import (
    MARGIN,
    SEARCHES,
    Choice,
    choose,
    search_entries,
)
from holdfast.papers.results import Results

if TYPE_CHECKING:
    from holdfast.report.panels import Lines

FIGURE = "recipe-swing.svg"
ABLATION = (
    ("FedAvg", "fedavg"),
    ("+ running mean", "ema"),
    ("+ running mean, adjusted loss τ = 0.5", "balanced:tau=0.5+ema"),
    ("+ running mean, momentum", "fedavgm+ema"),
    ("+ running mean, momentum, adjusted loss τ = 0.5", "balanced:tau=0.5+fedavgm+ema"),
    ("+ running mean, momentum, adjusted loss τ = 0.25: `steady`", "balanced:tau=0.25+fedavgm+ema"),
)
"""The candidates of the ablation, by the parts that they add to FedAvg."""

DRAWN = {
    "fedavg": "fedavg",
    "ema": "ema",
    "fedavgm+ema": "fedavgm+ema",
    "balanced:tau=0.25+fedavgm+ema": "steady",
}
"""The candidates in the figure, and their names there."""

NOT_RUN = "not run"

HEAD = """# Which method to take: `steady`

<!-- not run: takes minutes to hours, and downloads data -->
```console
$ holdfast run --method steady --data cifar10 --partition dirichlet:0.1 --clients 100 --clients-per-round 10
```

<!-- not run: a fragment -->
```python
run = hf.train(hf.Steady(), hf.models.cnn(), federation, rounds=30, clients_per_round=5)
```

`steady` has no hyper-parameter. It is three parts with fixed strengths, each of which is a method of its own:

- [`balanced`](methods.md#balanced), τ = 0.25, at the clients: adds τ log π_k to the logits, π_k the client's class
  frequencies. The loss accounts for which classes the client holds, so that the model does not have to.
- [`fedavgm`](methods.md#fedavgm), β = 0.7, on the server: keeps a velocity. A direction that the cohorts of several
  rounds share adds up, one that they do not share averages out.
- [`ema`](methods.md#ema), β = 0.9, on the server: the running mean of the global model over the rounds is what is
  tested, and the final model.

A client computes and sends what it does in FedAvg. The server keeps two more tensors of the model's size. Other
methods are added as to any method, `steady+ccvr`. It needs classes; for other tasks `fedavgm+ema` is what remains
of it.
"""

RULE = """## How it was chosen

Candidates and rule were written down before the first run, in `src/holdfast/papers/recipe.yaml`:

- Each candidate is run on three federations with a split and a seed that no table reports.
- Its score is its mean accuracy over the last ten rounds, averaged over the three federations.
- The recipe is the candidate with the fewest parts among those within half a point of the best.
- A candidate that needs a second pass in each step must be two points ahead to be chosen.
- On CIFAR-10 without skew (IID) the recipe must not be more than half a point behind FedAvg.

The rule left two things open, which were settled after the search. Between candidates with the same number of parts the
score decides. And the bar without skew also holds on digits with all clients in every round (four seeds that no table
reports), the case in which there is no swing to remove and a strong momentum can only cost.
"""

ONE_SEED = """The search has one seed, so that differences of a point and less between candidates mean little: the rule
decides, not the evidence. The candidates are of one family, which an earlier try had suggested."""

WHY = """## Why it works

A few clients take part in a round. Where each holds few classes, the round's mean is a model of the classes of these
clients: it gains theirs and loses others, and the next round's clients turn it elsewhere. The swing below is the
standard deviation of the change in accuracy from one round to the next, in points, over the second half of the rounds.
"""

WHY_AFTER = """The global models of neighbouring rounds err in different directions from a common centre, as the cohorts
are drawn independently. Their mean is close to that centre, so that testing the mean removes the swing and gains
accuracy at once; clients compute nothing for it. What a mean cannot remove is what all rounds have in common: the bias
of local training towards the classes that a client holds, which the adjusted loss reduces, and slow progress, since
cohorts that disagree cancel in the mean of the models; momentum adds up what they agree on.
"""

PARTS = """On CIFAR-10 momentum and the adjusted loss need each other: without the adjusted loss, momentum adds up
the bias of local training along with the progress. The stack without the running mean was not run."""

COMMANDS = """## Commands

<!-- not run: takes minutes to hours, and downloads data -->
```console
$ holdfast reproduce recipe/search-cifar10           # candidates that have no result yet
$ holdfast reproduce recipe --seeds 3                # every table of the papers with the recipe
$ holdfast reproduce --page docs/results.md          # writes this page too
```
"""


def recipe_page(stored: Results, folder: Path, images: Path) -> str:
    """The page in Markdown, for a file in ``folder``; its figure is drawn into the folder ``images``."""
    choice = choose(stored)
    figure = _draw_swing(stored, images / FIGURE)
    parts = [HEAD, RULE, _scores(choice), _outcome(choice), ONE_SEED, WHY, _swing(choice)]
    if figure is not None:
        name = "Accuracy over the second half of the rounds"
        parts.append(f"![{name}]({figure.relative_to(folder).as_posix()})")
    parts += [WHY_AFTER, _ablation(choice), _losses(choice), _tables(stored), COMMANDS]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _scores(choice: Choice) -> str:
    """Every candidate, the best first."""
    iid = [f"{name}, against FedAvg" for name in choice.iid_federations]
    columns = [*choice.federations, "score", *iid]
    lines = [f"| candidate | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for one in choice.candidates:
        name = f"`{one.method}`"
        name = f"**{name}**" if choice.chosen is one else name
        cells = [
            _points(None if run is None else run.accuracy) for run in map(one.runs.get, choice.federations)
        ]
        leads = [f"{one.iid[name]:+.2f}" if name in one.iid else NOT_RUN for name in choice.iid_federations]
        lines.append(f"| {name} | {' | '.join([*cells, _points(one.score), *leads])} |")
    return "\n".join(lines)


def _outcome(choice: Choice) -> str:
    """The result of the rule, in sentences."""
    missing = [one.method for one in choice.candidates if one.score is None]
    if missing:
        listed = ", ".join(f"`{method}`" for method in missing)
        sentences = [f"Not run on all federations, and so not judged: {listed}."]
    else:
        sentences = [
            f"All {len(choice.candidates)} candidates were run on all {len(choice.federations)} federations."
        ]
    if choice.near:
        near = ", ".join(f"`{method}`" for method in choice.near)
        sentences.append(f"Within {MARGIN:g} points of the best: {near}.")
    costly = [
        f"`{one.method}` ({min(one.iid.values()):+.2f} points)"
        for one in choice.candidates
        if one.method in choice.near and not one.costs_nothing
    ]
    if costly:
        sentences.append(f"Below the bar without skew, and so left out: {', '.join(costly)}.")
    chosen = choice.chosen
    if chosen is None:
        return " ".join([*sentences, "There is no choice yet."])
    sentences.append(f"The choice is `{chosen.method}`, named `steady`.")
    unknown = [name for name in choice.iid_federations if name not in chosen.iid]
    if unknown:
        sentences.append(
            f"It was **not run** on {' and '.join(unknown)}, so that the bar there is open; the last columns have its "
            "relatives."
        )
    return " ".join(sentences)


def _swing(choice: Choice) -> str:
    by_method = {one.method: one for one in choice.candidates}
    lines = [
        f"| swing, points | {' | '.join(choice.federations)} |",
        "|---|" + "---:|" * len(choice.federations),
    ]
    for label, method in ABLATION:
        runs = by_method[method].runs
        cells = [NOT_RUN if name not in runs else f"{runs[name].swing:.2f}" for name in choice.federations]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ablation(choice: Choice) -> str:
    """The ablation table: accuracy, and forgetting in brackets."""
    by_method = {one.method: one for one in choice.candidates}
    lines = [
        "## What each part gives",
        "",
        "Accuracy, the mean of the last ten rounds; forgetting in brackets.",
        "",
        f"| | {' | '.join(choice.federations)} | mean |",
        "|---|" + "---:|" * (len(choice.federations) + 1),
    ]
    for label, method in ABLATION:
        one = by_method[method]
        cells = [
            NOT_RUN if run is None else f"{run.accuracy:.2f} ({run.forgetting:.2f})"
            for run in map(one.runs.get, choice.federations)
        ]
        lines.append(f"| {label} | {' | '.join(cells)} | {_points(one.score)} |")
    return "\n".join(lines) + f"\n\n{PARTS}"


def _losses(choice: Choice) -> str:
    """The federations of the search in which another candidate is further ahead than the margin."""
    chosen = choice.chosen
    if chosen is None:
        return ""
    lines = []
    for name in choice.federations:
        ahead = [
            f"`{one.method}` {one.runs[name].accuracy - chosen.runs[name].accuracy:+.2f}"
            for one in sorted(
                (one for one in choice.candidates if name in one.runs),
                key=lambda one: -one.runs[name].accuracy,
            )
            if one.runs[name].accuracy > chosen.runs[name].accuracy + MARGIN
        ]
        lines.append(f"- {name}: {', '.join(ahead) if ahead else 'none'}.")
    return "\n".join(
        [
            "## Where it loses",
            "",
            f"Candidates more than {MARGIN:g} points ahead of it in one federation of the search:",
            "",
            *lines,
            "",
            "Over the first ten rounds or so the running mean contains models of the beginning and lags behind the "
            "global model. A client with a single class learns almost nothing from its adjusted loss. On digits, with "
            "every method tuned, others are ahead of it ([leaderboard](leaderboard.md)).",
        ]
    )


def _tables(stored: Results) -> str:
    """The recipe in the papers' tables, beside the best of the other methods there."""
    lines = [
        "## In the papers' tables",
        "",
        "The recipe with the settings of every table, beside the other method that is best there as we run it: means "
        "of the last ten rounds.",
        "",
        "| table | federation | `steady` | best other method | lead |",
        "|---|---|---:|---:|---:|",
    ]
    tables = [table for table in load_tables().values() if table.paper.key == RECIPE and not table.is_search]
    for table in tables:
        means = _means(table, stored)
        for column in table.columns.values():
            of_column = {
                row: values
                for (key, row), values in means.items()
                if key == column.key and "partition" not in table.rows[row].settings  # another federation
            }
            own = of_column.pop(table.paper.proposed, None)
            best = max(of_column, key=lambda row: float(np.mean(of_column[row])), default=None)
            other, lead = NOT_RUN, UNKNOWN
            if best is not None:
                other = f"{table.rows[best].label} {_mean(of_column[best])}"
                if own is not None:
                    lead = f"{np.mean(own) - np.mean(of_column[best]):+.2f}"
            lines.append(
                f"| {table.id.removeprefix(f'{RECIPE}/')} | {column.label} | {NOT_RUN if own is None else _mean(own)} "
                f"| {other} | {lead} |"
            )
    return "\n".join(lines)


def _means(table: Table, stored: Results) -> dict[tuple[str, str], list[float]]:
    """The means of the last ten rounds of every run of a table, in percent, by column and row."""
    means: dict[tuple[str, str], list[float]] = {}
    for cell in stored.of_table(table):
        entry = stored.get(cell)
        value = None if entry is None or "failed" in entry else mean_of_last_rounds(entry)
        if value is not None:
            means.setdefault((cell.column, cell.row), []).append(100 * value)
    return means


def _mean(values: Sequence[float]) -> str:
    return format_mean(*mean_and_deviation(values))


def _points(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.2f}"


def _draw_swing(stored: Results, out: Path) -> Path | None:
    """Accuracy over the second half of the rounds, of FedAvg and of the parts; None if no candidate was run."""
    from holdfast.report.panels import Figure, Line, Lines
    from holdfast.report.printing import draw  # matplotlib is not loaded before it is needed

    panels: list[Lines] = []
    for table in (load_tables()[name] for name in SEARCHES):
        entries = search_entries(table, stored)
        for key, column in table.columns.items():
            lines = []
            for colour, method in enumerate(DRAWN):
                if (key, method) in entries:
                    curve = accuracies(entries[key, method][0])
                    half = len(curve) // 2
                    rounds = np.arange(half + 1, len(curve) + 1, dtype=float)
                    lines.append(Line(DRAWN[method], rounds, curve[half:], colour))
            if lines:
                panels.append(Lines(column.label, "round", "accuracy", lines))
    if not panels:
        return None
    draw(Figure("swing", "Accuracy from round to round", "", RECIPE, panels, ""), out)
    return out
