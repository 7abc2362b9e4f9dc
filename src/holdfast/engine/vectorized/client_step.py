"""The step of one lane: the method's code as pure functions, for ``torch.func.vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from holdfast.core.settings import Settings
from holdfast.core.trees import changes
from holdfast.engine.clients import teacher_outputs
from holdfast.engine.loss_scaling import all_finite, counted, scaled, unless_skipped, unscaled
from holdfast.engine.micro_batches import MicroBatch, joined, micro_batches
from holdfast.engine.optim import add_proximal_term, clip
from holdfast.engine.sample_gradients import private_gradient
from holdfast.engine.sequential import no_gradient
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree, weights_and_carry
from holdfast.methods.context import RunContext
from holdfast.models.network import Output, split_extra
from holdfast.updates.sample_privacy import parse_dp_samples


class ClientStep:
    """One client's step; its batch, weights and memory have no lane dimension here.

    Shared values are read directly: the ``global_params`` and the learning rate ``lr``, a scalar tensor. The
    arguments ``lane`` of the methods are what `VectorizedEngine._load_step` returns.
    """

    def __init__(
        self,
        method: Method,
        context: RunContext,
        settings: Settings,
        cache_teachers: bool,
        global_params: Tensors,
        lr: Tensor,
    ) -> None:
        """``cache_teachers``: the outputs of teachers are in the batch's tables."""
        self.method, self.context, self.settings = method, context, settings
        self.cache_teachers, self.global_params, self.lr = cache_teachers, global_params, lr
        self.loss_reads_weights = False  # whether the method's loss has read the weights themselves
        dp = settings.dp_samples
        self.sample_clip = None if dp is None else parse_dp_samples(dp).clip

    def _batch(
        self, x: Tensor, y: Tensor, mask: Tensor, epoch: Tensor, key: Tensor, tables: Tensors,
        teachers: dict[str, Tensors], frozen: Tensors,
    ) -> Batch:  # fmt: skip
        sample_mask = mask if mask.numel() else None
        if self.cache_teachers:
            teacher = teacher_outputs(tables, self.method.teachers)
        else:
            pure = self.context.network.pure
            teacher = {
                name: pure(teachers.get(name, self.global_params), frozen, x, sample_mask, train=False)[0]
                for name in self.method.teachers
            }
        return Batch(x, y, epoch, sample_mask, teacher, tables, self.context.task)

    def gradient(
        self, params: Tensors, buffers: Tensors, carry: Tree, scaling: Tensors, *lane: Any
    ) -> tuple[Tensors, Tensor, Tensor, Tensor, Tensors, Tree, Tensors]:
        """Gradient, loss, features, logits, the buffers and the carry that changed, and whether the step is ``taken``.

        The last is {} without ``scaling`` of the loss. For DP-SGD, ``lane`` ends with the step's noise and the expected
        size of a batch.
        """
        method, settings = self.method, self.settings
        batch, key = self._batch(*lane[:8]), lane[4]
        extra = method.extra_inputs(carry)

        def objective(
            w: Tensors, carry: Tree, part: MicroBatch, buffers: Tensors, ascends: bool
        ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensors]]:
            batch = part.batch
            x, mask = batch.x, batch.mask
            if extra is not None:
                x = torch.cat([extra, x])
                mask = None if mask is None else torch.cat([mask.new_ones(len(extra)), mask])
            with self.context.network.autocast():
                out, new_buffers = self.context.network.pure(w, buffers, x, mask, part.key(key))
            if extra is not None:
                out = split_extra(out, len(extra))
            local = _TrackedLocal(w, self.global_params)
            loss = method.ascent_loss(out, batch, carry, local) if ascends else None
            if loss is None:
                loss = part.add(self._task_loss(out, batch, carry), method.loss(out, batch, carry, local))
            else:
                loss = part.scaled(loss)
            self.loss_reads_weights |= local.params_read
            new_buffers = part.buffers(new_buffers, buffers)
            return scaled(loss, scaling), (out.features, out.logits, changes(new_buffers, buffers))

        def accumulated(
            w: Tensors, carry: Tree, ascends: bool = False
        ) -> tuple[Tensors, Tensor, Output, Tensors]:
            """Gradient, loss, outputs and changed buffers, over micro-batches."""
            grads, total, outputs, changed = {}, None, [], {}  # type: Tensors, Tensor | None, list[Output], Tensors
            for part in micro_batches(batch, settings.micro_batch_size):
                gradient, (loss, (features, logits, fresh)) = grad_and_value(objective, has_aux=True)(
                    w, carry, part, buffers | changed, ascends
                )
                changed = changed | fresh
                grads = {k: grads[k] + g for k, g in gradient.items()} if grads else gradient
                total = loss if total is None else total + loss
                outputs.append(Output(features, logits))
            assert total is not None
            grads = {k: unscaled(g, scaling) for k, g in grads.items()}
            return grads, unscaled(total, scaling), joined(outputs), changed

        point, old_carry, first_changed = params, carry, None
        if method.overrides("perturb"):
            ascent: Tensors = {}
            if method.ascends:
                ascent, _, _, first_changed = accumulated(params, carry, True)
            point, carry = method.perturb(ascent, carry, Local(params, self.global_params))
        if self.sample_clip is not None:
            grads, loss = private_gradient(
                method, self.context.network, batch, key, Local(point, self.global_params), buffers, carry,
                self.sample_clip, *lane[8:],
            )  # fmt: skip
            features = logits = loss  # placeholders that no method may read
            changed: Tensors = {}
        else:
            grads, loss, (features, logits, _), changed = accumulated(point, carry)
            changed = changed if first_changed is None else first_changed
        taken = {"taken": all_finite(grads.values())} if scaling else {}
        if method.overrides("edit_gradient"):
            grads = method.edit_gradient(grads, carry, Local(params, self.global_params))
        if settings.max_grad_norm is not None:
            weights, gradients, global_params = (
                [tensors[k] for k in params] for tensors in (params, grads, self.global_params)
            )
            gradients = add_proximal_term(weights, gradients, global_params, method.proximal_mu())
            clipped = clip(gradients, settings.max_grad_norm)
            grads = dict(zip(params, clipped, strict=True))
        new_carry = changes(carry, old_carry)
        changed, new_carry = (
            unless_skipped(taken, changed, buffers),
            unless_skipped(taken, new_carry, old_carry),
        )
        return grads, counted(loss, taken), features, logits, changed, new_carry, taken

    def _task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        plain = self.context.task.is_cross_entropy and not self.method.overrides("task_loss")
        if plain and self.context.network.uses_kernels:
            from holdfast.kernels.cross_entropy import mean_cross_entropy

            return mean_cross_entropy(out.logits, batch.y, batch.mask, unit_grad=True)
        return self.method.task_loss(out, batch, carry)

    def after_step(
        self, params: Tensors, features: Tensor, logits: Tensor, carry: Tree, taken: Tensors, *lane: Any
    ) -> tuple[Tree, Tree]:
        """The weights and the memory that the method changes after the optimiser's step."""
        batch = self._batch(*lane)
        new_params, new_carry = self.method.after_step(params, Output(features, logits), batch, carry)
        new_params, new_carry = changes(new_params, params), changes(new_carry, carry)
        return unless_skipped(taken, new_params, params), unless_skipped(taken, new_carry, carry)

    def whole_step(
        self, params: Tensors, buffers: Tensors, carry: Tree, scaling: Tensors, *lane: Any
    ) -> tuple[Tensors, Tensor, Tensors, Tree, Tensors]:
        """The step of a method that defines ``step``.

        Returns new weights, loss, the buffers and the carry that changed, and ``taken`` as `gradient` does.
        """
        batch, key = self._batch(*lane), lane[4]
        trainer = _Trainer(self, buffers, batch.mask, key, scaling)
        stepped = self.method.step(trainer, params, batch, carry, Local(params, self.global_params))
        if stepped is None:
            raise UsualStep
        if trainer.loss is None:
            raise no_gradient(self.method)
        new, new_carry = weights_and_carry(stepped, carry)
        taken, changed = trainer.taken, changes(trainer.buffers, buffers)
        new, new_carry = (
            unless_skipped(taken, new, params),
            unless_skipped(taken, changes(new_carry, carry), carry),
        )
        return new, counted(trainer.loss, taken), unless_skipped(taken, changed, buffers), new_carry, taken


class UsualStep(Exception):
    """The method's ``step`` returns None: the engine performs its default step."""


class _TrackedLocal(Local):
    """The weights, and whether they have been read."""

    params_read = False

    def __getattribute__(self, name: str) -> Any:
        if name == "params":
            self.params_read = True
        return super().__getattribute__(name)


class _Trainer:
    """The `Trainer` of a method that computes whole steps, under ``vmap``."""

    lr: float

    def __init__(
        self, step: ClientStep, buffers: Tensors, mask: Tensor | None, key: Tensor, scaling: Tensors
    ) -> None:
        self.network, self.buffers, self.mask, self.key = step.context.network, buffers, mask, key
        self.scaling, self.taken = scaling, {}  # type: Tensors, Tensors
        self.lr = step.lr  # type: ignore[assignment]  # a scalar tensor, since CUDA graphs outlive a round
        self.loss: Tensor | None = None

    def forward(self, params: Tensors, x: Tensor) -> Output:
        with self.network.autocast():
            out, self.buffers = self.network.pure(params, self.buffers, x, self.mask, self.key)
        return out

    def gradient(self, objective: Callable[[Tensors], Tensor], params: Tensors) -> tuple[Tensors, Tensor]:
        def with_buffers(w: Tensors) -> tuple[Tensor, Tensors]:
            # The buffers that the forward pass changed must be outputs of ``grad``.
            return scaled(objective(w), self.scaling), self.buffers

        grads, (value, self.buffers) = grad_and_value(with_buffers, has_aux=True)(params)
        grads = {k: unscaled(g, self.scaling) for k, g in grads.items()}
        value = unscaled(value, self.scaling)
        if self.scaling:
            finite = all_finite(grads.values())
            self.taken = {"taken": self.taken.get("taken", finite) & finite}
        self.loss = value if self.loss is None else self.loss
        return grads, value
