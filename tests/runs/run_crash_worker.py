"""A process to be killed: it resumes a run and goes on, round after round, until something stops it.

What a run must hold after any round is a function of the round alone, so a test can say what is right.
"""

import os
import signal
from pathlib import Path

import numpy as np
import torch

from holdfast.runs import ClientStates, RunDirectory

CLIENTS = 7


def server_values(round: int) -> np.ndarray:
    return np.arange(5000, dtype=np.float32) * 0.1 + round


def participants(round: int) -> list[int]:
    return sorted({round % CLIENTS, (3 * round + 1) % CLIENTS})


def client_values(client: int, round: int) -> np.ndarray:
    return np.full(600, 1000.0 * client + round)


def last_round_of(client: int, round: int) -> int | None:
    """The last round up to ``round`` in which the client took part."""
    return next((past for past in range(round, 0, -1) if client in participants(past)), None)


def check(path: Path) -> int:
    """Assert that the run in ``path`` is whole, and return the round of its checkpoint."""
    run = RunDirectory.open(path)
    checkpoint = run.load_checkpoint()
    rounds = [record["round"] for record in run.records()]
    assert rounds == list(range(1, len(rounds) + 1))
    if checkpoint is None:
        return 0
    assert checkpoint.warning is None
    assert len(rounds) >= checkpoint.round
    assert checkpoint.meta == {"next": checkpoint.round + 1}
    np.testing.assert_array_equal(checkpoint.tensors["w"].numpy(), server_values(checkpoint.round))
    for client in range(CLIENTS):
        state, last = checkpoint.client(client), last_round_of(client, checkpoint.round)
        if last is None:
            assert state is None
        else:
            np.testing.assert_array_equal(state["c"].numpy(), client_values(client, last))
    return checkpoint.round


def go_on(path: Path, rounds: int, die_at_operation: int | None = None) -> None:
    """Resume the run and do ``rounds`` more, checkpointing every second one; perhaps die on the way."""
    torch.set_num_threads(1)
    if die_at_operation is not None:
        _die_before(die_at_operation)
    run = RunDirectory.open(path)
    with run.lock():
        checkpoint = run.load_checkpoint()
        done = checkpoint.round if checkpoint else 0
        run.rewind(done)
        states = ClientStates(3 * 4800, run.scratch, checkpoint.clients if checkpoint else None)
        for round in range(done + 1, done + 1 + rounds):
            for client in participants(round):
                before, last = states.get(client), last_round_of(client, round - 1)
                assert (before is None) == (last is None)
                if before is not None and last is not None:
                    np.testing.assert_array_equal(before["c"].numpy(), client_values(client, last))
                states.put(client, {"c": torch.from_numpy(client_values(client, round))})
            run.append({"round": round, "accuracy": 0.5, "padding": "x" * 3000})
            if round % 2 == 0:
                server = {"w": torch.from_numpy(server_values(round))}
                states.committed(run.save_checkpoint(round, server, {"next": round + 1}, states.changed()))


def _die_before(operation: int) -> None:
    """Have this process killed as it is about to do its nth operation on a file."""
    done = 0

    def counted(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments, **keywords):
            nonlocal done
            done += 1
            if done == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(os, name, call)

    for name in ("replace", "fsync", "unlink", "truncate"):
        counted(name)


def hold(path: Path, ready: Path) -> None:
    """Hold the lock of a run until killed."""
    with RunDirectory.open(path).lock():
        ready.touch()
        signal.pause()
