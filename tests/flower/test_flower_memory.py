"""The server's memory depends on the clients per round, not on the number of clients."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
from flower_world import CLASSES, World

import holdfast as hf

FEW, MANY, COHORT = 8, 400, 4
MODEL, MODEL_BYTES = "mlp:400,400", 4 * (16 * 400 + 400 + 400 * 400 + 400 + 400 * CLASSES + CLASSES)


def peak(clients: int, folder: Path) -> int:
    """Peak memory in bytes of a process that serves this many clients, ``COHORT`` per round."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            x = np.random.default_rng(0).integers(0, 255, (2 * MANY, 1, 4, 4)).astype(np.uint8)
            y = np.arange(2 * MANY) % CLASSES
            among = hf.federate(hf.Dataset.from_arrays(x, y, x[:12], y[:12]), hf.IID(), clients=clients)
            rounds = MANY // COHORT // 4
            world = World(
                folder, nodes=2, among=among, method="scaffold", model=MODEL, precision="float32",
                clients_per_round=COHORT, rounds=rounds, local_epochs=1, batch_size=64, evaluate_every=rounds,
            )  # fmt: skip
            world.grid.keeps = False
            world.run()
            os.write(tell, str(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    with os.fdopen(told) as answer:
        return int(answer.read())


def test_the_servers_memory_grows_with_the_cohort_alone(tmp_path: Path) -> None:
    """Each client of SCAFFOLD remembers a model; a hundred take part, and no model stays in memory."""
    few, many = peak(FEW, tmp_path / "few"), peak(MANY, tmp_path / "many")
    assert many - few < 15 * MODEL_BYTES, f"{few / 1e6:.0f} MB, {many / 1e6:.0f} MB"
