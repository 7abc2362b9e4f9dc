"""Kernels compiled ahead of a run, in parallel processes.

Triton compiles each kernel at its first launch, one after another. A trial determines which kernels a run launches:
within `trial`, kernels that are not loaded are recorded and not launched. `KernelBuilder` then compiles the recorded
kernels in parallel processes into Triton's cache on the disk. A run uses the same kernels with and without this step,
so its results are the same.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.core import locks
from holdfast.core.errors import HoldfastError

_ATEN = torch.ops.aten
_UNINITIALISED = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}


@dataclass(frozen=True)
class Kernel:
    """A kernel for arguments of certain types, as `triton.compile` takes it."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: tuple[Any, ...]  # backend, architecture, threads of a warp


@dataclass
class KernelTrial:
    """The recorded kernel launches, and the steps that have been run."""

    kernels: dict[Hashable, Kernel] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)

    def step(self, key: Hashable, step: Callable[[], None]) -> Callable[[], None]:
        """The ``step`` of this key at the first two requests; afterwards a function that does nothing.

        The second step differs from the first, in which the engine selects the filters to keep in fp16.
        """
        for time in (1, 2):
            if (key, time) not in self.seen:
                self.seen.add((key, time))
                return step
        return lambda: None


_trial: KernelTrial | None = None


def current_trial() -> KernelTrial | None:
    """The active trial."""
    return _trial


def can_build() -> bool:
    """Whether this version of Triton can record kernels; older versions and the interpreter cannot."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return hasattr(knobs.runtime, "jit_cache_hook") and not knobs.runtime.interpret


@contextmanager
def trial() -> Iterator[KernelTrial]:
    """Within this context, kernels that are not loaded are recorded and not launched.

    Their outputs are zeros, so that no value derived from them is an invalid index.
    """
    global _trial
    from triton import knobs
    from triton.runtime import driver

    current = driver.active.get_current_target()
    target = (current.backend, current.arch, current.warp_size)
    outer, _trial = _trial, KernelTrial()

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = _kernel(fn, compile, target)
        assert _trial is not None
        _trial.kernels.setdefault((kernel.module, kernel.name, key), kernel)
        return True  # neither compile nor launch it

    hook, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        with _ZeroMemory():  # type: ignore[no-untyped-call]
            yield _trial
    finally:
        knobs.runtime.jit_cache_hook, _trial = hook, outer


class _ZeroMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fill new memory with zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNINITIALISED else result


def _kernel(fn: Any, compile: dict[str, Any], target: tuple[Any, ...]) -> Kernel:
    import json

    options = json.loads(compile["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    (attributes,) = compile["configs"]
    return Kernel(fn.module, fn.name, compile["signature"], compile["constants"], attributes, options, target)


class KernelBuilder:
    """A process that compiles kernels in several processes; it is started early, because its start takes seconds."""

    def __init__(self, marker: Path) -> None:
        """``marker`` is the file that records the build."""
        self.marker = marker
        command = [sys.executable, "-m", "holdfast.kernels.compilation"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def build(self, kernels: Sequence[Kernel]) -> None:
        """Compile the kernels and wait. A kernel that fails raises its error when it is first launched.

        Of several processes that need the same kernels, one compiles them, and the others wait.
        """
        with suppress(OSError, HoldfastError):
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            with locks.hold(self.marker.with_suffix(".lock")):
                if not self.marker.exists():
                    self._process.communicate(pickle.dumps(list(kernels)))
                    self.marker.touch()
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def marker_of(*what: object) -> Path:
    """The file in Triton's cache that records that the kernels of such a run are compiled."""
    key = repr((what, torch.__version__)).encode() + _source()
    root = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(root) / "holdfast" / blake2b(key, digest_size=16).hexdigest()


def _source() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
