"""Steps that come again and again, made ready once: captured on a GPU, recorded on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from holdfast.engine.vectorized.recorded_step import BlockPool, NotReplayable, RecordedStep

TAPE_BYTES = 256 * 2**20  # that recorded steps may keep; larger models spend their time in arithmetic anyway

CompiledStep = Callable[[], None]


class StepCache:
    """The steps of one engine."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.ready: dict[Hashable, CompiledStep | None] = {}  # None: as it is
        self._met: set[Hashable] = set()
        self._pool = self._new_pool()

    def get(self, key: Hashable, step: CompiledStep, state: Callable[[], list[Tensor]]) -> CompiledStep:
        """The step, ready: at once on a GPU, where it comes for the second time on a CPU.

        ``state`` names all that the step changes; making it ready leaves that as it was.
        """
        if key not in self.ready:
            if not self.cuda and key not in self._met:
                self._met.add(key)
                return step
            self.ready[key] = self._capture(step, state()) if self.cuda else self._record(step, state())
        return self.ready[key] or step

    def forget(self) -> None:
        """Make all steps ready anew, since they know addresses that are no longer right."""
        self.ready.clear()
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        """Memory that all steps may use, since they run one after another."""
        return torch.cuda.graph_pool_handle() if self.cuda else BlockPool(TAPE_BYTES)

    def _record(self, step: CompiledStep, state: list[Tensor]) -> CompiledStep | None:
        """The tape of a step, or None where a tape would not do the same."""
        before = [t.clone() for t in state]
        try:
            tape = RecordedStep(step, self._pool)
        except NotReplayable:
            _put_back(state, before)
            return None
        after = [t.clone() for t in state]
        _put_back(state, before)
        tape()
        same = all(_same_bits(*pair) for pair in zip(state, after, strict=True))
        _put_back(state, before)
        return tape if same else None

    def _capture(self, step: CompiledStep, state: list[Tensor]) -> CompiledStep:
        """A step as a CUDA graph."""
        before = [t.clone() for t in state]
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # which compiles kernels and makes what libraries need, neither of which can be captured
            _put_back(state, before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # collecting another run's graph in the midst of a capture would break it
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                step()
        finally:
            gc.enable()
        return graph.replay


def _put_back(state: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())  # NaN differs even from itself
