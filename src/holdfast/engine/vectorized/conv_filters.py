"""What the first step finds of the filters of convolutions while clients train as lanes.

Parts that meet padding alone rest, and move once for all of a client's steps; parts that convolutions read in half
precision have their halves beside them, which the optimiser writes. Both only where nobody else has a say in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.core.settings import Settings
from holdfast.engine.clients import proximal_mu_of
from holdfast.kernels.fp16_weights import Reading, reading
from holdfast.kernels.padding_taps import Rims, Written, move_rims_, moved_by, written
from holdfast.methods.base import Method, Tensors


class ConvFilters:
    """The filters among stacked parameters ``[L, ...]``."""

    def __init__(
        self, method: Method, settings: Settings, params: Tensors, momentum: Tensors, sent: Tensors
    ) -> None:
        """``sent`` are the weights that clients begin with, which may be pulled towards."""
        self.method, self.settings, self.pull = method, settings, proximal_mu_of(method, settings)
        self.params, self.momentum, self.sent = params, momentum, sent
        self.rims: Rims | None = None  # of filters that rest there
        self.halves: dict[str, tuple[range, Tensor]] | None = None  # of such rows and columns of filters

    @contextmanager
    def watched(self, n: int) -> Iterator[tuple[Written, Reading]]:
        """What convolutions of the first n lanes write and read in here."""
        beside = [(self.params[k][:n], halves[:n]) for k, (_, halves) in (self.halves or {}).items()]
        with written(unread=bool(self.rims)) as convolved, reading(beside) as read:
            yield convolved, read

    def find(self, convolved: Written, read: Reading, grads: Tensors, looked: bool) -> None:
        """Learn from what was ``watched``; ``looked``: the method's loss has looked at the weights themselves."""
        rims = self._resting(convolved, grads, looked)
        if self.rims is None:
            self.rims = rims
        assert rims == self.rims, "steps of one method have the same gradients"
        if self.halves is None:
            self.halves = self._halved(read, len(next(iter(grads.values()))))
            self.halve(slice(None))

    def _resting(self, convolved: Written, grads: Tensors, looked: bool) -> Rims:
        """The filters whose rims have no gradient, and which nobody looks at while a client trains."""
        hooks = ("edit_gradient", "learning_rate", "after_step", "after_epoch")
        if looked or self.settings.keep_momentum or any(map(self.method.overrides, hooks)):
            return {}
        found = convolved.untouched(grads)
        if found:
            from holdfast.kernels.sgd import serves

            params, slopes = ([tensors[k] for k in found] for tensors in (self.params, grads))
            found = found if serves(params, slopes) else {}
        return found

    def _halved(self, read: Reading, n: int) -> dict[str, tuple[range, Tensor]]:
        """Room for halves of filters that nobody but the optimiser changes while a client trains."""
        if not read.wanted or any(map(self.method.overrides, ("after_step", "after_epoch"))):
            return {}
        from holdfast.kernels.sgd import serves

        params, momentum = (list(tensors.values()) for tensors in (self.params, self.momentum))
        if not serves(params, momentum, [self.sent[k] for k in self.params]):
            return {}
        found = {}
        for name, w in self.params.items():
            taps = read.wants(w[:n])
            if taps is not None and taps == (self.rims or {}).get(name, range(w.shape[-1])):
                room = (len(w), w.shape[1], len(taps), len(taps) * w.shape[2])
                found[name] = taps, w.new_empty(room, dtype=torch.float16)
        return found

    def halve(self, lanes: slice) -> None:
        """Make these lanes' halves anew: their weights are not what the optimiser made of them."""
        if self.halves:
            from holdfast.kernels.conv import halve_

            for name, (taps, halves) in self.halves.items():
                halve_(halves[lanes], self.params[name][lanes], taps)

    def moving(self) -> list[range | None] | None:
        """Of each parameter the rows and columns that do not rest, if any does."""
        return [self.rims.get(k) for k in self.params] if self.rims else None

    def halves_of(self, n: int) -> list[Tensor | None] | None:
        """Of each parameter the first n lanes' halves, if any has them."""
        kept = self.halves or {}
        return [kept[k][1][:n] if k in kept else None for k in self.params] if kept else None

    def move_rims(self, steps: Mapping[int, int], lr: float) -> None:
        """Make of the weights that rested what so many ``steps`` of these lanes would have made of them."""
        if not self.rims:
            return
        settings = self.settings
        moved = [(1.0, 0.0)] * len(next(iter(self.params.values())))
        for lane, count in steps.items():
            moved[lane] = moved_by(count, lr, settings.momentum, settings.weight_decay, self.pull)
        for name, taps in self.rims.items():
            move_rims_(self.params[name], taps, moved, self.sent[name])
