"""The page of the recipe: selection, ablation, fluctuation between rounds, and comparison with other methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.papers.measures import accuracies, mean_of_last_rounds
from holdfast.papers.published import RECIPE, PaperTable, load_tables
from holdfast.papers.recipe_choice import (
    MARGIN,
    SEARCHES,
    RecipeChoice,
    choose,
    search_entries,
)
from holdfast.papers.results import Results

if TYPE_CHECKING:
    from holdfast.report.panels import Lines

FIGURE = "recipe-fluctuation.svg"
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

HEAD = """# Recommended method: `steady`

<!-- not run: takes minutes to hours, and downloads data -->
```console
$ holdfast run --method steady --data cifar10 --partition dirichlet:0.1 --clients 100 --clients-per-round 10
```

<!-- not run: a fragment -->
```python
run = hf.train(hf.Steady(), hf.models.cnn(), federation, rounds=30, clients_per_round=5)
```

`steady` has no hyper-parameters. It combines three methods with fixed strengths:

- [`balanced`](methods.md#balanced), τ = 0.25, on the clients: adds τ log π_k to the logits, where π_k are the class
  frequencies of client k. The loss accounts for the classes that the client holds, so that the model does not have to
  learn them.
- [`fedavgm`](methods.md#fedavgm), β = 0.7, on the server: momentum over rounds. Directions that the sampled clients of
  several rounds share accumulate; other directions average out.
- [`ema`](methods.md#ema), β = 0.9, on the server: the running mean of the global model over the rounds. This mean is
  tested, and it is the final model.

The computation and the communication of a client are the same as in FedAvg. The server stores two more copies of the
model. `steady` can be combined with other methods, for example `steady+ccvr`. It requires a classification task; for
other tasks use `fedavgm+ema`.
"""

RULE = """## Selection

The candidates and the selection rule were specified before the first run, in `src/holdfast/papers/recipe.yaml`:

- Each candidate is run on three federations with a split and a seed that no table reports.
- Its score is the mean accuracy over the last ten rounds, averaged over the three federations.
- The recipe is the candidate with the fewest parts among those within half a point of the best.
- A candidate that needs a second pass in each step must be two points ahead to be chosen.
- On CIFAR-10 without skew (IID) the recipe must be at most half a point behind FedAvg.

Two cases that the rule does not cover were decided after the search. Between candidates with the same number of parts,
the one with the higher score is chosen. The limit without skew also applies to digits with all clients in every round
(four seeds that no table reports). In this case there is no fluctuation to remove, and strong momentum can only reduce
the accuracy.
"""

ONE_SEED = """The search uses one seed, so differences of up to one point between candidates mean little. Among such
candidates, the choice is determined by the rule and not by the measurements. All candidates belong to one family of
methods, which a preliminary experiment had suggested."""

WHY = """## Why it works

Only a few clients take part in a round. If each client holds few classes, the mean of their models fits the classes of
these clients: accuracy increases for their classes and decreases for others, and the next round changes it again. The
fluctuation in the table is the standard deviation of the change in accuracy from one round to the next, in points, over
the second half of the rounds.
"""

WHY_AFTER = """Clients are sampled independently in each round, so the global models of consecutive rounds deviate
from a common centre in different directions. Their mean is close to this centre. Testing the mean removes the
fluctuation and increases the accuracy, without computation by the clients. A mean cannot remove errors that all rounds
have in common. There are two: local training is biased towards the classes that a client holds, and progress is
slow, because the updates of different clients partly cancel in the mean. The adjusted loss reduces the bias, and
momentum accumulates the directions that clients share.
"""

PARTS = """On CIFAR-10 momentum is useful only with the adjusted loss: without the adjusted loss, momentum also
accumulates the bias of local training. The combination without the running mean was not run."""

COMMANDS = """## Commands

<!-- not run: takes minutes to hours, and downloads data -->
```console
$ holdfast reproduce recipe/search-cifar10           # runs the candidates without a result
$ holdfast reproduce recipe --seeds 3                # runs every table of the papers with the recipe
$ holdfast reproduce --page docs/results.md          # also writes this page
```
"""


def recipe_page(stored: Results, folder: Path, images: Path) -> str:
    """The page in Markdown, for a file in ``folder``; its figure is drawn into the folder ``images``."""
    choice = choose(stored)
    figure = _draw_fluctuation(stored, images / FIGURE)
    parts = [HEAD, RULE, _scores(choice), _outcome(choice), ONE_SEED, WHY, _fluctuation(choice)]
    if figure is not None:
        name = "Accuracy over the second half of the rounds"
        parts.append(f"![{name}]({figure.relative_to(folder).as_posix()})")
    parts += [WHY_AFTER, _ablation(choice), _losses(choice), _tables(stored), COMMANDS]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _scores(choice: RecipeChoice) -> str:
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


def _outcome(choice: RecipeChoice) -> str:
    """The result of the rule, in sentences."""
    missing = [one.method for one in choice.candidates if one.score is None]
    if missing:
        listed = ", ".join(f"`{method}`" for method in missing)
        sentences = [f"Without a score, because not run on all federations: {listed}."]
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
        sentences.append(f"Excluded by the limit without skew: {', '.join(costly)}.")
    chosen = choice.chosen
    if chosen is None:
        return " ".join([*sentences, "No candidate has been chosen yet."])
    sentences.append(f"The rule selects `{chosen.method}`, named `steady`.")
    unknown = [name for name in choice.iid_federations if name not in chosen.iid]
    if unknown:
        sentences.append(
            f"It was **not run** on {' and '.join(unknown)}, so it is not known whether it is within the limit there; "
            "the last columns contain similar candidates."
        )
    return " ".join(sentences)


def _fluctuation(choice: RecipeChoice) -> str:
    by_method = {one.method: one for one in choice.candidates}
    lines = [
        f"| fluctuation, points | {' | '.join(choice.federations)} |",
        "|---|" + "---:|" * len(choice.federations),
    ]
    for label, method in ABLATION:
        runs = by_method[method].runs
        cells = [
            NOT_RUN if name not in runs else f"{runs[name].fluctuation:.2f}" for name in choice.federations
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ablation(choice: RecipeChoice) -> str:
    """The ablation table: accuracy, and forgetting in brackets."""
    by_method = {one.method: one for one in choice.candidates}
    lines = [
        "## Ablation",
        "",
        "Accuracy as the mean of the last ten rounds, and forgetting in brackets.",
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


def _losses(choice: RecipeChoice) -> str:
    """The federations of the search in which another candidate leads by more than the margin."""
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
            "## Limitations",
            "",
            f"Candidates that are more than {MARGIN:g} points ahead of `steady` in one federation of the search:",
            "",
            *lines,
            "",
            "During about the first ten rounds the running mean contains early models and is less accurate than the "
            "global model. A client with a single class learns almost nothing from the adjusted loss. On digits, with "
            "every method tuned, other methods are ahead of `steady` ([leaderboard](leaderboard.md)). On "
            "Fashion-MNIST in FedFA's setting, FedFA is ahead of `steady` (next section).",
        ]
    )


def _tables(stored: Results) -> str:
    """The recipe in the papers' tables, compared with the best of the other methods."""
    lines = [
        "## Comparison in the papers' tables",
        "",
        "`steady` with the settings of each table, and the best other method of our runs: means of the last ten "
        "rounds.",
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


def _means(table: PaperTable, stored: Results) -> dict[tuple[str, str], list[float]]:
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


def _draw_fluctuation(stored: Results, out: Path) -> Path | None:
    """Draw accuracy over the second half of the rounds for FedAvg and the parts; None if no candidate was run."""
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
    draw(Figure("fluctuation", "Accuracy from round to round", "", RECIPE, panels, ""), out)
    return out
