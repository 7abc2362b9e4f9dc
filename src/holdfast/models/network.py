"""Any torch classifier as a function of its weights, with features and logits told apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from holdfast import kernels
from holdfast.core.errors import HoldfastError
from holdfast.models.layers import CHANNEL_DROPOUTS, BatchNorm, CounterDropout, VmapLinear, pool_before_relu

NormPolicy = Literal["average", "local", "drop"]


class Output(NamedTuple):
    """What the model says of a batch: ``features`` [B, d] (the classifier's input) and ``logits`` [B, C].

    ``extra`` holds the outputs for a method's extra inputs, where it has any.
    """

    features: Tensor
    logits: Tensor
    extra: Output | None = None


@dataclass(frozen=True)
class Head:
    """The names of the classifier's parameters (the last linear layer), and the width of its input."""

    weight: str
    bias: str | None
    features: int

    @property
    def names(self) -> tuple[str, ...]:
        """Weight and, if there is one, bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def logits(self, params: dict[str, Tensor], features: Tensor) -> Tensor:
        """The classifier alone, applied to features ``[B, d]``."""
        bias = None if self.bias is None else params[self.bias]
        return nn.functional.linear(features, params[self.weight], bias)


def find_head(net: nn.Module, layer: str | None) -> tuple[str, nn.Linear]:
    """The classifier: the layer of that name, or the last Linear."""
    linears = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    if layer is not None:
        if layer not in linears:
            raise HoldfastError(
                f"the model has no linear layer '{layer}'; its linear layers are: {', '.join(linears) or 'none'}"
            )
        return layer, linears[layer]
    if not linears:
        raise HoldfastError(
            "the model has no torch.nn.Linear layer to serve as classifier (features in, logits out); "
            "end it with one"
        )
    return list(linears.items())[-1]


def _head(layer: str, linear: nn.Linear, params: Mapping[str, nn.Parameter]) -> Head:
    """The classifier's parameters by name; one that another layer shares has that layer's."""
    first = {id(p): name for name, p in params.items()}
    inside = f"{layer}." if layer else ""
    weight = first.get(id(linear.weight), f"{inside}weight")
    bias = None if linear.bias is None else first.get(id(linear.bias), f"{inside}bias")
    return Head(weight, bias, linear.in_features)


def _call(
    net: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A module's outputs at given weights, and the buffers in whose place a layer has put another tensor."""
    before = {**buffers, **params}
    after = dict(before)  # in which ``functional_call`` leaves them
    logits = functional_call(net, after, (x,))
    return logits, {name: after[name].detach() for name in buffers if after[name] is not before[name]}


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)


class Network:
    """A module as a function of (parameters, buffers, input).

    ``norm`` says what happens to BatchNorm between clients: ``average`` (statistics and weights averaged like
    everything else), ``local`` (each client keeps its own, as FedBN does), ``drop`` (no running statistics:
    batch statistics always). Parameters that ask for no gradient, or are ``unused``, stay in the module as they are:
    they are neither trained nor sent.
    """

    def __init__(
        self,
        net: nn.Module,
        head: str | None = None,
        norm: NormPolicy = "average",
        unused: frozenset[str] = frozenset(),
    ) -> None:
        if norm not in ("average", "local", "drop"):
            raise HoldfastError(f"norm is '{norm}'; it must be average, local or drop")
        if any(is_lazy(tensor) for tensor in (*net.parameters(), *net.buffers())):
            raise HoldfastError(
                "the model has lazy layers, whose weights are not made yet; call it once on a few samples first"
            )
        self._original, self._norm, self._layer, self.unused = net, norm, head, unused
        self.net = copy.deepcopy(net)
        norms = {
            name: m for name, m in self.net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        }
        for name, module in norms.items():
            if BatchNorm.can_replace(module):
                _replace(self.net, name, BatchNorm(module, tracks=norm != "drop"))
            elif norm == "drop":
                raise HoldfastError(
                    f"norm is 'drop', but the batch norm '{name}' is one of your own, which keeps its statistics: "
                    "use average or local"
                )
        self.has_batch_norm = bool(norms)
        self.mixes_samples = bool(norms) and norm == "drop"  # batch statistics even when it is tested
        dropouts = [
            (n, m) for n, m in self.net.named_modules() if kernels.is_plain(m, nn.Dropout, *CHANNEL_DROPOUTS)
        ]
        for number, (name, dropout) in enumerate(dropouts):
            whole = type(dropout) is not nn.Dropout
            _replace(self.net, name, CounterDropout(float(dropout.p), number, whole))
        self.dropouts = len(dropouts)
        layer, linear = find_head(self.net, head)
        asking = {n: p for n, p in self.net.named_parameters() if p.requires_grad and n not in unused}
        self._classifier, self.head = layer, _head(layer, linear, asking)
        everywhere = list(self.net.named_parameters(remove_duplicate=False))
        own = {id(p) for p in linear.parameters()}
        self.head_is_shared = sum(id(p) in own for _, p in everywhere) > len(own)  # another layer uses it too
        self.num_outputs = linear.out_features
        self.params = {name: p.detach().clone() for name, p in asking.items()}
        if "weight" not in linear._parameters:
            raise HoldfastError(
                f"the weight of the model's classifier '{layer}' is computed from other parameters, as with weight "
                "norms; methods need a plain torch.nn.Linear there"
            )
        if self.head.weight not in self.params:
            raise HoldfastError(
                f"the model's classifier '{layer}' asks for no gradient; a method trains at least that: "
                "requires_grad_(True)"
            )
        self.frozen = any(not p.requires_grad for p in self.net.parameters())
        self.buffers = {name: b.detach().clone() for name, b in self.net.named_buffers()}
        prefixes = tuple(f"{name}." for name in norms) if norm == "local" else ()
        self.kept_local = frozenset(
            n for n in [*self.params, *self.buffers] if prefixes and n.startswith(prefixes)
        )
        self._captured: list[Tensor] = []
        captured = self._captured  # shared with the functional copy, whose hooks are copied along
        linear.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        some = next(iter(self.params.values()))
        if kernels.unavailable(some.device, some.dtype) is not None:  # they do both at once
            pool_before_relu(self.net)
        self.channels_last = some.device.type == "cpu" and any(p.dim() == 4 for p in self.params.values())
        self.own_kernels = True  # whether lanes may use ours, where they are available
        self.ignores_padding = True  # whether what fills up a batch leaves the other samples as they are
        self._lanes: nn.Module | None = None

    @property
    def uses_kernels(self) -> bool:
        """Whether lanes run on kernels of our own."""
        some = next(iter(self.params.values()))
        return self.own_kernels and not self.frozen and kernels.unavailable(some.device, some.dtype) is None

    def module(self) -> nn.Module:
        """A copy of the module as the user gave it, to be loaded with trained weights."""
        net = copy.deepcopy(self._original)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and self._norm == "drop":
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        return net

    def twin(self) -> Network:
        """The same network once more, to be used in another thread."""
        return Network(self._original, self._layer, self._norm, self.unused)

    def to(self, device: torch.device) -> Network:
        """A copy on another device, that shares nothing with this one."""
        twin = Network(copy.deepcopy(self._original).to(device), self._layer, self._norm, self.unused)
        twin.params = {name: p.to(device, copy=True) for name, p in self.params.items()}
        twin.buffers = {name: b.to(device, copy=True) for name, b in self.buffers.items()}
        twin.own_kernels, twin.ignores_padding = self.own_kernels, self.ignores_padding
        return twin

    def smallest_map(self, x: Tensor) -> int | None:
        """Values (pixels) of a channel that a sample of ``x`` brings to a BatchNorm, where they are fewest."""
        found = self._watch(x, BatchNorm, lambda inputs, _: inputs[0][0, 0].numel())
        return min(found, default=None)

    def most_values(self, x: Tensor) -> int:
        """Values that a sample of ``x`` is turned into where the network is widest."""

        def largest(inputs: tuple[Any, ...], output: Any) -> int:
            seen = (*inputs, *output) if isinstance(output, tuple) else (*inputs, output)
            return max(tensor.numel() for tensor in (x, *seen) if isinstance(tensor, Tensor))

        return max(self._watch(x, nn.Module, largest)) // len(x)

    def _watch(self, x: Tensor, kind: type[nn.Module], look: Callable[[Any, Any], int]) -> list[int]:
        """What is seen of the inputs and the output of every module of a kind, in one forward pass of ``x``."""
        found: list[int] = []
        hooks = [
            module.register_forward_hook(lambda _, inputs, output: found.append(look(inputs, output)))
            for module in self.net.modules()
            if isinstance(module, kind)
            and not isinstance(module, torch.jit.ScriptModule)  # which has no hooks
        ]
        with torch.no_grad():
            self.apply(self.params, self.buffers, x)
        for hook in hooks:
            hook.remove()
        return found

    def arranged(self, x: Tensor) -> Tensor:
        """Inputs in the memory layout that is fastest here: channels last for convolutions on a CPU."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def seed_dropout(self, key: Tensor | None) -> None:
        """Say where the next forward pass in training mode draws its dropout masks from."""
        for net in (self.net, self._lanes):
            for module in () if net is None else net.modules():
                if isinstance(module, CounterDropout):
                    module.key = key

    def call(self, module: nn.Module, x: Tensor) -> Output:
        """Apply a module with its own weights."""
        self._captured.clear()
        logits = module(x)
        return self._output(logits)

    def _output(self, logits: Tensor) -> Output:
        """The logits with the features that the classifier made them of."""
        if not self._captured:
            raise HoldfastError(
                f"the model does not call its layer '{self._classifier}', the last Linear (to use its weight is not "
                "enough); say which one is its classifier: classifier='...'"
            )
        return Output(self._captured.pop().flatten(1), logits)

    def apply(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, train: bool = False
    ) -> Output:
        """The outputs at given weights; in training mode buffers, such as BatchNorm's, are changed in place.

        ``params`` may hold buffers of their own, which then stand in for those given.
        """
        self.net.train(train)
        self._captured.clear()
        logits, assigned = _call(self.net, params, buffers, x)
        for name, value in assigned.items() if train else ():
            buffers[name].copy_(value)
        return self._output(logits)

    def pure(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        x: Tensor,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        train: bool = True,
    ) -> tuple[Output, dict[str, Tensor]]:
        """Outputs and the new buffers, for use under ``vmap`` and ``grad``."""
        if self._lanes is None:
            self._lanes = self._functional_copy()
        self._lanes.train(train)
        norms = {n: m for n, m in self._lanes.named_modules() if isinstance(m, BatchNorm)}
        for module in norms.values():
            module.mask = mask
        if self.dropouts:
            self.seed_dropout(key)
        self._captured.clear()
        logits, assigned = _call(self._lanes, params, buffers, x)
        fresh = {f"{n}.{key}": value for n, m in norms.items() for key, value in m.fresh.items()}
        fresh |= assigned if train else {}
        for module in norms.values():
            module.mask, module.fresh = None, {}
        return self._output(logits), buffers | fresh

    def _functional_copy(self) -> nn.Module:
        lanes = copy.deepcopy(self.net).train()
        for module in lanes.modules():
            if isinstance(module, BatchNorm):
                module.pure = True
        if self.uses_kernels:
            for module in lanes.modules():
                if isinstance(module, BatchNorm):
                    module.own_kernels = True
            kernels.install(lanes)
        if next(iter(self.params.values())).device.type == "cpu":
            for module in lanes.modules():
                if type(module) is nn.Linear:
                    module.__class__ = VmapLinear
        return lanes
