"""The reference engine: trains one client after another in a plain PyTorch loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from holdfast.core.device import keep_freed_memory
from holdfast.core.errors import HoldfastError
from holdfast.core.optimizers import Factory
from holdfast.core.settings import Settings
from holdfast.core.trees import copy_, leaves
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.clients import (
    Broadcast,
    ClientResult,
    ClientRunner,
    DeviceData,
    Job,
    PreparedClient,
    learning_rates,
    proximal_mu_of,
    teacher_outputs,
)
from holdfast.engine.local_optimizer import LocalOptimizer, TorchOptimizer
from holdfast.engine.loss_scaling import after_step, all_finite, new_scaling, scaled, unscaled
from holdfast.engine.micro_batches import MicroBatch, joined, micro_batches
from holdfast.engine.optim import add_proximal_term, clip
from holdfast.engine.sample_gradients import private_gradient
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree, weights_and_carry
from holdfast.methods.context import RunContext
from holdfast.models.network import Output, split_extra

Protection = tuple[Tensor, Tensors, Tensor]
"""For a DP-SGD step: the dropout key, the noise on the sum of gradients, the expected batch size."""

Step = Callable[[Batch, Tree, Tensors, float], tuple[Tensor, Tree]]
"""From a batch, the carry, the global weights and the learning rate to the loss and the new carry."""


class SequentialEngine:
    """Trains the clients of a round one by one in a single working copy of the model."""

    name = "sequential"
    group = 1  # number of local models tested together
    train_masked = None

    def __init__(self, method: Method, context: RunContext, data: DeviceData, settings: Settings) -> None:
        self.method, self.context, self.settings = method, context, settings
        self.runner = ClientRunner(method, context, data, settings)
        self.data, self.proximal_mu = data, proximal_mu_of(method, settings)
        self.net = context.network.net
        if context.network.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.params: Tensors = {k: p for k, p in self.net.named_parameters() if k in context.network.params}
        self.param_list = list(self.params.values())
        self.all_indices = list(range(len(self.params)))
        self.flat = torch.empty(
            sum(p.numel() for p in self.param_list), dtype=data.dtype, device=context.device
        )
        self.optimizer = None if settings.optimizer_spec is None else LocalOptimizer(settings)
        self.optimizer_state: Tree = self.optimizer.new_state(self.params) if self.optimizer else {}
        self.own_optimizer: TorchOptimizer | None = None  # of the present client
        self.key: Tensor | None = None  # of the present step's dropout masks
        self.scaling: Tensors = {}  # of the present client's loss
        if self.optimizer is None:
            self._own_optimizer(settings.lr)  # raises an error of the optimiser before training
        if context.device.type == "cpu":
            keep_freed_memory()

    @property
    def buffers(self) -> Tensors:
        """The model's current buffers; layers may replace them by other tensors."""
        kept = self.context.network.buffers.keys()
        return {name: buffer.detach() for name, buffer in self.net.named_buffers() if name in kept}

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult]:
        """Train each client in turn; a result's tensors are valid until the next one is requested."""
        for job in jobs:
            (prepared,) = self.runner.start([self.runner.plan(job, sent.round)], sent)
            yield self._train_one(prepared, sent, job)

    def _train_one(self, prepared: PreparedClient, sent: Broadcast, job: Job) -> ClientResult:
        method, client = self.method, prepared.client
        with torch.no_grad():
            torch._foreach_copy_(self.param_list, [prepared.params[name] for name in self.params])
            for name, buffer in self.buffers.items():
                buffer.copy_(client.buffers[name])
            self._start_optimizer(prepared.optimizer, client.lr)
        self.net.train()
        total = torch.zeros((), dtype=self.context.dtype, device=self.context.device)
        ids, carry, plan = torch.from_numpy(client.ids), prepared.carry, prepared.plan
        self.scaling = new_scaling(self.context.network)
        step = self._custom_step if method.overrides("step") else self._standard_step
        if self.scaling:
            step = partial(self._step_or_skip, step)
        rates = [client.lr] * plan.steps
        if self.settings.lr_varies_in_round:
            rates = [client.lr * factor for factor in self.settings.step_factors(plan.steps)]
        for index, ends_epoch in enumerate(plan.ends_epoch):
            batch = self._batch(prepared, ids, index)
            if self.context.network.dropouts:
                self.key = torch.tensor(int(plan.keys[index]), device=self.context.device)
                self.context.network.seed_dropout(self.key)
            if self.runner.sample_dp is not None:
                protection = self._protection(job, prepared, index)
                loss, carry = self._standard_step(batch, carry, sent.params, rates[index], protection)
            else:
                loss, carry = step(batch, carry, sent.params, rates[index])
            total += loss
            if ends_epoch and method.overrides("after_epoch"):
                with torch.no_grad():
                    params, carry = method.after_epoch(self.params, carry)
                self._assign(params)
            if ends_epoch and method.resets_optimizer(int(plan.epoch[index]), self.context):
                self._start_optimizer({}, client.lr)
        taken = int(self.scaling["steps"]) if self.scaling else plan.steps
        loss_mean = float(total) / taken if taken else math.nan
        params = {name: p.detach() for name, p in self.params.items()}
        finite = taken > 0 and bool(torch.isfinite(torch.stack([p.sum() for p in params.values()]).sum()))
        state = self.own_optimizer.state if self.own_optimizer else self.optimizer_state
        kept = state if self.settings.keep_optimizer else {}
        return self.runner.finish(prepared, params, self.buffers, kept, carry, loss_mean, finite)

    def _start_optimizer(self, state: Tree, lr: float) -> None:
        """Give the optimiser this state, or its initial one if ``state`` is empty."""
        if self.optimizer is None:
            self.own_optimizer = self._own_optimizer(lr)
            self.own_optimizer.load(state)
        elif state:
            copy_(self.optimizer_state, state)
        elif self.optimizer_state:
            torch._foreach_zero_([value for _, value in leaves(self.optimizer_state)])

    def _own_optimizer(self, lr: float) -> TorchOptimizer:
        """A user-defined optimiser in its initial state."""
        factory, one_group = (
            cast("Factory", self.settings.optimizer),
            not self.method.overrides("learning_rate"),
        )
        return TorchOptimizer(factory, self.params, lr, one_group)

    def _batch(self, prepared: PreparedClient, ids: Tensor, index: int) -> Batch:
        plan, device = prepared.plan, self.context.device
        rows = torch.from_numpy(plan.rows[index])
        device_rows = rows.to(device)
        draws = None if plan.draws is None else torch.from_numpy(plan.draws[index]).to(device)
        x = self.data.preprocess(
            self.data.x.index_select(0, ids[rows].to(device)), draws, dtype=self.data.dtype
        )
        table = {name: values.index_select(0, device_rows) for name, values in prepared.tables.items()}
        if self.runner.cache_teachers:
            teacher = teacher_outputs(table, self.method.teachers)
        else:
            teacher = {
                name: self._teacher_output(weights, prepared, x)
                for name, weights in prepared.teachers.items()
            }
        epoch = torch.tensor(int(plan.epoch[index]), device=device)
        y = prepared.client.y[device_rows]
        return Batch(x, y, epoch, None, teacher, table, self.context.task)

    def _teacher_output(self, weights: Tensors, prepared: PreparedClient, x: Tensor) -> Output:
        with torch.no_grad():
            out = self.context.network.apply(
                weights, prepared.client.buffers, self.context.network.to_fast_layout(x)
            )
        self.net.train()
        return out

    def _protection(self, job: Job, prepared: PreparedClient, step: int) -> Protection:
        """The privacy parameters of a client's step."""
        samples, keys = prepared.client.samples, prepared.plan.keys
        row = self.runner.noise(self.flat, job, samples, prepared.client.round, step)
        parts = torch.split(row, [p.numel() for p in self.param_list])
        noise = {k: part.view_as(p) for (k, p), part in zip(self.params.items(), parts, strict=True)}
        key = torch.tensor(int(keys[step]) if len(keys) else 0, device=self.context.device)
        return key, noise, self.runner.expected_batch(samples)

    def _step_or_skip(
        self, step: Step, batch: Batch, carry: Tree, sent: Tensors, lr: float
    ) -> tuple[Tensor, Tree]:
        """A step with a scaled loss. A skipped step changes nothing but the scale, and its loss is 0."""
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        try:
            loss, carry = step(batch, carry, sent, lr)
            self.scaling = after_step(self.scaling, True)
        except SkippedStep:
            for name, buffer in self.buffers.items():
                buffer.copy_(before[name])
            loss, self.scaling = torch.zeros_like(self.scaling["scale"]), after_step(self.scaling, False)
        return loss, carry

    def check_finite(self, grads: Iterable[Tensor | None]) -> None:
        """Skip the step of a scaled loss if a gradient is not finite."""
        if self.scaling and not all_finite(g for g in grads if g is not None):
            raise SkippedStep

    def _standard_step(
        self, batch: Batch, carry: Tree, sent: Tensors, lr: float, protection: Protection | None = None
    ) -> tuple[Tensor, Tree]:
        method, settings = self.method, self.settings
        local = Local(self.params, sent)
        out, grads = Output(batch.y, batch.y), []  # type: Output, Sequence[Tensor]
        if protection is not None:
            loss, grads, carry = self._private_gradient(batch, carry, local, protection)
        elif method.overrides("perturb"):
            loss, out, grads, carry = self._perturbed_gradient(batch, carry, local)
        else:
            loss, out, grads = self._accumulated(batch, carry, local)
        self.check_finite(grads)
        unused = [i for i, g in enumerate(grads) if g is None]  # not part of this batch's forward pass
        with torch.no_grad():
            if unused:
                grads = [
                    torch.zeros_like(p) if g is None else g
                    for p, g in zip(self.param_list, grads, strict=True)
                ]
            if method.overrides("edit_gradient"):
                edited = method.edit_gradient(dict(zip(self.params, grads, strict=True)), carry, local)
                grads, unused = [edited[name] for name in self.params], []
            global_params: list[Tensor] = []
            if method.overrides("proximal_mu"):
                global_params, unused = [sent[name] for name in self.params], []
            if settings.max_grad_norm is not None:
                grads = clip(
                    add_proximal_term(self.param_list, grads, global_params, method.proximal_mu()),
                    settings.max_grad_norm,
                )
            self._update(grads, unused, batch, global_params, lr)
            if method.overrides("after_step"):
                out = Output(out.features.detach(), out.logits.detach())
                params, carry = method.after_step(self.params, out, batch, carry)
                self._assign(params)
        return loss.detach(), carry

    def _private_gradient(
        self, batch: Batch, carry: Tree, local: Local, protection: Protection
    ) -> tuple[Tensor, Sequence[Tensor], Tree]:
        """Loss, gradient and carry of a DP-SGD step."""
        assert self.runner.sample_dp is not None
        key, noise, expected = protection
        point = {name: p.detach() for name, p in local.params.items()}
        if self.method.overrides("perturb"):
            point, carry = self.method.perturb({}, carry, Local(point, local.global_params))
        grads, loss = private_gradient(
            self.method, self.context.network, batch, key, Local(point, local.global_params), self.buffers, carry,
            self.runner.sample_dp.clip, noise, expected,
        )  # fmt: skip
        return loss, [grads[name] for name in self.params], carry

    def _accumulated(
        self, batch: Batch, carry: Tree, local: Local, ascends: bool = False
    ) -> tuple[Tensor, Output, Sequence[Tensor]]:
        """The loss of a batch, or that of the ascent, the model's outputs, and the gradient, over micro-batches."""
        parts = micro_batches(batch, self.settings.micro_batch_size)
        if len(parts) == 1:
            loss, out = self._forward(parts[0], carry, local, ascends)
            return loss, out, self._gradient(loss, materialize=ascends)
        total, outputs = torch.zeros((), dtype=self.context.dtype, device=self.context.device), []
        grads: list[Tensor | None] = [None] * len(self.param_list)
        for part in parts:
            if self.key is not None:
                self.context.network.seed_dropout(part.key(self.key))
            loss, out = self._forward(part, carry, local, ascends)
            total += loss.detach()
            outputs.append(out)
            for i, gradient in enumerate(self._gradient(loss, materialize=ascends)):
                before = grads[i]
                grads[i] = gradient if before is None or gradient is None else before + gradient
                if gradient is None:
                    grads[i] = before
        return total, joined(outputs), cast("Sequence[Tensor]", grads)

    def _forward(
        self, part: MicroBatch, carry: Tree, local: Local, ascends: bool = False
    ) -> tuple[Tensor, Output]:
        """A part of the loss of a batch, or of that of the ascent, and the model's outputs."""
        method, batch, extra = self.method, part.batch, self.method.extra_inputs(carry)
        x = batch.x if extra is None else torch.cat([extra, batch.x])
        with self.context.network.autocast():
            out = self.context.network.call(self.net, self.context.network.to_fast_layout(x))
        if extra is not None:
            out = split_extra(out, len(extra))
        loss = method.ascent_loss(out, batch, carry, local) if ascends else None
        if loss is not None:
            return part.scaled(loss), out
        return part.add(method.task_loss(out, batch, carry), method.loss(out, batch, carry, local)), out

    def _gradient(self, loss: Tensor, materialize: bool = False) -> Sequence[Tensor]:
        """The loss's gradient; for parameters that it does not depend on, None or, if ``materialize``, zeros."""
        if not loss.requires_grad:
            raise HoldfastError(
                f"{self.method.name}: the loss does not depend on the model's weights; compute it from out.logits or "
                "out.features, without detach()"
            )
        try:
            grads = torch.autograd.grad(
                scaled(loss, self.scaling), self.param_list, allow_unused=True, materialize_grads=materialize
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).splitlines()[0].rstrip(".")
            raise HoldfastError(f"{self.method.name}: the loss has no gradient: {first}") from error
        return [g if g is None else unscaled(g, self.scaling) for g in grads]

    def _perturbed_gradient(
        self, batch: Batch, carry: Tree, local: Local
    ) -> tuple[Tensor, Output, Sequence[Tensor], Tree]:
        """Loss, outputs and gradient at the weights that ``Method.perturb`` chooses, and the carry."""
        ascent, buffers = {}, {}
        if self.method.ascends:
            _, _, gradient = self._accumulated(batch, carry, local, ascends=True)
            ascent = dict(zip(self.params, gradient, strict=True))
            buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        with torch.no_grad():
            start = [p.clone() for p in self.param_list]
            point, carry = self.method.perturb(ascent, carry, local)
            self._assign(point)
        loss, out, grads = self._accumulated(batch, carry, local)
        with torch.no_grad():
            torch._foreach_copy_(self.param_list, start)
            for name, buffer in buffers.items():
                self.buffers[name].copy_(buffer)
        return loss, out, grads, carry

    def _update(
        self,
        grads: Sequence[Tensor],
        unused: Collection[int],
        batch: Batch,
        sent: Sequence[Tensor],
        lr: float,
    ) -> None:
        """Update all parameters except the ``unused`` ones, as torch's optimisers do."""
        rates = None
        if self.method.overrides("learning_rate"):
            rates = learning_rates(self.method, int(batch.epoch), lr, self.context)
        if self.own_optimizer is not None:
            grads = add_proximal_term(self.param_list, grads, sent, self.proximal_mu)
            self.own_optimizer.step_(grads, rates or [lr] * len(self.param_list), unused)
            return
        assert self.optimizer is not None
        used = [i for i in self.all_indices if i not in unused] if unused else self.all_indices
        by_rate: dict[float, list[int]] = {lr: used}
        if rates is not None:
            by_rate = {}
            for i in used:
                by_rate.setdefault(rates[i], []).append(i)
            by_rate.pop(0.0, None)  # parameters and state do not change
        state = {slot: list(by_name.values()) for slot, by_name in self.optimizer_state.items()}
        for rate, chosen in by_rate.items():
            self.optimizer.step_(
                [self.param_list[i] for i in chosen],
                [grads[i] for i in chosen],
                {slot: [values[i] for i in chosen] for slot, values in state.items()},
                lr=rate,
                proximal_mu=self.proximal_mu,
                global_params=[sent[i] for i in chosen] if sent else [],
            )

    def _custom_step(self, batch: Batch, carry: Tree, sent: Tensors, lr: float) -> tuple[Tensor, Tree]:
        trainer = _SequentialTrainer(self, lr)
        current = {name: p.detach().clone() for name, p in self.params.items()}
        stepped = self.method.step(trainer, current, batch, carry, Local(current, sent))
        if stepped is None:
            return self._standard_step(batch, carry, sent, lr)
        if trainer.loss is None:
            raise no_gradient(self.method)
        params, carry = weights_and_carry(stepped, carry)
        self._assign(params)
        return trainer.loss, carry

    def _assign(self, params: Tensors) -> None:
        """Copy the parameters that a hook replaced into the model."""
        with torch.no_grad():
            for name, value in params.items():
                if value is not self.params[name]:
                    self.params[name].copy_(value)


class SkippedStep(Exception):
    """The gradient of a scaled loss is not finite."""


class _SequentialTrainer:
    """The `Trainer` for methods that override ``step``."""

    def __init__(self, engine: SequentialEngine, lr: float) -> None:
        self.engine, self.lr = engine, lr
        self.loss: Tensor | None = None  # of the step's first objective

    def forward(self, params: Tensors, x: Tensor) -> Output:
        network = self.engine.context.network
        with network.autocast():
            return network.apply(params, self.engine.buffers, x, train=True)

    def gradient(self, objective: Callable[[Tensors], Tensor], params: Tensors) -> tuple[Tensors, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value, scaling = objective(leaves), self.engine.scaling
        grads = torch.autograd.grad(scaled(value, scaling), list(leaves.values()), materialize_grads=True)
        grads = tuple(unscaled(g, scaling) for g in grads)
        self.engine.check_finite(grads)
        self.loss = value.detach() if self.loss is None else self.loss
        return dict(zip(leaves, grads, strict=True)), value.detach()


def no_gradient(method: Method) -> HoldfastError:
    """The error for a ``step`` without an objective."""
    return HoldfastError(
        f"{method.name}: step returns weights without calling trainer.gradient; compute gradients with "
        "trainer.gradient(objective, params), or return None for the usual step"
    )
