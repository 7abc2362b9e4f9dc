"""Optimisations of convolution filters in a client's steps, if the method permits them.

Filter taps that overlap only padding are updated once for all steps of a client. For filters that convolutions read in
fp16, the optimiser also writes an fp16 copy. The first step determines these filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.core.settings import Settings
from holdfast.engine.clients import proximal_mu_of
from holdfast.engine.local_optimizer import STEPS, LocalOptimizer
from holdfast.kernels.fp16_weights import Fp16Filters, fp16_filters
from holdfast.kernels.padding_taps import (
    FilterGradients,
    UsedTaps,
    padding_tap_factors,
    recording_filter_gradients,
    update_padding_taps_,
)
from holdfast.methods.base import Method, Tensors, Tree


class ConvFilters:
    """The filters among stacked parameters ``[L, ...]``."""

    def __init__(
        self,
        method: Method,
        settings: Settings,
        params: Tensors,
        global_params: Tensors,
        optimizer: LocalOptimizer,
        optimizer_state: Tree,
    ) -> None:
        """``global_params`` are not stacked: all lanes share them."""
        self.method, self.settings, self.optimizer = method, settings, optimizer
        self.proximal_mu = proximal_mu_of(method, settings)
        self.params, self.global_params = params, global_params
        # The state that the optimiser keeps for each value of a parameter.
        self.moments = [
            moment
            for name, by_name in optimizer_state.items()
            if name != STEPS
            for moment in by_name.values()
        ]
        self.used_taps: UsedTaps | None = None  # of the filters whose padding taps the optimiser skips
        self.fp16_copies: dict[str, tuple[range, Tensor]] | None = (
            None  # of filters at these taps, for all lanes
        )

    @contextmanager
    def recording(self, n: int) -> Iterator[tuple[FilterGradients, Fp16Filters]]:
        """Record which filters convolutions read in fp16 and which gradients they write, for the first n lanes."""
        copies = self.fp16_copies or {}
        available = [(self.params[k][:n], copy[:n]) for k, (_, copy) in copies.items()]
        skip_zeros = bool(self.used_taps)
        with recording_filter_gradients(skip_zeros) as gradients, fp16_filters(available) as fp16:
            yield gradients, fp16

    def update(
        self, gradients: FilterGradients, fp16: Fp16Filters, grads: Tensors, loss_reads_weights: bool
    ) -> None:
        """In the first step, select the filters to optimise from the records."""
        used_taps = self._find_used_taps(gradients, grads, loss_reads_weights)
        if self.used_taps is None:
            self.used_taps = used_taps
        assert used_taps == self.used_taps, "all steps of a method write the same gradients"
        if self.fp16_copies is None:
            self.fp16_copies = self._allocate_fp16_copies(fp16, len(next(iter(grads.values()))))
            self.refresh_fp16_copies(slice(None))

    def _find_used_taps(
        self, gradients: FilterGradients, grads: Tensors, loss_reads_weights: bool
    ) -> UsedTaps:
        """The filters whose padding taps have no gradient and are not read while a client trains."""
        hooks = ("perturb", "edit_gradient", "learning_rate", "after_step", "after_epoch")
        if not self.optimizer.is_sgd or self.settings.keep_optimizer or self.settings.lr_varies_in_round:
            return {}
        if loss_reads_weights or any(map(self.method.overrides, hooks)):
            return {}
        used_taps = gradients.used_taps(grads)
        if used_taps:
            from holdfast.kernels.sgd import supported

            filters, filter_grads = ([tensors[k] for k in used_taps] for tensors in (self.params, grads))
            used_taps = used_taps if supported(filters, filter_grads) else {}
        return used_taps

    def _allocate_fp16_copies(self, fp16: Fp16Filters, n: int) -> dict[str, tuple[range, Tensor]]:
        """Uninitialised copies of the requested filters that only the optimiser changes while a client trains."""
        if not self.optimizer.writes_fp16 or not fp16.requested:
            return {}
        if any(map(self.method.overrides, ("perturb", "after_step", "after_epoch"))):
            return {}
        from holdfast.kernels.sgd import supported

        params = list(self.params.values())
        if not supported(params, self.moments, [self.global_params[k] for k in self.params]):
            return {}
        copies = {}
        for name, w in self.params.items():
            taps = fp16.requested_taps(w[:n])
            if taps is not None and taps == (self.used_taps or {}).get(name, range(w.shape[-1])):
                shape = (len(w), w.shape[1], len(taps), len(taps) * w.shape[2])
                copies[name] = taps, w.new_empty(shape, dtype=torch.float16)
        return copies

    def refresh_fp16_copies(self, lanes: slice) -> None:
        """Rewrite these lanes' fp16 copies, after something other than the optimiser has changed the weights."""
        if self.fp16_copies:
            from holdfast.kernels.conv import copy_to_fp16_

            for name, (taps, copy) in self.fp16_copies.items():
                copy_to_fp16_(copy[lanes], self.params[name][lanes], taps)

    def updated_taps(self) -> list[range | None] | None:
        """For each parameter the rows and columns that the optimiser updates, or None if it updates all."""
        return [self.used_taps.get(k) for k in self.params] if self.used_taps else None

    def fp16_copies_of(self, n: int) -> list[Tensor | None] | None:
        """For each parameter the fp16 copies of the first n lanes, or None if no parameter has any."""
        copies = self.fp16_copies or {}
        return [copies[k][1][:n] if k in copies else None for k in self.params] if copies else None

    def update_padding_taps(self, steps: Mapping[int, int], lr: float) -> None:
        """Apply to the padding taps of these lanes the given number of ``steps``, which the optimiser skipped."""
        if not self.used_taps:
            return
        settings = self.settings
        factors = [(1.0, 0.0)] * len(next(iter(self.params.values())))
        for lane, count in steps.items():
            factors[lane] = padding_tap_factors(
                count, lr, settings.momentum, settings.weight_decay, self.proximal_mu
            )
        for name, taps in self.used_taps.items():
            update_padding_taps_(self.params[name], taps, factors, self.global_params[name])
