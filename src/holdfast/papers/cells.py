"""The cells of a table: each is one run, known by a hash of its settings."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.papers.published import Table, TableColumn


@dataclass(frozen=True)
class Cell:
    """One run of a table. Cells of different tables with the same settings have the same hash: one run serves all.

    ``needs`` is what is missing to run it, if anything.
    """

    table: str
    column: str
    row: str
    seed: int
    settings: Mapping[str, Any]  # of an Experiment, as written; the seed apart
    needs: str | None = None

    @cached_property
    def hash(self) -> str:
        """What identifies the run: `hash_of` its settings and seed."""
        return hash_of(self.settings, self.seed)

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.table} {self.column} {self.row} seed {self.seed}"


def hash_of(settings: Mapping[str, Any], seed: int) -> str:
    """16 hex digits that identify a run: the hash of its settings, as written, and its seed."""
    written = json.dumps({**settings, "seed": seed}, sort_keys=True)
    return sha256(written.encode()).hexdigest()[:16]


def plan(
    table: Table,
    columns: Collection[str] | None = None,
    rows: Collection[str] | None = None,
    seeds: int = 1,
) -> list[Cell]:
    """The cells of a table, seed by seed, the paper's method and its baseline first in each column.

    ``columns`` and ``rows`` are the keys of those wanted, ``seeds`` how many, as the paper numbers them.
    """
    chosen = [key for key in table.columns if columns is None or key in columns]
    wanted = [key for key in table.rows if rows is None or key in rows]
    if seeds < 1:
        raise HoldfastError(f"a cell needs at least 1 seed, not {seeds}")
    main = (table.paper.own, table.paper.baseline)
    pairs = [(c, r) for c, r in table.pairs() if c.key in chosen and r.key in wanted]
    pairs.sort(key=lambda pair: (chosen.index(pair[0].key), pair[1].key not in main))
    cells = []
    for number in range(seeds):
        for column, row in pairs:
            settings = {
                key: setting.value
                for key, setting in table.settings_of(column, row).items()
                if setting.value is not None
            }
            needs = column.needs or row.needs
            cells.append(
                Cell(
                    table=table.id,
                    column=column.key,
                    row=row.key,
                    seed=_seed(column, number),
                    settings=settings,
                    needs=needs,
                )
            )
    return cells


def _seed(column: TableColumn, number: int) -> int:
    """The paper's seeds, then those that follow its last."""
    given: list[int] = column.seeds.value
    return given[number] if number < len(given) else given[-1] + number - len(given) + 1
