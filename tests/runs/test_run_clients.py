import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.runs import ClientStates, RunDirectory

STATE_BYTES = 10 * 8


def state(value: int) -> dict[str, torch.Tensor]:
    return {"c": torch.full((10,), value, dtype=torch.int64)}


def value(held: dict[str, torch.Tensor] | None) -> int | None:
    return None if held is None else int(held["c"][0])


def test_states_beyond_the_budget_go_to_the_disk_and_come_back(tmp_path: Path) -> None:
    states = ClientStates(3 * STATE_BYTES, tmp_path / "spill")
    for client in range(10):
        states.put(client, state(client))
    assert sorted(int(path.stem) for path in (tmp_path / "spill").iterdir()) == list(range(7))
    assert [value(states.get(client)) for client in range(10)] == list(range(10))
    assert states.get(11) is None
    assert len(states) == 10


def test_the_states_used_last_stay_in_memory(tmp_path: Path) -> None:
    states = ClientStates(2 * STATE_BYTES, tmp_path)
    states.put(0, state(0))
    states.put(1, state(1))
    states.get(0)
    states.put(2, state(2))
    assert [path.stem for path in tmp_path.iterdir()] == ["1"]


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 4),
    steps=st.lists(
        st.one_of(st.tuples(st.integers(0, 5), st.booleans()), st.just("save"), st.just("resume"))
    ),
)
def test_memory_disk_and_checkpoint_agree_with_a_plain_dictionary(
    tmp_path_factory: pytest.TempPathFactory, budget: int, steps: list
) -> None:
    """Whatever the order of reads, writes, checkpoints and resumes after a kill."""
    run = RunDirectory.create(tmp_path_factory.mktemp("run"), {})
    expected: dict[int, int] = {}
    saved: dict[int, int] = {}
    with run.lock():
        states = ClientStates(budget * STATE_BYTES, run.scratch)
        for number, step in enumerate(steps):
            if step == "save":
                states.committed(run.save_checkpoint(number, {}, {}, states.changed()))
                saved = dict(expected)
            elif step == "resume":
                checkpoint = run.load_checkpoint()
                states = ClientStates(budget * STATE_BYTES, run.scratch, checkpoint and checkpoint.clients)
                expected = dict(saved)
            else:
                client, write = step
                if write:
                    states.put(client, state(number))
                    expected[client] = number
                else:
                    assert value(states.get(client)) == expected.get(client)
            assert {client: value(held) for client, held in states.items()} == expected
            assert set(states.changed()) >= {k for k in expected if expected[k] != saved.get(k)}
            checkpoint = run.load_checkpoint()
            if checkpoint is not None:
                assert {client: value(held) for client, held in checkpoint.clients.items()} == saved


def test_spilled_states_keep_their_bits_and_order(tmp_path: Path) -> None:
    states = ClientStates(0, tmp_path)
    given_state = {
        "z": torch.tensor([float("nan"), 1e-45]),
        "a": torch.tensor([True]),
        "m": torch.tensor([[1 / 3]], dtype=torch.float64),
    }
    states.put(5, given_state)
    back = states.get(5)
    assert back is not None
    assert list(back) == ["z", "a", "m"]
    for name, tensor in given_state.items():
        assert back[name].dtype == tensor.dtype
        assert np.array_equal(back[name].numpy(), tensor.numpy(), equal_nan=name == "z")


def test_a_view_into_a_buffer_does_not_change_with_it() -> None:
    buffer = torch.zeros(3, 10, dtype=torch.int64)
    states = ClientStates(1000)
    states.put(1, {"c": buffer[1]})
    buffer += 7
    assert value(states.get(1)) == 0


def test_the_temporary_directory_goes_with_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    states = ClientStates(0)
    states.put(1, state(1))
    assert len(list(tmp_path.iterdir())) == 1
    assert value(states.get(1)) == 1
    del states
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """200 clients of 1 MiB under a budget of 5 MiB, written and then read."""
    states = ClientStates(5 << 20, tmp_path)

    def tensors() -> dict[int, torch.Tensor]:
        return {id(found): found for found in gc.get_objects() if type(found) is torch.Tensor}

    others = tensors()  # of other tests; held, so that no new tensor takes over an id

    def held() -> int:
        new = [tensor for key, tensor in tensors().items() if key not in others]
        sizes = {t.data_ptr(): t.nbytes for t in new if t.nbytes == 1 << 20}
        return sum(sizes.values())

    for client in range(200):
        states.put(client, {"c": torch.full((1 << 18,), float(client))})
    assert held() == 5 << 20
    for client in range(200):
        assert states.get(client) is not None
    assert held() == 5 << 20
