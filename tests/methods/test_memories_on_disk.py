"""What clients remember goes to the disk where it does not fit, and comes back with the same bits."""

import tempfile
from pathlib import Path

import pytest
from small_world import prepared, rounds, same, world

from holdfast.engine import state_cache as client_states
from holdfast.methods import parse_method

FEDERATION = world([0] * 5 + [1] * 3, [1, 2, 3] * 2, [3, 0], [2] * 4, [0, 1, 2, 3])


@pytest.mark.parametrize("method", ["moon", "scaffold", "feddyn", "fedcurv", "fedmlp"])
def test_memories_that_do_not_fit(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = prepared(parse_method(method), FEDERATION, clients_per_round=3, rounds=6)
    at_ease, _ = rounds(training, 6)
    monkeypatch.setattr(client_states, "RAM_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pressed, kept = rounds(training, 6)
    on_disk = {int(file.stem) for file in tmp_path.glob("*/*.safetensors")}
    assert on_disk == {client for client in range(5) if kept.get(client) is not None}
    assert len(on_disk) > 3  # 18 places among 5 clients: most came back at least once
    assert same(at_ease.server.params, pressed.server.params)
