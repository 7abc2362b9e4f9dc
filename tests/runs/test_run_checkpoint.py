import errno
import os
from pathlib import Path

import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.runs import Checkpoint, RunDirectory


@pytest.fixture
def run(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run", {"seed": 0})
    with run.lock():
        yield run


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def loaded(run: RunDirectory) -> Checkpoint:
    checkpoint = RunDirectory.open(run.path).load_checkpoint()
    assert checkpoint is not None
    return checkpoint


def save(run: RunDirectory, round: int, clients: tuple[int, ...] = ()) -> None:
    """A checkpoint in which every value is its round."""
    states = {client: {"c": torch.full((40,), float(round))} for client in clients}
    run.save_checkpoint(round, {"w": torch.full((50,), float(round))}, {"round": round}, states)


def test_none_before_the_first(run: RunDirectory) -> None:
    assert run.load_checkpoint() is None


def test_every_dtype_keeps_its_bits_shape_and_order(run: RunDirectory) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.14])
    base = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    tensors = {
        "z": special,
        "double": base / 3,
        "transposed": base.T,
        "half": special.half(),
        "brain": special.bfloat16(),
        "long": torch.tensor([-(2**63), 2**63 - 1]),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "flags": torch.tensor([[True, False]]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "a view": base[1:3, 2],
        "the same": base,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "channels last": torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(
            memory_format=torch.channels_last
        ),
    }
    run.save_checkpoint(4, tensors, {}, {9: tensors})
    checkpoint = loaded(run)
    client = checkpoint.client(9)
    assert client is not None
    for state in (checkpoint.tensors, client):
        assert list(state) == list(tensors)
        for name, tensor in tensors.items():
            assert state[name].dtype == tensor.dtype
            assert state[name].shape == tensor.shape
            assert bits(state[name]) == bits(tensor.detach())


def test_meta_comes_back(run: RunDirectory) -> None:
    meta = {"best": 0.1 + 0.2, "nothing": float("inf"), "names": ["ä", None], "deep": {"n": 10**30}}
    run.save_checkpoint(2, {}, meta, {})
    assert loaded(run).meta == meta


def test_unchanged_clients_keep_their_file_and_changed_ones_get_a_new_one(run: RunDirectory) -> None:
    save(run, 1, clients=(0, 1, 2))
    first = {path.name.split("-")[0]: path for path in (run.path / "checkpoint/clients").iterdir()}
    inode = first["2"].stat().st_ino
    save(run, 2, clients=(0, 1))
    save(run, 3, clients=(0, 12345678901))
    checkpoint = loaded(run)
    assert checkpoint.round == 3
    assert list(checkpoint.clients) == [0, 1, 2, 12345678901]
    values = {client: state["c"][0].item() for client, state in checkpoint.clients.items()}
    assert values == {0: 3, 1: 2, 2: 1, 12345678901: 3}
    assert first["2"].stat().st_ino == inode
    assert not first["0"].exists()  # neither the newest nor the one before it names it
    assert checkpoint.client(7) is None


def test_the_same_round_may_be_saved_again(run: RunDirectory) -> None:
    save(run, 1, clients=(0,))
    save(run, 1, clients=(0,))
    run.save_checkpoint(1, {"w": torch.zeros(3)}, {}, {0: {"c": torch.zeros(2)}})
    checkpoint = loaded(run)
    assert torch.equal(checkpoint.tensors["w"], torch.zeros(3))
    assert torch.equal(checkpoint.clients[0]["c"], torch.zeros(2))


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut":
        data = data[:-3]
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "empty":
        data = bytearray()
    path.write_bytes(data)


HOW = ("missing", "cut", "flipped", "empty")


def newest_file(run: RunDirectory, kind: str) -> Path:
    pattern = {"state": "state-2-*", "client": "clients/0-2-*", "manifest": "checkpoint.json"}[kind]
    (path,) = (run.path / "checkpoint").glob(pattern)
    return path


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["state", "client", "manifest"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    run: RunDirectory, kind: str, how: str
) -> None:
    save(run, 1, clients=(0, 1))
    save(run, 2, clients=(0,))
    path = newest_file(run, kind)
    damage(path, how)
    again = RunDirectory.open(run.path)
    checkpoint = again.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 1
    assert checkpoint.tensors["w"].unique().tolist() == [1.0]
    assert {client: state["c"][0].item() for client, state in checkpoint.clients.items()} == {0: 1, 1: 1}
    if (kind, how) == ("manifest", "missing"):
        assert checkpoint.warning is None  # as after a kill between the two renames of a commit
    else:
        assert checkpoint.warning is not None
        assert str(path) in checkpoint.warning
        assert "went back to the checkpoint of round 1" in checkpoint.warning


@pytest.mark.parametrize("kind", ["state", "client", "manifest"])
def test_continuing_after_a_fall_back_keeps_the_intact_one_until_the_next(
    run: RunDirectory, kind: str
) -> None:
    save(run, 1, clients=(0, 1))
    save(run, 2, clients=(0,))
    path = newest_file(run, kind)
    damage(path, "flipped")
    assert run.load_checkpoint().round == 1
    save(run, 2, clients=(0,))
    assert (loaded(run).round, loaded(run).warning) == (2, None)
    damage(newest_file(run, kind), "cut")
    assert loaded(run).round == 1  # not the damaged one of before
    assert loaded(run).clients[0]["c"][0].item() == 1


def test_both_damaged_is_an_error_that_names_the_files(run: RunDirectory) -> None:
    save(run, 1)
    save(run, 2)
    states = sorted((run.path / "checkpoint").glob("state-*"))
    for path in states:
        damage(path, "flipped")
    with pytest.raises(HoldfastError, match="no intact checkpoint is left") as error:
        run.load_checkpoint()
    assert all(str(path) in str(error.value) for path in states)


def test_a_damaged_state_of_an_unchanged_client_is_named_when_it_is_read(run: RunDirectory) -> None:
    save(run, 1, clients=(0, 1))
    save(run, 2)
    (path,) = (run.path / "checkpoint/clients").glob("0-1-*")
    damage(path, "flipped")
    checkpoint = loaded(run)
    assert checkpoint.client(1) is not None
    with pytest.raises(HoldfastError, match=f"{path.name} is damaged"):
        checkpoint.client(0)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "null", '{"checkpoint": 1, "sha256": 2}', "[" * 100_000, "\x80"]
)
def test_a_manifest_that_is_something_else(run: RunDirectory, content: str) -> None:
    save(run, 1)
    (run.path / "checkpoint/checkpoint.json").write_text(content)
    with pytest.raises(HoldfastError, match=r"checkpoint\.json is damaged"):
        run.load_checkpoint()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_at_any_step_leaves_an_intact_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Each call in turn fails; what can be loaded then is the old checkpoint or the new one."""
    save(run, 1, clients=(0, 1))
    save(run, 2, clients=(0,))
    original = getattr(os, name)
    sentences: list[str] = []
    for failing in range(1, 100):
        before = loaded(run).round
        calls = 0

        def call(*arguments):
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(code, os.strerror(code))
            return original(*arguments)

        monkeypatch.setattr(os, name, call)
        try:
            save(run, before + 1, clients=(0,))
        except HoldfastError as error:
            sentences.append(str(error))
        monkeypatch.setattr(os, name, original)
        checkpoint = loaded(run)
        assert checkpoint.warning is None
        assert checkpoint.round in (before, before + 1)
        assert checkpoint.tensors["w"].unique().tolist() == [checkpoint.round]
        assert checkpoint.clients[0]["c"].unique().tolist() == [checkpoint.round]
        assert checkpoint.clients[1]["c"].unique().tolist() == [1]
        assert not list(run.path.rglob("*.tmp"))
        if calls < failing:
            break
    assert len(sentences) >= 4
    assert all(("no space is left" if code == errno.ENOSPC else "read-only") in said for said in sentences)
    assert len(list(run.path.rglob("state-*"))) == 2  # nothing is left of the attempts that failed


def test_an_interrupt_while_saving_leaves_the_old_checkpoint(run: RunDirectory) -> None:
    class Interrupted(dict):
        def __getitem__(self, client):
            if client == 1:
                raise KeyboardInterrupt
            return super().__getitem__(client)

    save(run, 1, clients=(0,))
    state = {"c": torch.zeros(1)}
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(2, {"w": torch.zeros(1)}, {}, Interrupted({0: state, 1: state, 2: state}))
    assert loaded(run).round == 1
    assert len(list(run.path.rglob("*.safetensors"))) == 2
    save(run, 2)
    assert loaded(run).round == 2
    assert loaded(run).clients[0]["c"][0].item() == 1


def test_nothing_is_unpickled(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    save(run, 1, clients=(0,))

    def refuse(*_: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert loaded(run).client(0) is not None
