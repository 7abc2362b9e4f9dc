"""Runs many training runs in parallel and stores each result as soon as it is available."""

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
    """Run the cells that have no result in the file yet.

    Args:
        results: the JSON file, a list of objects.
        names: the keys under which a cell's values are stored.
        cells: the values of each cell.
        run: called with a cell's values and the device; returns further entries to store.
        device: auto, cpu or cuda.
        workers: the number of parallel processes.
        limit: seconds after which the program exits.
    """

    def key(row: dict) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in names)

    done = json.loads(results.read_text()) if results.exists() else []
    known = {key(row) for row in done}
    missing = [cell for cell in cells if tuple(map(str, cell)) not in known]
    start = time.monotonic()
    results.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run, *cell, device): cell for cell in missing}
        for future in as_completed(futures):
            cell = futures[future]
            row = dict(zip(names, cell, strict=True))
            try:
                row |= future.result()
            except Exception as error:  # the failure of one method must not end the others
                row |= {"error": str(error)[:300]}
            # Read the file again, because another process may have added results.
            done = [*(json.loads(results.read_text()) if results.exists() else []), row]
            results.write_text(json.dumps(sorted(done, key=key), indent=0) + "\n")
            print({k: v for k, v in row.items() if k != "curve"}, flush=True)
            if time.monotonic() - start > limit:
                print("time is up", flush=True)
                os._exit(0)
