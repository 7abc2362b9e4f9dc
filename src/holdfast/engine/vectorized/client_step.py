"""What one lane computes in a step: the method's own code, as pure functions that ``torch.func.vmap`` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from holdfast.core.settings import Settings
from holdfast.core.trees import changes
from holdfast.engine.clients import teacher_outputs
from holdfast.engine.optim import clip, pulled
from holdfast.engine.sequential import split_extra
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree
from holdfast.methods.context import RunContext
from holdfast.models.network import Output


class ClientStep:
    """One client's batch, weights and memory, none of which has a dimension for lanes here.

    What every lane shares is read where it lies: the weights that were ``sent``, and the learning rate ``lr``, a scalar
    tensor. ``lane`` in the functions is what `Lanes` reads for a step.
    """

    def __init__(
        self, method: Method, context: RunContext, settings: Settings, cached: bool, sent: Tensors, lr: Tensor
    ) -> None:
        """``cached``: the outputs of teachers are among the batch's tables."""
        self.method, self.context, self.settings = method, context, settings
        self.cached, self.sent, self.lr = cached, sent, lr
        self.looked = False  # whether the method's loss has looked at the weights themselves

    def _batch(
        self, x: Tensor, y: Tensor, mask: Tensor, epoch: Tensor, key: Tensor, tables: Tensors,
        teachers: dict[str, Tensors], frozen: Tensors,
    ) -> Batch:  # fmt: skip
        real = mask if mask.numel() else None
        if self.cached:
            teacher = teacher_outputs(tables, self.method.teachers)
        else:
            teacher = {
                name: self.context.network.pure(teachers.get(name, self.sent), frozen, x, real, train=False)[
                    0
                ]
                for name in self.method.teachers
            }
        return Batch(x, y, epoch, real, teacher, tables)

    def gradient(
        self, params: Tensors, buffers: Tensors, carry: Tree, *lane: Any
    ) -> tuple[Tensors, Tensor, Tensor, Tensor, Tensors]:
        """Gradient, loss, features, logits and what the step did to the buffers."""
        method, settings = self.method, self.settings
        batch, key = self._batch(*lane), lane[4]
        extra = method.extra_inputs(carry)
        x, mask = batch.x, batch.mask
        if extra is not None:
            x = torch.cat([extra, x])
            mask = None if mask is None else torch.cat([mask.new_ones(len(extra)), mask])

        def objective(w: Tensors) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            out, new_buffers = self.context.network.pure(w, buffers, x, mask, key)
            if extra is not None:
                out = split_extra(out, len(extra))
            loss = self._task_loss(out, batch, carry)
            local = _Noticing(w, self.sent)
            term = method.loss(out, batch, carry, local)
            self.looked |= local.looked
            fresh = changes(new_buffers, buffers)
            return loss if term is None else loss + term, (out.features, out.logits, fresh)

        grads, (loss, (features, logits, fresh)) = grad_and_value(objective, has_aux=True)(params)
        if method.overrides("edit_gradient"):
            grads = method.edit_gradient(grads, carry, Local(params, self.sent))
        if settings.max_grad_norm is not None:
            weights, slopes, sent = ([tensors[k] for k in params] for tensors in (params, grads, self.sent))
            clipped = clip(pulled(weights, slopes, sent, method.proximal_mu()), settings.max_grad_norm)
            grads = dict(zip(params, clipped, strict=True))
        return grads, loss, features, logits, fresh

    def _task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        if self.context.network.uses_kernels and not self.method.overrides("task_loss"):
            from holdfast.kernels.cross_entropy import mean_cross_entropy

            return mean_cross_entropy(out.logits, batch.y, batch.mask, addend=True)
        return self.method.task_loss(out, batch, carry)

    def after_step(
        self, params: Tensors, features: Tensor, logits: Tensor, carry: Tree, *lane: Any
    ) -> tuple[Tree, Tree]:
        """What the method changes of weights and memory once the optimiser has been at work."""
        batch = self._batch(*lane)
        new, kept = self.method.after_step(params, Output(features, logits), batch, carry)
        return changes(new, params), changes(kept, carry)

    def whole_step(
        self, params: Tensors, buffers: Tensors, carry: Tree, *lane: Any
    ) -> tuple[Tensors, Tensor, Tensors]:
        """New weights, loss and changed buffers, where a method does the whole step itself."""
        batch, key = self._batch(*lane), lane[4]
        trainer = _Trainer(self, buffers, batch.mask, key)
        new = self.method.step(trainer, params, batch, carry, Local(params, self.sent))
        assert new is not None
        assert trainer.loss is not None
        return new, trainer.loss, changes(trainer.buffers, buffers)


class _Noticing(Local):
    """The weights, and whether anybody has looked at them."""

    looked = False

    def __getattribute__(self, name: str) -> Any:
        if name == "params":
            self.looked = True
        return super().__getattribute__(name)


class _Trainer:
    """The `Trainer` a whole-step method works with, inside ``vmap``."""

    def __init__(self, lane: ClientStep, buffers: Tensors, mask: Tensor | None, key: Tensor) -> None:
        self.lane, self.buffers, self.mask, self.key = lane, buffers, mask, key
        self.lr = lane.lr  # type: ignore[assignment]  # a scalar tensor, since graphs outlive a round
        self.loss: Tensor | None = None

    lr: float

    def forward(self, params: Tensors, x: Tensor) -> Output:
        out, self.buffers = self.lane.context.network.pure(params, self.buffers, x, self.mask, self.key)
        return out

    def gradient(self, objective: Callable[[Tensors], Tensor], params: Tensors) -> tuple[Tensors, Tensor]:
        def with_buffers(w: Tensors) -> tuple[Tensor, Tensors]:
            # What the forward pass did to them must leave ``grad`` as an output, not by itself.
            return objective(w), self.buffers

        grads, (value, self.buffers) = grad_and_value(with_buffers, has_aux=True)(params)
        self.loss = value if self.loss is None else self.loss
        return grads, value
