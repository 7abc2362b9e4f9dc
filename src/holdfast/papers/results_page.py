"""The pages of results: an overview with a figure and a verdict for each paper, and a page for each paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.metrics.summary import UNKNOWN
from holdfast.papers.curve_figures import draw_curves
from holdfast.papers.figure_panels import draw_figure
from holdfast.papers.findings import compare
from holdfast.papers.overview import draw_overview
from holdfast.papers.paper_page import Section, paper_page
from holdfast.papers.published import Paper, load_tables
from holdfast.papers.recipe_page import recipe_page
from holdfast.papers.results import Results

HEAD = """# Results

This page summarises the reproduction of the tables of five papers on federated learning with heterogeneous data, and
of FLamby. In each figure, hollow marks are published numbers and filled marks are ours. A line joins the method of the
paper and its baseline, so the length of a line is the lead. Published accuracies are those of the last round; our
accuracies are means of the last ten rounds. The links in the table lead to all tables of a paper.
"""

FINDINGS = """<a id="findings"></a>

## How findings are judged

A finding states that one method leads another method in a column of a paper's table. It *holds* if our lead is at
least 70 % of the published lead and our accuracy of the leading method is at most 2 points below the published one. A
speed-up holds if it is at least half of the published one. Methods are paired by seed: a lead is the mean difference
over the seeds that both methods have.

Accuracies have two scores: the accuracy of the last round, which the papers print, and the mean of the last ten
rounds. The mean is the criterion, because only ten of a hundred clients take part in a round, and the accuracy after a
round depends on which clients these are. For example, FedAvg on CIFAR-10 with Dirichlet 0.1 has a deviation between
seeds of 12 points in the last round and of 1 point in the mean of ten. For runs of fewer than 20 rounds, whose accuracy
still increases, the last round is the criterion. The pages of the papers show both scores, with the criterion in bold
type. Forgetting, numbers of rounds, and FedMLP's accuracies, which are means over ten global epochs, have one score.

Every number in a table comes from `results/`, which contains the settings, versions, device and curves of each run.
Some notes also cite runs that are not stored; the notes state this.
"""

COMMANDS = """## Commands

`holdfast reproduce TABLE` runs the cells of a table that have no result. It can be interrupted and repeated.
`holdfast reproduce --page docs/results.md` writes these pages. `--workers 12` runs twelve cells in parallel. On
one GPU this is fastest with CUDA's multi-process service (`nvidia-cuda-mps-control -d`); without it, only one process
uses the GPU at a time.
"""


def write_page(results: str | Path, page: Path) -> Path:
    """Write the overview, the pages of the papers in a folder of the same name, the recipe page and the figures.

    Returns the folder of the figures.
    """
    if page.is_dir():
        raise HoldfastError(f"{page} is a folder; pass the name of a file, such as docs/results.md")
    stored, folder, images = Results(results), page.with_suffix(""), page.parent / "images" / "results"
    sections = _sections(stored, images)
    papers = list(dict.fromkeys(table.paper for table in load_tables().values()))
    of_paper = {paper: [s for s in sections if s.table.paper is paper] for paper in papers}
    for paper in papers:
        _write(folder / f"{paper.key}.md", paper_page(paper, of_paper[paper], folder))
    _write(page.with_name("recipe.md"), recipe_page(stored, page.parent, images))
    parts = [HEAD, _summary(of_paper, folder.name)]
    parts += [_overview(paper, of_paper[paper], images, page) for paper in papers]
    _write(page, "\n\n".join(part.strip() for part in (*parts, FINDINGS, COMMANDS)) + "\n")
    return images


def _write(path: Path, text: str) -> None:
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, text.encode())


def _sections(stored: Results, images: Path) -> list[Section]:
    """Every table with its comparison, its curves (once for tables of the same runs) and the figures."""
    sections, drawn = [], set[frozenset[str]]()
    for table in load_tables().values():
        cells = stored.of_table(table)
        done = [cell for cell in cells if stored.get(cell) is not None]
        if table.drawing is not None:
            figure = draw_figure(table, cells, stored, images)
            figures = [] if figure is None else [figure]
        else:
            runs = frozenset(cell.hash for cell in done)
            figures = [] if runs in drawn else draw_curves(table, cells, stored, images)
            drawn.add(runs)
        done_pairs, pairs = ({(cell.column, cell.row) for cell in some} for some in (done, cells))
        sections.append(Section(compare(table, cells, stored), len(done_pairs), len(pairs), figures))
    return sections


def _summary(of_paper: Mapping[Paper, Sequence[Section]], folder: str) -> str:
    lines = [
        "| paper | verdict | cells run | findings that hold | findings that hold by the last round |",
        "|---|---|---|---|---|",
    ]
    for paper, sections in of_paper.items():
        tables = [section for section in sections if section.table.published]
        done, planned = (sum(getattr(s, name) for s in tables) for name in ("done", "planned"))
        findings = [finding for section in tables for finding in section.findings]
        hold = sum(finding.holds for finding in findings)
        last = sum(finding.holds_by(finding.last) for finding in findings)
        counts = [f"{n} of {len(findings)}" if findings else UNKNOWN for n in (hold, last)]
        link = f"[{paper.name}]({folder}/{paper.key}.md)"
        lines.append(f"| {link} | {paper.verdict} | {done} of {planned} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _overview(paper: Paper, sections: Sequence[Section], images: Path, page: Path) -> str:
    """The section of a paper: its name, verdict and figure; empty for papers without a figure."""
    if paper.overview is None:
        return ""
    figure = draw_overview(paper, [s.comparison for s in sections], images / f"{paper.key}.svg")
    if figure is None:
        return ""
    name = f"{paper.name}: published against ours"
    return f"## {paper.name}\n\n{paper.verdict}\n\n![{name}]({figure.relative_to(page.parent).as_posix()})"
