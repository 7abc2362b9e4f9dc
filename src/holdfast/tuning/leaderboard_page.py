"""The page of the leaderboard: the rule, and a table for each protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from holdfast.core import files
from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.tuning.leaderboard import BASELINE, Protocol, Standing, left_out, load_protocols, standings
from holdfast.tuning.results import Results

HEAD = """# Leaderboard

Every method, tuned by the same rule, on the same federations.

- **Tuning.** Every method has the same number of settings to try. The first has the protocol's learning rate and the
  method's defaults; the others vary the learning rate and the hyper-parameter of the method that matters most, in
  ranges that `src/holdfast/tuning/leaderboard.yaml` lists. They are compared by successive halving on validation
  samples, a tenth of each client's, as by [`holdfast tune`](tuning.md). No trial has the test set.
- **Final runs.** The best settings are trained anew on all training samples, with seeds that the search has not used,
  on the same federation. The numbers below are these runs' on the test set, mean ± deviation over the seeds.
- **Order.** By the mean of the last ten rounds, or of the last quarter of them if that is fewer. The accuracy of the
  last round depends on who took part in it.
- **Forgetting** is the mean over classes of the best minus the final accuracy. **To FedAvg's** counts the rounds to
  FedAvg's mean of the last ten rounds. **Seconds** are those of a whole run, with the runs beside it that the results
  record. **MB** are sent in a run by all clients, in both directions.
- A method without a result is *not run*.

<!-- not run: takes hours -->
```console
$ holdfast leaderboard digits --workers 2                          # what is missing of one protocol
$ holdfast leaderboard all --workers 12 --page docs/leaderboard.md  # what is missing of all, and this page
$ holdfast leaderboard flsim-cifar10 --time-limit 3000              # goes on from its checkpoints next time
```
"""

COLUMNS = ("mean of last ten %", "last round %", "forgetting", "to FedAvg's", "seconds", "MB")


def write_leaderboard(results: Path, page: Path) -> None:
    """Write the page from the stored results, a folder for each protocol."""
    sections = (_section(protocol, Results(results / key)) for key, protocol in load_protocols().items())
    parts = [HEAD, _left_out(), *sections]
    with files.writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
    files.replace(page, ("\n\n".join(part.strip() for part in parts) + "\n").encode())


def cells(row: Standing) -> list[str]:
    """A method's numbers as text, in the order of `COLUMNS`."""
    return [
        _mean(row.averaged, 2),
        _mean(row.last, 2),
        _mean(row.forgetting, 3),
        _rounds(row.reached),
        _plain(row.seconds, lambda value: f"{value:.0f}" if value >= 10 else f"{value:.1f}"),
        _plain(row.megabytes, lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.1f}"),
    ]


def settings_text(row: Standing) -> str:
    """The settings that a search has chosen: ``lr=0.05, beta=2``."""
    return ", ".join(
        f"{key.removeprefix('method.')}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.changes.items()
    )


def _section(protocol: Protocol, results: Results) -> str:
    rows = standings(protocol, results)
    columns = list(COLUMNS)
    if protocol.published:
        columns.insert(0, "published %")
    if protocol.budget:
        columns.append("settings")
    lines = [
        f"| method | {' | '.join(columns)} |",
        "|---|" + "---:|" * (len(columns) - bool(protocol.budget)),
    ]
    lines[1] += "---|" if protocol.budget else ""
    done = [row for row in rows if row.averaged]
    for row in rows if protocol.published else done:
        values = cells(row)
        if protocol.published:
            values.insert(0, UNKNOWN if row.published is None else f"{row.published:.2f}")
        if protocol.budget:
            values.append(settings_text(row) or "as given")
        name = f"`{row.method}`" + (f" ({row.state})" if row.state else "")
        lines.append(f"| {name} | {' | '.join(values)} |")
    parts = [
        f"## {protocol.title}",
        f"`holdfast leaderboard {protocol.key}`. {protocol.about}",
        _rule(protocol),
    ]
    parts += ["\n".join(lines)] if len(lines) > 2 else []
    others = [row for row in rows if row not in done]
    if others and not protocol.published:
        states = dict.fromkeys(row.state for row in others)
        parts += [
            f"{state[0].upper()}{state[1:]}: {', '.join(f'`{row.method}`' for row in others if row.state == state)}."
            for state in states
        ]
    return "\n\n".join(parts)


def _rule(protocol: Protocol) -> str:
    seeds = f"{protocol.seeds} seed{'s' * (protocol.seeds > 1)}"
    if protocol.budget:
        spaces = ", ".join(f"`{space}`" for space in protocol.spaces[BASELINE])
        return f"{protocol.budget} settings for each method, {spaces} and its own; {seeds}."
    return f"Settings as published, without a search; {seeds}."


def _left_out() -> str:
    listed = "; ".join(f"`{method}`: {reason}" for method, reason in left_out().items())
    return f"Left out, since the leaderboard judges global models: {listed}."


def _mean(values: Sequence[float], digits: int) -> str:
    return format_mean(*mean_and_deviation(values), digits)


def _rounds(values: Sequence[float]) -> str:
    """The mean number of rounds, or the number of runs that have reached the target."""
    reached = [value for value in values if math.isfinite(value)]
    if not values:
        return UNKNOWN
    if not reached:
        return "never"
    share = "" if len(reached) == len(values) else f" ({len(reached)} of {len(values)})"
    return f"{fmean(reached):.0f}{share}"


def _plain(values: Sequence[float], text: Callable[[float], str]) -> str:
    return text(fmean(values)) if values else UNKNOWN
