"""The cells of a table or a figure: each is one run, identified by a hash of its settings."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.papers.published import PaperTable, TableColumn
from holdfast.papers.recorded_curves import needed_curves


@dataclass(frozen=True)
class Cell:
    """One run of a table. Cells of different tables with the same settings have the same hash and share a run.

    Attributes:
        table, column, row: its position.
        seed: the seed of the run.
        settings: those of an `Experiment`, as the YAML file has them, without the seed.
        needs: the missing requirement, if any.
        curves: what a figure needs of the run, by the names in `holdfast.papers.recorded_curves`.
    """

    table: str
    column: str
    row: str
    seed: int
    settings: Mapping[str, Any]
    needs: str | None = None
    curves: tuple[str, ...] = ()

    @cached_property
    def hash(self) -> str:
        return hash_of(self.settings, self.seed)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.table} {self.column} {self.row} seed {self.seed}"


def hash_of(settings: Mapping[str, Any], seed: int) -> str:
    """16 hexadecimal digits that identify a run by its settings, as written, and its seed."""
    text = json.dumps({**settings, "seed": seed}, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def plan(
    table: PaperTable,
    columns: Collection[str] | None = None,
    rows: Collection[str] | None = None,
    seeds: int = 1,
) -> list[Cell]:
    """The cells of a table, seed by seed; in each column the paper's method and its baseline come first.

    Args:
        table: the table.
        columns, rows: keys of those to include; all by default.
        seeds: the number of seeds of each cell, the paper's own first.
    """
    column_keys = [key for key in table.columns if columns is None or key in columns]
    row_keys = [key for key in table.rows if rows is None or key in rows]
    if seeds < 1:
        raise HoldfastError(f"a cell needs at least 1 seed, not {seeds}")
    main = (table.paper.proposed, table.paper.baseline)
    pairs = [(c, r) for c, r in table.pairs() if c.key in column_keys and r.key in row_keys]
    pairs.sort(key=lambda pair: (column_keys.index(pair[0].key), pair[1].key not in main))
    curves = () if table.drawing is None else needed_curves(table.drawing)
    cells = []
    for number in range(seeds):
        for column, row in pairs:
            settings = {
                key: setting.value
                for key, setting in table.settings_of(column, row).items()
                if setting.value is not None
            }
            cells.append(
                Cell(
                    table=table.id,
                    column=column.key,
                    row=row.key,
                    seed=_seed(column, number),
                    settings=settings,
                    needs=column.needs or row.needs,
                    curves=curves,
                )
            )
    return cells


def _seed(column: TableColumn, number: int) -> int:
    """The paper's seeds, followed by the integers after the last of them."""
    given: list[int] = column.seeds.value
    return given[number] if number < len(given) else given[-1] + number - len(given) + 1
