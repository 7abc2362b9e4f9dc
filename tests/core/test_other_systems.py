"""Training, resuming and inspecting without what only Linux has: its modules, /proc, UTF-8 as the default encoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.core import device, files
from holdfast.sweeps import queue

# Other packages are imported as on Linux; holdfast then finds the name of Windows, and the modules missing.
SYSTEM = r"""
import builtins, io, os, pathlib, sys, warnings
import filelock, sklearn.datasets, torch

for module in ("fcntl", "resource", "termios", "pwd"):
    sys.modules[module] = None
sys.platform = "win32"
del os.sched_getaffinity, os.register_at_fork
opened = io.open
def without_proc(file, *args, **kwargs):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(file)
    return opened(file, *args, **kwargs)
io.open = builtins.open = without_proc
warnings.filterwarnings("error", category=EncodingWarning, module=r"holdfast\b.*")
"""

WORK = """
from pathlib import Path
import holdfast as hf
from holdfast.core.device import available_ram_bytes, peak_bytes
from holdfast.core.locks import hold, is_held
from holdfast.papers.published import load_tables

assert available_ram_bytes() == 4 << 30
assert peak_bytes(torch.device("cpu")) is None
lock = Path("lock")
assert not is_held(lock)
with hold(lock):
    assert is_held(lock)
assert not is_held(lock)

federation = hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.5), clients=4, seed=0)
options = dict(lr=0.05, seed=0, out="run")
run = hf.train("moon", "mlp:16", federation, rounds=2, engine="sequential", **options)
assert run.accuracy > 0.2
assert hf.resume("run").accuracy == run.accuracy
assert [summary.path.name for summary in hf.list_runs(".")] == ["run"]
assert load_tables()
"""


def test_a_run_without_what_only_linux_has(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-c", SYSTEM + WORK]
    source = str(Path(files.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_on_macos_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_kilobytes", lambda *_: None)
    cpu = torch.device("cpu")
    on_linux = device.peak_bytes(cpu)
    monkeypatch.setattr(sys, "platform", "darwin")
    on_macos = device.peak_bytes(cpu)
    assert on_linux is not None
    assert on_linux == pytest.approx(1024 * on_macos, rel=0.01)


def test_no_process_is_signalled_and_no_directory_opened_on_windows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(os, "kill", forbidden)
    monkeypatch.setattr(os, "open", forbidden)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        assert queue._is_running(1)
        files.sync_directory(tmp_path)
