"""Any torch module as a function of its weights that returns its outputs and, if it has a classifier, features."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from holdfast import kernels
from holdfast.core.errors import HoldfastError
from holdfast.models.layers import CHANNEL_DROPOUTS, BatchNorm, CounterDropout, VmapLinear, pool_before_relu
from holdfast.models.recurrent import replace_recurrent

BatchNormPolicy = Literal["average", "local", "drop"]


class Output(NamedTuple):
    """A model's outputs for a batch: ``features`` [B, d] (the classifier's input) and ``logits`` [B, C].

    ``logits`` are the model's outputs: [B, T, V] for sequences, [B, 1] or [B] for one number. ``features`` are
    [B, 0] if the model does not end in a Linear layer.
    ``extra`` holds the outputs for a method's extra inputs, if it has any.
    """

    features: Tensor
    logits: Tensor
    extra: Output | None = None


def split_extra(out: Output, extras: int) -> Output:
    """Separate the outputs of the extra inputs from those of the batch after them.

    Extra inputs come first, so that padding of the batch does not change their positions in dropout masks.
    """
    extra = Output(out.features[:extras], out.logits[:extras])
    return Output(out.features[extras:], out.logits[extras:], extra)


@dataclass(frozen=True)
class Head:
    """The names of the classifier's parameters (the last linear layer), and the width of its input."""

    weight: str
    bias: str | None
    features: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def logits(self, params: dict[str, Tensor], features: Tensor) -> Tensor:
        """The classifier alone, applied to features ``[B, d]``."""
        bias = None if self.bias is None else params[self.bias]
        return nn.functional.linear(features, params[self.weight], bias)


def find_classifier(net: nn.Module, layer: str | None) -> tuple[str, nn.Linear] | None:
    """The classifier: the layer of that name, or the last Linear; None without one."""
    linears = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    if layer is not None:
        if layer not in linears:
            raise HoldfastError(
                f"the model has no linear layer '{layer}'; its linear layers are: {', '.join(linears) or 'none'}"
            )
        return layer, linears[layer]
    return list(linears.items())[-1] if linears else None


def _head(layer: str, linear: nn.Linear, params: Mapping[str, nn.Parameter]) -> Head:
    """The classifier's parameters by name; a parameter shared with another layer may have that layer's name."""
    names = {id(p): name for name, p in params.items()}
    prefix = f"{layer}." if layer else ""
    weight = names.get(id(linear.weight), f"{prefix}weight")
    bias = None if linear.bias is None else names.get(id(linear.bias), f"{prefix}bias")
    return Head(weight, bias, linear.in_features)


def _is_frozen(linear: nn.Linear) -> bool:
    weight = linear._parameters.get("weight")  # absent if it is computed from others
    return weight is not None and not weight.requires_grad


def logits_of(outputs: Any) -> Any:
    """The logits of a module's outputs: the tensor itself, or the ``logits`` of an object, as in transformers."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def _call(
    net: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A module's outputs at given weights, and the new values of buffers that a layer has reassigned."""
    before = {**buffers, **params}
    after = dict(before)  # ``functional_call`` stores reassigned tensors here
    logits = logits_of(functional_call(net, after, (x,)))
    assigned = [name for name in buffers if after[name] is not before[name]]
    return logits, {name: after[name].detach().to(before[name].dtype) for name in assigned}


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)


class Network:
    """A module as a function of (parameters, buffers, input).

    Args:
        net: the module; it is copied.
        classifier: the name of its last linear layer, where that is not the last one that it registers.
        batchnorm: ``average`` (BatchNorm's statistics and weights are averaged like all others), ``local`` (each
            client keeps its own, as in FedBN) or ``drop`` (no running statistics: batch statistics always).
        unused: parameters that get no gradient. Like those that require none, they are neither trained nor sent.
        constants: buffers that are not part of the model's state; they are not sent either.
        autocast_dtype: the dtype of ``torch.autocast`` in `autocast`; None for none.
    """

    def __init__(
        self,
        net: nn.Module,
        classifier: str | None = None,
        batchnorm: BatchNormPolicy = "average",
        unused: frozenset[str] = frozenset(),
        constants: frozenset[str] = frozenset(),
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if batchnorm not in ("average", "local", "drop"):
            raise HoldfastError(f"batchnorm is '{batchnorm}'; it must be average, local or drop")
        if any(is_lazy(tensor) for tensor in (*net.parameters(), *net.buffers())):
            raise HoldfastError(
                "the model has lazy layers, whose weights do not exist yet; call it once on a few samples first"
            )
        self._original, self._batchnorm, self._layer = net, batchnorm, classifier
        self.unused, self._constants, self.autocast_dtype = unused, constants, autocast_dtype
        self.net = copy.deepcopy(net)
        norms = {
            name: m for name, m in self.net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        }
        for name, module in norms.items():
            if BatchNorm.can_replace(module):
                _replace(self.net, name, BatchNorm(module, tracks=batchnorm != "drop"))
            elif batchnorm == "drop":
                raise HoldfastError(
                    f"batchnorm is 'drop', but the layer '{name}' is a custom BatchNorm, whose statistics cannot "
                    "be dropped: use average or local"
                )
        self.has_batch_norm = bool(norms)
        self.mixes_samples = bool(norms) and batchnorm == "drop"  # batch statistics even in evaluation mode
        dropouts = [
            (n, m) for n, m in self.net.named_modules() if kernels.is_plain(m, nn.Dropout, *CHANNEL_DROPOUTS)
        ]
        for number, (name, dropout) in enumerate(dropouts):
            whole_channels = type(dropout) is not nn.Dropout
            _replace(self.net, name, CounterDropout(float(dropout.p), number, whole_channels))
        self.dropouts = len(dropouts)
        trained = {n: p for n, p in self.net.named_parameters() if p.requires_grad and n not in unused}
        self.params = {name: p.detach().clone() for name, p in trained.items()}
        self._captured: list[Tensor] = []
        self._classifier: str | None = None
        self._head: Head | None = None
        self.head_is_shared = True  # another layer uses its parameters too
        self.num_outputs: int | None = None  # of the classifier
        self.vector_features = True  # whether the classifier is applied to one vector a sample
        if not self.params:
            raise HoldfastError(
                "the model has no parameter that requires a gradient, so there is nothing to train"
            )
        self.frozen_classifier: str | None = None  # the last Linear layer, if it is not trained
        found = find_classifier(self.net, classifier)
        if found is not None and classifier is None and _is_frozen(found[1]):
            self.frozen_classifier = found[0]
        elif found is not None:
            self._set_head(*found, trained)
        self.frozen = any(not p.requires_grad for p in self.net.parameters())
        self.buffers = {
            name: b.detach().clone() for name, b in self.net.named_buffers() if name not in constants
        }
        prefixes = tuple(f"{name}." for name in norms) if batchnorm == "local" else ()
        self.kept_local = frozenset(
            n for n in [*self.params, *self.buffers] if prefixes and n.startswith(prefixes)
        )
        first = next(iter(self.params.values()))
        if not self._has_kernels:  # they fuse ReLU and pooling
            pool_before_relu(self.net)
        self.channels_last = first.device.type == "cpu" and any(p.dim() == 4 for p in self.params.values())
        self.own_kernels = True  # whether lanes may use Holdfast's kernels, if they are available
        self.ignores_padding = True  # whether padding of a batch leaves the outputs of its samples unchanged
        self._lanes: nn.Module | None = None

    def _set_head(self, layer: str, linear: nn.Linear, trained: Mapping[str, nn.Parameter]) -> None:
        """Use a layer as the classifier."""
        head = _head(layer, linear, trained)
        if "weight" not in linear._parameters:
            raise HoldfastError(
                f"the weight of the model's classifier '{layer}' is computed from other parameters, for example "
                "by weight normalisation; methods need a plain torch.nn.Linear there"
            )
        if head.weight not in self.params:
            raise HoldfastError(
                f"the model's classifier '{layer}' requires no gradient, but methods train it; call "
                "requires_grad_(True) on it, or name no classifier"
            )
        head_ids = {id(p) for p in linear.parameters()}
        uses = sum(id(p) in head_ids for _, p in self.net.named_parameters(remove_duplicate=False))
        self._classifier, self._head, self.num_outputs = layer, head, linear.out_features
        self.head_is_shared = uses > len(head_ids)
        captured = self._captured  # shared with the functional copy, whose hooks are copied along
        linear.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))

    @property
    def has_head(self) -> bool:
        """Whether the model ends in a Linear layer, whose inputs are its features."""
        return self._head is not None

    @property
    def head(self) -> Head:
        """The classifier's parameters; an error if the model does not end in a Linear layer."""
        if self._head is None:
            raise HoldfastError(
                "the model does not end in a torch.nn.Linear layer that is trained, so it has no classifier"
            )
        return self._head

    def drop_head(self) -> None:
        """Treat the last Linear layer, which is not the model's last layer, like any other."""
        self._classifier = self._head = self.num_outputs = None
        self.head_is_shared = True

    @property
    def uses_kernels(self) -> bool:
        """Whether lanes run on Holdfast's kernels."""
        return self.own_kernels and not self.frozen and self._has_kernels

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.params.values())).dtype

    @property
    def _has_kernels(self) -> bool:
        """Whether Holdfast's kernels exist for the network's device and arithmetic."""
        first = next(iter(self.params.values()))
        return self.autocast_dtype is None and kernels.unavailable(first.device, first.dtype) is None

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward passes of local training: ``torch.autocast`` if the network has a dtype for it.

        Outputs have the dtype of the weights in either case.
        """
        if self.autocast_dtype is None:
            return nullcontext()
        device = next(iter(self.params.values())).device.type
        # A cache of weights would outlive the capture of a CUDA graph.
        return torch.autocast(device, self.autocast_dtype, cache_enabled=False)

    def module(self) -> nn.Module:
        """A copy of the user's module, for trained weights to be loaded into."""
        net = copy.deepcopy(self._original)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and self._batchnorm == "drop":
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        return net

    def clone(self) -> Network:
        """A network with the same initial weights, for use in another thread."""
        return self._with_same_head(self._network_of(self._original))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Network:
        """A copy on a device that shares no memory with this one.

        With a ``dtype``, floating-point tensors get it, and all arithmetic is in it.
        """
        net = copy.deepcopy(self._original).to(device, dtype)
        copied = self._network_of(net)
        for own, tensors in ((copied.params, self.params), (copied.buffers, self.buffers)):
            own |= {name: t.to(device, own[name].dtype, copy=True) for name, t in tensors.items()}
        copied.own_kernels, copied.ignores_padding = self.own_kernels, self.ignores_padding
        copied.autocast_dtype = self.autocast_dtype if dtype is None else None
        return self._with_same_head(copied)

    def _network_of(self, net: nn.Module) -> Network:
        return Network(net, self._layer, self._batchnorm, self.unused, self._constants, self.autocast_dtype)

    def _with_same_head(self, copied: Network) -> Network:
        if not self.has_head:
            copied.drop_head()
        copied.vector_features = self.vector_features
        return copied

    def frozen_hash(self) -> str | None:
        """A hash of the parameters that require no gradient, which checkpoints leave out; None if there are none."""
        if not self.frozen:
            return None
        digest = hashlib.sha256()
        for name, p in self._original.named_parameters():
            if not p.requires_grad:
                digest.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
                digest.update(p.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def min_batchnorm_values(self, x: Tensor) -> int | None:
        """The fewest values (pixels) per channel and sample that any BatchNorm normalises; None without BatchNorm."""
        values = self._observe(x, BatchNorm, lambda inputs, _: inputs[0][0, 0].numel())
        return min(values, default=None)

    def max_activation_size(self, x: Tensor) -> int:
        """The number of values per sample in the network's largest activation."""

        def largest(inputs: tuple[Any, ...], output: Any) -> int:
            values = (x, *inputs, *output) if isinstance(output, tuple) else (x, *inputs, output)
            return max(value.numel() for value in values if isinstance(value, Tensor))

        return max(self._observe(x, nn.Module, largest)) // len(x)

    def _observe(self, x: Tensor, kind: type[nn.Module], measure: Callable[[Any, Any], int]) -> list[int]:
        """``measure(inputs, output)`` of every module of a type, in one forward pass of ``x``."""
        found: list[int] = []
        hooks = [
            module.register_forward_hook(lambda _, inputs, output: found.append(measure(inputs, output)))
            for module in self.net.modules()
            if isinstance(module, kind) and not isinstance(module, torch.jit.ScriptModule)  # it has no hooks
        ]
        with torch.no_grad():
            self.apply(self.params, self.buffers, x)
        for hook in hooks:
            hook.remove()
        return found

    def to_fast_layout(self, x: Tensor) -> Tensor:
        """Inputs in the fastest memory layout for this network: channels last for convolutions on a CPU."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def seed_dropout(self, key: Tensor | None) -> None:
        """Set the key from which the next forward pass in training mode draws its dropout masks."""
        for net in (self.net, self._lanes):
            for module in () if net is None else net.modules():
                if isinstance(module, CounterDropout):
                    module.key = key

    def call(self, module: nn.Module, x: Tensor) -> Output:
        """The outputs of a module with its own weights."""
        self._captured.clear()
        logits = logits_of(module(x))
        return self._output(logits)

    def _output(self, logits: Tensor) -> Output:
        """The logits with the features from which the classifier computed them."""
        if self.autocast_dtype is not None:
            logits = logits.to(self._dtype)
        if self._classifier is None:
            self._captured.clear()
            return Output(logits.reshape(logits.shape[0], -1)[:, :0], logits)
        if not self._captured:
            raise HoldfastError(
                f"the model does not call its layer '{self._classifier}', the last Linear (using its weight is "
                "not enough); pass the name of its classifier, classifier='...'"
            )
        features = self._captured.pop().flatten(1)
        return Output(features if self.autocast_dtype is None else features.to(self._dtype), logits)

    def apply(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, train: bool = False
    ) -> Output:
        """The outputs at given weights; in training mode buffers, such as BatchNorm's, are changed in place.

        Buffers in ``params`` take precedence over ``buffers``.
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
        """Outputs and new buffers without side effects, for use under ``vmap`` and ``grad``."""
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

    def evaluated(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features and logits in evaluation mode, for use under ``vmap``."""
        out, _ = self.pure(params, buffers, x, train=False)
        return out.features, out.logits

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
        on_cpu = next(iter(self.params.values())).device.type == "cpu"
        if on_cpu:
            for module in lanes.modules():
                if type(module) is nn.Linear:
                    module.__class__ = VmapLinear
        if not on_cpu or self.autocast_dtype is not None:
            replace_recurrent(lanes, self.uses_kernels)
        return lanes
