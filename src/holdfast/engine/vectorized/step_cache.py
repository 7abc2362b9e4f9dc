"""A cache of compiled steps: captured as CUDA graphs on a GPU, recorded for replay on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from holdfast.engine.vectorized.recorded_step import BlockPool, NotReplayable, RecordedStep
from holdfast.kernels.building import current_trial

# The memory limit of recorded steps; larger models are limited by arithmetic and gain little from recording.
MAX_RECORDED_BYTES = 256 * 2**20

CompiledStep = Callable[[], None]


class StepCache:
    """The compiled steps of one engine."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.compiled: dict[Hashable, CompiledStep | None] = {}  # None: the step is not compiled
        self._seen: set[Hashable] = set()
        self._pool = self._new_pool()

    def get(self, key: Hashable, step: CompiledStep, state: Callable[[], list[Tensor]]) -> CompiledStep:
        """The compiled step; on a CPU steps are compiled when they are requested for the second time.

        ``state`` returns all tensors that the step changes; compilation does not change their values.
        """
        trial = current_trial()
        if trial is not None:
            return trial.step((id(self), key), step)
        if key not in self.compiled:
            if not self.cuda and key not in self._seen:
                self._seen.add(key)
                return step
            self.compiled[key] = self._capture(step, state()) if self.cuda else self._record(step, state())
        return self.compiled[key] or step

    def clear(self) -> None:
        """Drop all compiled steps, since tensors whose addresses they contain have been replaced."""
        self.compiled.clear()
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        """Memory that all steps share, since they run one after another."""
        return torch.cuda.graph_pool_handle() if self.cuda else BlockPool(MAX_RECORDED_BYTES)

    def _record(self, step: CompiledStep, state: list[Tensor]) -> CompiledStep | None:
        """The recorded step, or None if its replay does not compute identical values."""
        before = [t.clone() for t in state]
        try:
            recorded = RecordedStep(step, self._pool)
        except NotReplayable:
            _restore(state, before)
            return None
        after = [t.clone() for t in state]
        _restore(state, before)
        recorded()
        same = all(_same_bits(*pair) for pair in zip(state, after, strict=True))
        _restore(state, before)
        return recorded if same else None

    def _capture(self, step: CompiledStep, state: list[Tensor]) -> CompiledStep:
        """The step as a CUDA graph."""
        before = [t.clone() for t in state]
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # compiles kernels and initialises libraries, neither of which can be captured
            _restore(state, before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # garbage collection of another graph would break the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                step()
        finally:
            gc.enable()
        return graph.replay


def _restore(state: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())  # NaN does not equal itself
