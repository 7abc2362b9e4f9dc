"""Composition of methods: loss terms are added, hooks chained, and states separated by the parts' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import named
from holdfast.methods.base import (
    Batch,
    Local,
    Method,
    Server,
    Tensors,
    Trainer,
    Tree,
    Upload,
    weights_and_carry,
)
from holdfast.methods.context import Client, RunContext
from holdfast.models.network import Output

EXCLUSIVE = {
    "aggregate": "replace the aggregation",
    "upload_params": "replace what is uploaded",
    "client_weight": "choose the clients' weights",
    "task_loss": "replace the task's loss",
    "step": "replace the whole step",
    "perturb": "choose where gradients are computed",
    "initial_params": "choose the initial weights",
    "learning_rate": "set learning rates",
    "eval_params": "choose the tested model",
    "global_logits": "choose how the global model predicts",
    "personal_logits": "choose how clients predict",
}
"""Hooks that only one part of a stack may override, and the effect of each, for error messages."""

WITHIN_A_STEP = (
    "task_loss", "loss", "ascent_loss", "perturb", "edit_gradient", "proximal_mu", "learning_rate", "after_step",
)  # fmt: skip
"""Hooks that are not called if a part replaces the whole step."""


@dataclass(frozen=True, init=False)
class Stack(Method):
    """``Stack(FedNTD(beta=1), FedFA(mu=0.1))``, or ``fedntd+fedfa`` on the command line.

    Loss terms are added, and other hooks run in the given order. Each part has its own payload, carry and state.
    Two parts that both override an exclusive hook, such as the aggregation, cannot be stacked. Nested stacks are
    flattened.
    """

    parts: tuple[Method, ...]

    def __init__(self, *parts: Method) -> None:
        each = (part.parts if isinstance(part, Stack) else (part,) for part in parts)
        object.__setattr__(self, "parts", tuple(chain.from_iterable(each)))
        self.check()

    def check(self) -> None:
        """Raise if the parts cannot be combined."""
        if not self.parts:
            raise HoldfastError("a stack needs at least one method")
        for part in self.parts:
            if not isinstance(part, Method):
                raise HoldfastError(
                    f"a part of a stack is {named(part)}; it must be a method: Stack(FedNTD(), FedProx())"
                )
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise HoldfastError(
                f"'{self.name}' names a method twice; the parts of a stack must be different methods"
            )
        for hook, meaning in EXCLUSIVE.items():
            owners = [part.name for part in self.parts if part.overrides(hook)]
            if len(owners) > 1:
                raise HoldfastError(f"{' and '.join(owners)} cannot be stacked: both {meaning}")
        whole = [p.name for p in self.parts if p.overrides("step")]
        within = [p.name for p in self.parts if any(p.overrides(hook) for hook in WITHIN_A_STEP)]
        if whole and within:
            raise HoldfastError(
                f"{whole[0]} and {within[0]} cannot be stacked: {whole[0]} replaces the whole step, "
                f"so the hooks of {within[0]} within a step would not be called"
            )
        replacing = [p.name for p in self.parts if p.overrides("upload_params")]
        readers = [p.name for p in self.parts if p.keeps_uploads and p.name not in replacing]
        if replacing and readers:
            raise HoldfastError(
                f"{replacing[0]} and {readers[0]} cannot be stacked: {replacing[0]} replaces what is uploaded, "
                f"and {readers[0]} needs the clients' models"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """The parts' names, joined by +."""
        return "+".join(part.name for part in self.parts)

    @property
    def teachers(self) -> tuple[str, ...]:  # type: ignore[override]
        """All teachers, prefixed with their part's name."""
        return tuple(f"{part.name}:{teacher}" for part in self.parts for teacher in part.teachers)

    @property
    def keeps_uploads(self) -> bool:  # type: ignore[override]
        return any(part.keeps_uploads for part in self.parts)

    @property
    def ascends(self) -> bool:  # type: ignore[override]
        """Whether the part that chooses where gradients are computed needs a second pass."""
        return self._owner("perturb").ascends

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        return any(part.needs_public for part in self.parts)

    @property
    def needs_classes(self) -> bool:  # type: ignore[override]
        return any(part.needs_classes for part in self.parts)

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        return any(part.needs_features for part in self.parts)

    @property
    def holdout(self) -> float:  # type: ignore[override]
        """The largest share of any part."""
        return max(part.holdout for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """The name and the description of each part."""
        return {"name": self.name} | {part.name: part.describe() for part in self.parts}

    def overrides(self, hook: str) -> bool:
        return any(part.overrides(hook) for part in self.parts)

    def prepare(self, context: RunContext) -> Stack:
        return Stack(*(part.prepare(context) for part in self.parts))

    def _owner(self, hook: str) -> Method:
        """The part that overrides this exclusive hook, or the first part, which has the default."""
        return next((part for part in self.parts if part.overrides(hook)), self.parts[0])

    def _each(self, call: Callable[[Method], Tree]) -> Tree:
        """The non-empty results of a call for each part, by name."""
        results = ((part.name, call(part)) for part in self.parts)
        return {name: tree for name, tree in results if tree}

    def init_server_state(self, context: RunContext) -> Tree:
        return self._each(lambda part: part.init_server_state(context))

    def begin_round(self, server: Server, context: RunContext) -> Tree:
        return self._each(lambda part: part.begin_round(_view(server, part), context))

    def broadcast(self, server: Server) -> Tree:
        return self._each(lambda part: part.broadcast(_view(server, part)))

    def broadcast_to(self, server: Server, client: int) -> Tree:
        return {
            f"{name}:own": tree
            for name, tree in self._each(lambda part: part.broadcast_to(_view(server, part), client)).items()
        }

    def init_client_state(self, client: Client) -> Tree:
        return self._each(lambda part: part.init_client_state(client))

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        part = self._owner("initial_params")
        return part.initial_params(params, _received(payload, part), state.get(part.name, {}), client)

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        return self._each(
            lambda part: part.client_init(_received(payload, part), state.get(part.name, {}), client)
        )

    def tables(self, payload: Tree, state: Tree, client: Client) -> Tensors:
        return {
            f"{part.name}:{key}": values
            for part in self.parts
            for key, values in part.tables(_received(payload, part), state.get(part.name, {}), client).items()
        }

    def teacher(self, name: str, payload: Tree, state: Tree, client: Client) -> Tensors:
        owner, teacher = name.split(":")
        part = next(part for part in self.parts if part.name == owner)
        return part.teacher(teacher, _received(payload, part), state.get(owner, {}), client)

    def extra_inputs(self, carry: Tree) -> Tensor | None:
        extras = [extra for _, extra in self._extras(carry)]
        return torch.cat(extras) if extras else None

    def _extras(self, carry: Tree) -> Iterator[tuple[Method, Tensor]]:
        for part in self.parts:
            extra = part.extra_inputs(carry.get(part.name, {}))
            if extra is not None:
                yield part, extra

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        part = self._owner("task_loss")
        return part.task_loss(out, _part_batch(batch, part), carry.get(part.name, {}))

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        total: Tensor | None = None
        spans, at = {}, 0
        for part, extra in self._extras(carry):
            spans[part.name] = slice(at, at + len(extra))
            at += len(extra)
        for part in self.parts:
            own = out
            if out.extra is not None:
                span = spans.get(part.name, slice(0, 0))
                own = out._replace(extra=Output(out.extra.features[span], out.extra.logits[span]))
            term = part.loss(own, _part_batch(batch, part), carry.get(part.name, {}), local)
            if term is not None:
                total = term if total is None else total + term
        return total

    def ascent_loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        part = self._owner("perturb")
        return part.ascent_loss(out, _part_batch(batch, part), carry.get(part.name, {}), local)

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        part = self._owner("perturb")
        point, own = part.perturb(grads, carry.get(part.name, {}), local)
        return point, carry | {part.name: own} if own else carry

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        for part in self.parts:
            grads = part.edit_gradient(grads, carry.get(part.name, {}), local)
        return grads

    def proximal_mu(self) -> float:
        return sum(part.proximal_mu() for part in self.parts)

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float | None:
        return self._owner("learning_rate").learning_rate(name, epoch, lr, context)

    def step(
        self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local
    ) -> tuple[Tensors, Tree] | None:
        part = self._owner("step")
        old = carry.get(part.name, {})
        result = part.step(trainer, params, _part_batch(batch, part), old, local)
        if result is None:
            return None
        new, own = weights_and_carry(result, old)
        return new, carry | {part.name: own} if own else carry

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        carry = dict(carry)
        for part in self.parts:
            own = carry.get(part.name, {})
            params, own = part.after_step(params, out, _part_batch(batch, part), own)
            if own:
                carry[part.name] = own
        return params, carry

    def after_epoch(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        carry = dict(carry)
        for part in self.parts:
            params, own = part.after_epoch(params, carry.get(part.name, {}))
            if own:
                carry[part.name] = own
        return params, carry

    def resets_optimizer(self, epoch: int, context: RunContext) -> bool:
        return any(part.resets_optimizer(epoch, context) for part in self.parts)

    def upload_params(self, params: Tensors, carry: Tree, client: Client) -> Tensors:
        part = self._owner("upload_params")
        return part.upload_params(params, carry.get(part.name, {}), client)

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        results = {
            part.name: part.client_final(params, carry.get(part.name, {}), client) for part in self.parts
        }
        return {n: s for n, (s, _) in results.items() if s}, {n: m for n, (_, m) in results.items() if m}

    def is_shared(self, name: str, context: RunContext) -> bool:
        return all(part.is_shared(name, context) for part in self.parts)

    def client_weight(self, client: Client) -> float:
        return self._owner("client_weight").client_weight(client)

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        part = self._owner("aggregate")
        params, state = part.aggregate(_view(server, part), mean, sums.get(part.name, {}), context)
        return params, server.state | {part.name: state}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        return self._each(
            lambda part: part.update(
                _view(server, part), sums.get(part.name, {}), _own(uploads, part), context
            )
        )

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        for part in self.parts:
            server = _merge(server, part, part.refine(_view(server, part), _own(uploads, part), context))
        return server

    def eval_params(self, server: Server) -> Tensors:
        part = self._owner("eval_params")
        return part.eval_params(_view(server, part))

    def global_logits(self, out: Output, server: Server) -> Tensor:
        part = self._owner("global_logits")
        return part.global_logits(out, _view(server, part))

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        part = self._owner("personal_logits")
        return part.personal_logits(out, state.get(part.name, {}))

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """Each part replaces its own share of the parameters."""
        for part in self.parts:
            params = part.personal_params(_view(server, part), state.get(part.name, {}), client)
            server = replace(server, params=params)
        return server.params

    def prototype_logits(self, out: Output, server: Server) -> Tensor:
        part = self._owner("prototype_logits")
        return part.prototype_logits(out, _view(server, part))

    def final_statistics(self, params: Tensors, client: Client) -> Tree | None:
        return self._each(lambda part: part.final_statistics(params, client) or {})

    def finalize(self, server: Server, sums: Tree, context: RunContext) -> Server:
        for part in self.parts:
            if part.name in sums:
                server = _merge(server, part, part.finalize(_view(server, part), sums[part.name], context))
        return server


def _view(server: Server, part: Method) -> Server:
    """The server with only this part's state."""
    return replace(server, state=server.state.get(part.name, {}))


def _merge(server: Server, part: Method, refined: Server) -> Server:
    state = dict(server.state)
    if refined.state:
        state[part.name] = refined.state
    return Server(refined.params, refined.buffers, state, server.round)


def _received(payload: Tree, part: Method) -> Tree:
    return {**payload.get(part.name, {}), **payload.get(f"{part.name}:own", {})}


def _part_batch(batch: Batch, part: Method) -> Batch:
    """The batch with only this part's teachers and tables."""
    prefix = f"{part.name}:"
    teacher = {k.removeprefix(prefix): v for k, v in batch.teacher.items() if k.startswith(prefix)}
    table = {k.removeprefix(prefix): v for k, v in batch.table.items() if k.startswith(prefix)}
    return Batch(batch.x, batch.y, batch.epoch, batch.mask, teacher, table, batch.task)


def _own(uploads: Sequence[Upload], part: Method) -> list[Upload]:
    return [Upload(u.client, u.weight, u.params, u.buffers, u.sums.get(part.name, {})) for u in uploads]
