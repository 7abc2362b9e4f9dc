"""The optimiser of local training, from the settings of a run: its step and the state that it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.optimizers import SGD, Adagrad, Adam, AdamW, Factory, RMSprop, factory_name
from holdfast.core.settings import Settings
from holdfast.core.spec import named
from holdfast.core.trees import Tensors, Tree
from holdfast.engine.optim import adagrad_, adam_, add_proximal_term, rmsprop_, sgd_

STEPS = "step"  # Adam's step counter: a number per parameter, or per parameter and lane


class LocalOptimizer:
    """One of `OPTIMIZERS`. Its state has a tensor for each parameter: ``{"momentum": {"0.weight": …}}``.

    Parameters may be those of one model, or of many stacked, ``[lanes, ...]``.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.optimizer_spec is not None
        self.spec, self.momentum = settings.optimizer_spec, settings.momentum
        self.weight_decay = settings.weight_decay
        self.is_sgd = isinstance(self.spec, SGD) and not self.spec.nesterov
        """Whether its step is the SGD of Holdfast's kernels."""
        self.writes_fp16 = self.is_sgd or isinstance(self.spec, Adam)
        """Whether Holdfast's kernel for its step can write fp16 copies of weights."""

    def new_state(self, params: Mapping[str, Tensor], lanes: int | None = None) -> Tree:
        """The state before the first step; ``lanes`` is their number if ``params`` are stacked."""
        slots = (*self.spec.slots, *(["momentum"] if self.momentum else []))
        state = {slot: {k: torch.zeros_like(p) for k, p in params.items()} for slot in slots}
        if isinstance(self.spec, Adam):
            shape = () if lanes is None else (lanes,)
            state[STEPS] = {
                k: torch.zeros(shape, dtype=torch.float32, device=p.device) for k, p in params.items()
            }
        return state

    def step_(
        self,
        params: list[Tensor],
        grads: Sequence[Tensor],
        state: Mapping[str, list[Tensor]],
        *,
        lr: float | Tensor,
        proximal_mu: float = 0.0,
        global_params: Sequence[Tensor] = (),
        kernels: bool = False,
        taps: Sequence[range | None] | None = None,
        fp16_copies: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Update the parameters and their ``state`` in place. The arguments are those of `sgd_`."""
        spec, decay = self.spec, self.weight_decay
        if isinstance(spec, SGD):
            sgd_(
                params, grads, state.get("momentum", []), lr=lr, momentum=self.momentum, weight_decay=decay,
                nesterov=spec.nesterov, proximal_mu=proximal_mu, global_params=global_params,
                kernels=kernels, taps=taps, fp16_copies=fp16_copies,
            )  # fmt: skip
            return
        grads = add_proximal_term(params, grads, global_params, proximal_mu)
        if isinstance(spec, Adam):
            adam_(
                params, grads, state["mean"], state["square"], state[STEPS], lr=lr, betas=spec.betas, eps=spec.eps,
                weight_decay=decay, decoupled=isinstance(spec, AdamW), kernels=kernels, fp16_copies=fp16_copies,
            )  # fmt: skip
        elif isinstance(spec, RMSprop):
            rmsprop_(
                params, grads, state["square"], state.get("momentum", []), lr=lr, alpha=spec.alpha, eps=spec.eps,
                momentum=self.momentum, weight_decay=decay,
            )  # fmt: skip
        else:
            assert isinstance(spec, Adagrad)
            adagrad_(params, grads, state["sum"], lr=lr, eps=spec.eps, weight_decay=decay)


def former_state(client_state: Tree) -> Tree:
    """The optimiser's state in a client's state; version 0.1 stored the momentum of SGD alone."""
    if "momentum" in client_state:
        return {"momentum": client_state["momentum"]}
    return cast("Tree", client_state.get("optimizer", {}))


class TorchOptimizer:
    """A ``torch.optim.Optimizer`` that a factory creates for each client; its state is stored by parameter name."""

    def __init__(self, factory: Factory, params: Tensors, lr: float, one_group: bool) -> None:
        """``one_group``: all parameters have the same learning rate."""
        self.name, self.params = factory_name(factory), params
        values = list(params.values())
        groups: Iterable[Any] = values if one_group else [{"params": [p]} for p in values]
        try:
            self.optimizer: torch.optim.Optimizer = factory(groups, lr=lr)
        except TypeError as error:
            raise HoldfastError(
                f"optimizer {self.name} cannot be created as {self.name}(parameters, lr={lr:g}): {error}"
            ) from None
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise HoldfastError(
                f"optimizer {self.name} makes {named(self.optimizer)}; it must make a torch.optim.Optimizer"
            )
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise HoldfastError(
                f"optimizer {self.name} evaluates the loss several times in a step; local training computes one "
                "gradient for each step, as Adam and SGD need"
            )

    @property
    def state(self) -> Tree:
        """The optimiser's state, ``{"exp_avg": {"0.weight": …}}``."""
        tree: Tree = {}
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    raise HoldfastError(
                        f"keep_optimizer is True, but the state {key} of {self.name} is {named(value)}; only "
                        "tensors can be kept"
                    )
                tree.setdefault(key, {})[name] = value
        return tree

    def load(self, state: Tree) -> None:
        """Load a state that ``state`` returned."""
        for key, by_name in state.items():
            for name, value in by_name.items():
                self.optimizer.state[self.params[name]][key] = value.clone()

    def step_(self, grads: Sequence[Tensor], rates: Sequence[float], unused: Collection[int]) -> None:
        """One step; parameters that are ``unused`` or have the rate 0 do not change."""
        values = list(self.params.values())
        for i, (p, g) in enumerate(zip(values, grads, strict=True)):
            p.grad = None if i in unused or rates[i] == 0 else g
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
        self.optimizer.step()
        for p in values:
            p.grad = None
