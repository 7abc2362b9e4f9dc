"""The page of the leaderboard: the procedure, and a table for each protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from holdfast.core import files
from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.tuning.leaderboard import BASELINE, Protocol, Standing, left_out, load_protocols, standings
from holdfast.tuning.results import StoredRuns

HEAD = """# Leaderboard

The leaderboard compares all methods on the same federations. Every method is tuned in the same way.

- **Tuning.** The same number of settings is tried for every method. The first setting has the learning rate of the
  protocol and the default options of the method. The others vary the learning rate and the most important
  hyper-parameter of the method, in the ranges of `src/holdfast/tuning/leaderboard.yaml`. Settings are compared by
  successive halving on validation samples, a tenth of the samples of each client, as in [`holdfast tune`](tuning.md).
  Trials do not use the test set.
- **Final runs.** The best setting is trained again on all training samples, on the same federation, with seeds that the
  search has not used. The numbers below are those of the final runs on the test set, mean ± deviation over the seeds.
- **Order.** Methods are ranked by the mean of the last ten rounds, or of the last quarter of the rounds if that is
  less. The accuracy of the last round depends on the clients that took part in it.
- **Columns.** *Forgetting* is the best minus the final accuracy, averaged over classes. *To FedAvg's* is the number of
  rounds to FedAvg's mean of the last ten rounds. *Seconds* is the time of a run; other runs may have run at the same
  time, and the results record their number. *MB* is the traffic of all clients in a run, in both directions.
- A method without a result is marked *not run*.

<!-- not run: takes hours -->
```console
$ holdfast leaderboard digits --workers 2                          # runs the missing parts of one protocol
$ holdfast leaderboard all --workers 12 --page docs/leaderboard.md  # runs the missing parts of all, writes this page
$ holdfast leaderboard flsim-cifar10 --time-limit 3000              # stops, and resumes at the next call
```
"""

COLUMNS = ("mean of last ten %", "last round %", "forgetting", "to FedAvg's", "seconds", "MB")


def write_leaderboard(results: Path, page: Path) -> None:
    """Write the page from the stored results, a folder for each protocol."""
    sections = (_section(protocol, StoredRuns(results / key)) for key, protocol in load_protocols().items())
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


def _section(protocol: Protocol, results: StoredRuns) -> str:
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
        return f"{protocol.budget} settings for each method, {spaces} and its own space; {seeds}."
    return f"Published settings, without a search; {seeds}."


def _left_out() -> str:
    listed = "; ".join(f"`{method}`: {reason}" for method, reason in left_out().items())
    return f"The leaderboard compares global models. Methods that are not included: {listed}."


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
