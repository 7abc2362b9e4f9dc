"""Many training runs side by side, each result stored as it comes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path


def sweep(
    results: Path, names: Sequence[str], cells: Sequence[tuple], run: Callable[..., dict], *, device: str,
    workers: int, limit: float,
) -> None:  # fmt: skip
    """Run the cells whose result is not in the file yet; a cell's values are called ``names``.

    ``run(*cell, device)`` returns what is stored beside them. After ``limit`` seconds nothing more is started.
    """

    def key(row: dict) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in names)

    done = json.loads(results.read_text()) if results.exists() else []
    known = {key(row) for row in done}
    missing = [cell for cell in cells if tuple(map(str, cell)) not in known]
    began = time.monotonic()
    results.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run, *cell, device): cell for cell in missing}
        for future in as_completed(futures):
            cell = futures[future]
            row = dict(zip(names, cell, strict=True))
            try:
                row |= future.result()
            except Exception as error:  # one method's failure must not lose the others' results
                row |= {"error": str(error)[:300]}
            # Read again: another sweep may have added its own since.
            done = [*(json.loads(results.read_text()) if results.exists() else []), row]
            results.write_text(json.dumps(sorted(done, key=key), indent=0) + "\n")
            print({k: v for k, v in row.items() if k != "curve"}, flush=True)
            if time.monotonic() - began > limit:
                print("time is up", flush=True)
                os._exit(0)
