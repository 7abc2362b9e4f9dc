"""Drawings of a federation before training: as a file, and in the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import HoldfastError
from holdfast.report.federation_figures import federation_panels, federation_sentence
from holdfast.report.figures import FIGURES
from holdfast.report.panels import Figure, thin
from holdfast.report.printing import draw

if TYPE_CHECKING:
    from rich.console import RenderableType

SHADES = " ·▪■█"  # from no sample to the largest count
MAX_ROWS = 40  # clients shown in the terminal


def draw_federation(
    label_counts: ArrayLike, classes: Sequence[str], domains: Sequence[str] | None = None, *, out: Path
) -> Path:
    """Draw samples by client and class (bubbles) and clients' sizes by stage to a PDF, PNG or SVG file.

    Args:
        label_counts: [clients, C], samples of each class; [stages, clients, C] for a stream.
        classes: [C], the classes' names.
        domains: [clients], the name of each client's domain, where there are domains.
        out: the file to write.
    """
    counts = _checked(label_counts, classes, domains)
    kind = FIGURES["partition"]
    panels = federation_panels(counts, classes, domains or ())
    draw(
        Figure("partition", kind.title, kind.reading, kind.source, panels, federation_sentence(counts)),
        Path(out),
    )
    return Path(out)


def federation_text(
    label_counts: ArrayLike, classes: Sequence[str], domains: Sequence[str] | None = None
) -> "RenderableType":
    """Samples by client and class for a rich console; at most 40 clients are shown.

    The arguments are those of `draw_federation`. A stream has one column of sizes for each stage.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    counts = _checked(label_counts, classes, domains)
    total = counts.sum(axis=0)
    largest = max(1, int(total.max(initial=0)))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("client", justify="right")
    if domains:
        table.add_column("domain")
    table.add_column(Text(f"classes 0 to {len(classes) - 1}"), no_wrap=True)
    table.add_column("held", justify="right")
    for stage in range(len(counts)):
        table.add_column("samples" if len(counts) == 1 else f"stage {stage}", justify="right")
    shown = thin(len(total), MAX_ROWS)
    for client in shown:
        cells = "".join(_shade(int(count), largest) for count in total[client])
        sizes = [f"{int(size):,}" for size in counts[:, client].sum(axis=1)]
        domain = [Text(domains[client])] if domains else []
        table.add_row(str(client), *domain, Text(cells), str(int((total[client] > 0).sum())), *sizes)
    note = "" if len(shown) == len(total) else f" Shown: {len(shown)} of {len(total)} clients."
    key = f"{SHADES[1]} few … {SHADES[-1]} most ({largest:,} samples of one class at one client)."
    return Group(table, Text(f"{key}{note}", style="dim"), Text(federation_sentence(counts)))


def _shade(count: int, largest: int) -> str:
    """A character that is darker the larger the square root of the count, like the radius of a bubble."""
    return SHADES[int(np.ceil(np.sqrt(count / largest) * (len(SHADES) - 1)))]


def _checked(
    label_counts: ArrayLike, classes: Sequence[str], domains: Sequence[str] | None
) -> NDArray[np.int64]:
    counts = np.asarray(label_counts, dtype=np.int64)
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3 or counts.shape[2] != len(classes) or not counts.shape[1]:
        raise HoldfastError(
            f"label_counts must be [clients, {len(classes)}] or [stages, clients, {len(classes)}] for "
            f"{len(classes)} classes and at least one client, not {list(np.shape(label_counts))}"
        )
    if domains and len(domains) != counts.shape[1]:
        raise HoldfastError(
            f"domains must name one domain for each of {counts.shape[1]} clients, not {len(domains)}"
        )
    return counts
