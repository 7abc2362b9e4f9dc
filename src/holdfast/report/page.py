"""The report: one self-contained HTML page with its data, scripts and styles."""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import sha256
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core import files
from holdfast.report import palette
from holdfast.report.curves import NotRecorded
from holdfast.report.figures import FIGURES, build_figure
from holdfast.report.loading import Given, RunGroup, StoredRun, group_runs, load_runs
from holdfast.report.tables import leaderboard

if TYPE_CHECKING:
    from jinja2 import Template

STYLES = ("uplot.min.css", "page.css")
SCRIPTS = ("uplot.min.js", "base.js", "curves.js", "bars.js", "cells.js", "figure.js", "page.js")
MAX_INCIDENTS = 500


def write_report(runs: Given | Sequence[Given], out: Path | str) -> Path:
    """Write one self-contained HTML page about runs or run directories to ``out`` and return its path."""
    return write_page(report_html(load_runs(runs)), out)


def write_page(page: str, out: Path | str) -> Path:
    """Write a page to ``out``, whose folder is made, and return its path."""
    out = Path(out)
    with files.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    files.replace(out, page.encode())
    return out


def report_html(runs: Sequence[StoredRun], groups: Sequence[RunGroup] | None = None) -> str:
    """The page about these runs, grouped by experiment or as given; the same runs give the same bytes."""
    from markupsafe import Markup

    groups = group_runs(runs) if groups is None else groups
    style = "".join(map(asset, STYLES))
    script = "".join(map(asset, (*SCRIPTS, "report.js")))
    return template("report.html").render(
        title=_title(groups),
        subtitle=_subtitle(runs, groups),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:",
        # The package's own files, and JSON without tags: no escaping is needed.
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        model=Markup(_json(page_model(runs, groups))),  # noqa: S704
    )


def page_model(
    runs: Sequence[StoredRun],
    groups: Sequence[RunGroup] | None = None,
    only: Collection[str] = tuple(FIGURES),
) -> dict[str, Any]:
    """The data of the page's scripts: the leaderboard, the figures named in ``only``, incidents and runs."""
    groups = group_runs(runs) if groups is None else groups
    figures, missing = [], []
    for name in FIGURES:
        if name not in only:
            continue
        try:
            figures.append(build_figure(name, groups).to_json())
        except NotRecorded as reason:
            missing.append([FIGURES[name].title, str(reason)])
    return {
        "palette": palette.for_page(),
        "leaderboard": leaderboard(groups).to_json(),
        "figures": figures,
        "missing": missing,
        "incidents": _incidents(runs),
        "runs": _settings(runs),
    }


def template(name: str) -> "Template":
    """The jinja2 template of a page; values are escaped unless they are ``Markup``."""
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(_read("templates", name))


def asset(name: str) -> str:
    return _read("assets", name)


def _read(folder: str, name: str) -> str:
    return package_files("holdfast.report").joinpath(folder, name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _json(model: dict[str, Any]) -> str:
    text = json.dumps(model, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")  # a class may be named </script>


def _title(groups: Sequence[RunGroup]) -> str:
    if len(groups) == 1:
        return f"{groups[0].label} on {groups[0].runs[0].dataset}"
    datasets = sorted({group.runs[0].dataset for group in groups})
    return f"{len(groups)} methods on {', '.join(datasets)}"


def _subtitle(runs: Sequence[StoredRun], groups: Sequence[RunGroup]) -> str:
    longest = max(int(run.records[-1]["round"]) for run in runs)
    seeds = max(len(group.runs) for group in groups)
    each = "one seed each" if seeds == 1 else f"up to {seeds} seeds each"
    return f"{_plural(len(runs), 'run')}, {each}, {_plural(longest, 'round')}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _incidents(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """The number of incidents of each kind, and one row for each of the first incidents."""
    found = [
        [
            run.name,
            str(record["round"]),
            *(str(incident.get(key, "")) for key in ("client", "kind", "detail")),
        ]
        for run in runs
        for record in run.records
        for incident in record.get("incidents") or []
    ]
    kinds = Counter(kind for *_, kind, _ in found).most_common()
    left_out = len(found) - MAX_INCIDENTS
    more = [["…", "", "", "", f"and {left_out} more"]] if left_out > 0 else []
    counts = ", ".join(f"{number} x {kind}" for kind, number in kinds)
    return {"counts": counts, "rows": found[:MAX_INCIDENTS] + more}


def _settings(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """One row per run of its name, seed and settings; settings that several runs share are listed once."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    head = ["run", "seed", *keys]
    rows = [[run.name, str(run.seed), *(str(run.settings.get(key, "–")) for key in keys)] for run in runs]
    if len(rows) == 1:
        pairs = [list(pair) for pair in zip(head, rows[0], strict=True)]
        return {"head": ["setting", "value"], "rows": pairs, "common": ""}
    same = [place for place in range(1, len(head)) if len({row[place] for row in rows}) == 1]
    differing = [place for place in range(len(head)) if place not in same]
    common = ", ".join(f"{head[place]} {rows[0][place]}" for place in same)
    return {
        "head": [head[place] for place in differing],
        "rows": [[row[place] for place in differing] for row in rows],
        "common": f"The same in all: {common}." if common else "",
    }
