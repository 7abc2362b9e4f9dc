"""TARGET: distillation of the earlier stages of a stream on images that the server synthesises from a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import Count, Fraction, NonNegative, Positive, PositiveCount
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import cross_entropy, kl_divergence, shuffled_batches
from holdfast.models.layers import BatchNorm
from holdfast.models.network import Network, Output

NORMS = (BatchNorm, nn.modules.batchnorm._BatchNorm)
EXCLUDED = -1e9  # the logit of a class that is excluded from a softmax
NOISE, WIDTH = 256, 64  # the generator: size of its input, channels of its last hidden layer
BETAS = (0.5, 0.999)  # of Adam, which trains the generator
STUDENT_LR, STUDENT_MIN_LR, STUDENT_MOMENTUM, STUDENT_DECAY = 0.2, 2e-4, 0.9, 1e-4  # SGD
STUDENT_PERIOD = 200  # batches of images over which a cosine anneals the student's learning rate


@dataclass(frozen=True)
class TARGET(Method):
    """Class-incremental learning without exemplars, for streams of images.

    O: the classes that participants had before the current stage. z, p = softmax(z): a model's logits and
    probabilities; t: the teacher, the global model at the end of the last stage; all of O only.
    Local: CE over the classes outside O and the client's own
    + λ KL(softmax(z_t / τ) ‖ softmax(z / τ)), the mean over ``replay`` synthetic images x̂, which pass through the model
      with each batch.
    Before the first change of the stage, and without a stream, O is empty: CE, as FedAvg.
    Server: as FedAvg. Whenever the stage changes, it synthesises ``samples`` images, in batches x̂ = G(u) from noise u,
    with labels ŷ drawn uniformly from O. For each batch, a copy of the generator G and u take ``generator_steps`` Adam
    steps on
      ce CE(z_t(x̂), ŷ) + bn Σ_l (‖σ²_l - s²_l‖ + ‖μ_l - m_l‖) - adversarial mean_x̂ ω KL(p_t ‖ p_s).
    μ_l and σ²_l are the teacher's running statistics in BatchNorm layer l, m_l and s²_l those of the layer's inputs,
    averaged over the batches with ``bn_momentum``; without BatchNorm the term is 0. s: a student with the teacher's
    architecture, at first with random weights; ω is 1 if it predicts the teacher's class, and otherwise 0.
    The images of the step with the smallest loss are kept, with 8 bits. G takes one Adam step (its rate multiplied by
    ``generator_steps``) on the sum of the copy's gradients. From batch ``warmup`` on the adversarial term is used, and
    after each later batch the student takes ``student_steps`` SGD steps on T² KL(p_t ‖ p_s) at temperature T, on all
    images so far.
    Zhang et al., ICCV 2023, with the values of the authors' code for CIFAR-100. With these the code makes 10 batches
    of images, fewer than ``warmup``, so that its adversarial term and its student are never used; here there are
    samples / batch_size = 32. Other differences from the code: its classifier grows, while here a classifier of all
    classes is restricted to some; it crops and flips synthetic images; BatchNorm normalises them apart from real
    ones; and a local epoch visits each of them once. Classes that return are not considered there.
    """

    name: ClassVar[str] = "target"
    card: ClassVar[Card] = Card(
        when="the data is a stream of images in which classes appear and disappear, and one global model is needed",
        client="after the first stage, 128 synthetic images pass through the model with each batch",
        server="keeps 8-bit images; when the stage changes, trains a generator and a student of the model's size: 320 "
        "and 4400 steps with the defaults, in batches of at most 256 images",
        uploads="in a stream, which classes it holds",
    )
    needs_classes: ClassVar[bool] = True

    lam: NonNegative = 25.0  # λ: weight of the distillation
    tau: Positive = 2.0  # τ: temperature of the distillation
    replay: PositiveCount = 128  # synthetic images in each local step
    samples: PositiveCount = 8000  # synthetic images of a stage
    batch_size: PositiveCount = 256  # largest batch of synthetic images on the server
    generator_steps: PositiveCount = 10  # Adam steps for each batch of images
    generator_lr: Positive = 0.002  # of these steps
    noise_lr: Positive = 0.01  # of these steps, for the noise
    ce: NonNegative = 0.5  # weight of the cross-entropy in the generator's loss
    bn: NonNegative = 10.0  # weight of BatchNorm's statistics
    bn_momentum: Fraction = 0.9  # the weight of earlier batches in these statistics
    adversarial: NonNegative = 1.0  # weight of the adversarial term
    warmup: Count = 20  # batches of images before the student is trained
    student_steps: Count = 400  # SGD steps after each batch of images
    student_tau: Positive = 20.0  # T: temperature of the student's loss

    def prepare(self, context: RunContext) -> Self:
        """Raises if the data of a stream are not images."""
        shape = tuple(context.lowest.shape[1:])
        if context.stages > 1 and len(shape) != 3:
            raise HoldfastError(
                f"target synthesises images, and the samples of this stream have the shape {shape}, not (channels, "
                "height, width); use another method, such as fedntd"
            )
        smallest = self.samples // -(-self.samples // self.batch_size)
        if context.stages > 1 and smallest * _quarter(shape) < 2:
            raise HoldfastError(
                f"target with samples={self.samples} and batch_size={self.batch_size} makes a batch of one image, "
                "which its generator cannot normalise for images of this size; use a larger batch_size"
            )
        return self

    # The server half -----------------------------------------------------------------------------------

    def init_server_state(self, context: RunContext) -> Tree:
        """The last stage, and the classes that participants have had."""
        if context.stages == 1:
            return {}
        seen = torch.zeros(context.num_classes, dtype=torch.bool, device=context.device)
        return {"stage": torch.tensor(-1), "seen": seen}

    def begin_round(self, server: Server, context: RunContext) -> Tree:
        """Synthesise images if the stage has changed."""
        state = server.state
        if not state or int(state["stage"]) == server.stage:
            return state
        state = state | {"stage": torch.tensor(server.stage)}
        if not state["seen"].any():
            return state
        images = _Synthesis(self, server, context).images()
        logits = context.forward(server.params, server.buffers, _inputs(images, context)).logits
        return state | {"replay": {"images": images, "logits": logits, "old": state["seen"]}}

    def broadcast(self, server: Server) -> Tree:
        """The synthetic images, the teacher's logits on them, and O."""
        replay: Tree = server.state.get("replay", {})
        return replay

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        if not server.state:
            return {}
        return server.state | {"seen": server.state["seen"] | (sums["classes"] > 0)}

    # The client half -----------------------------------------------------------------------------------

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The payload, the order in which the client visits the images, and the classes of its cross-entropy."""
        if not payload:
            return {}
        context = client.context
        order = client.generator("synthetic order").permutation(len(payload["images"]))
        return payload | {
            "order": torch.from_numpy(order).to(context.device),
            "classes": ~payload["old"] | client.owned,
            "lowest": context.lowest,
            "range": context.highest - context.lowest,
        }

    def extra_inputs(self, carry: Tree) -> Tensor | None:
        """The synthetic images of this step."""
        if not carry:
            return None
        images = carry["images"][carry["order"][: self.replay]]
        return _scaled(images.to(carry["range"].dtype) / 255, carry["lowest"], carry["range"])

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        if not carry:
            return super().task_loss(out, batch, carry)
        return batch.mean(cross_entropy(torch.where(carry["classes"], out.logits, EXCLUDED), batch.y))

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """λ times the distillation."""
        if not carry or out.extra is None:
            return None
        teacher = carry["logits"][carry["order"][: self.replay]]
        p, q = (
            F.log_softmax(torch.where(carry["old"], z / self.tau, EXCLUDED), dim=-1)
            for z in (teacher, out.extra.logits)
        )
        return self.lam * kl_divergence(p, q).mean()

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """The next images."""
        return params, carry | {"order": carry["order"].roll(-self.replay)} if carry else carry

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        if client.context.stages == 1:
            return {}, {}
        return {"classes": client.owned.to(client.context.dtype)}, {}


# Synthesis --------------------------------------------------------------------------------------------


class _Model(NamedTuple):
    params: Tensors
    buffers: Tensors


class _Synthesis:
    """The synthesis of one stage's images: the teacher, the student and the generator."""

    def __init__(self, options: TARGET, server: Server, context: RunContext) -> None:
        self.options, self.context, self.round = options, context, server.round
        self.classes = server.state["seen"].nonzero().flatten()  # O
        self.shape = tuple(context.lowest.shape[1:])
        self.teacher = _copy(server.params, server.buffers)
        self.student = self._new_student()
        self.generator = self._new_generator()
        rate = options.generator_lr * options.generator_steps
        self.adam = torch.optim.Adam(self.generator.values(), rate, betas=BETAS)
        self.sgd = torch.optim.SGD(
            self.student.params.values(), STUDENT_LR, STUDENT_MOMENTUM, weight_decay=STUDENT_DECAY
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.sgd, STUDENT_PERIOD, STUDENT_MIN_LR)
        self.earlier: list[tuple[Tensor, Tensor]] = []  # the averages of m_l and s²_l over the batches so far

    def images(self) -> Tensor:
        """The synthetic images, uint8 ``[samples, ...]``."""
        options, made, logits = self.options, [], []  # type: TARGET, list[Tensor], list[Tensor]
        count = -(-options.samples // options.batch_size)
        # The student after the last batch would not be used.
        trains_student = range(options.warmup + 1, count) if options.student_steps else ()
        for number, rows in enumerate(np.array_split(np.arange(options.samples), count), 1):
            made.append(self._batch(len(rows), number))
            if number in trains_student:
                new = (_inputs(images, self.context) for images in made[len(logits) :])
                logits += [self.context.forward(*self.teacher, x).logits[:, self.classes] for x in new]
                self._train_student(torch.cat(made), torch.cat(logits), number)
        return torch.cat(made)

    def _batch(self, size: int, number: int) -> Tensor:
        """Batch ``number`` (from 1) of the images, after which the generator takes its step."""
        options, rng = self.options, self.context.generator("synthetic images", self.round, number)
        noise = self._tensor(rng.standard_normal((size, NOISE))).requires_grad_()
        labels = torch.from_numpy(rng.integers(len(self.classes), size=size)).to(self.context.device)
        copy = {k: w.detach().clone().requires_grad_() for k, w in self.generator.items()}
        groups: list[dict[str, Any]] = [
            {"params": list(copy.values())},
            {"params": [noise], "lr": options.noise_lr},
        ]
        adam = torch.optim.Adam(groups, options.generator_lr, betas=BETAS)
        total = [torch.zeros_like(w) for w in copy.values()]
        best, smallest = None, math.inf  # type: Tensor | None, float
        for _ in range(options.generator_steps):
            images = _generated(copy, noise, self.shape)
            loss, statistics = self._loss(images, labels, number)
            if best is None or loss.item() < smallest:
                best, smallest = images.detach(), loss.item()
            gradients = torch.autograd.grad(loss, [*copy.values(), noise])
            for tensor, gradient in zip([*copy.values(), noise], gradients, strict=True):
                tensor.grad = gradient
            torch._foreach_add_(total, gradients[:-1])
            adam.step()
        self.earlier = [(m.detach(), s.detach()) for m, s in statistics]
        for weights, gradient in zip(self.generator.values(), total, strict=True):
            weights.grad = gradient
        self.adam.step()
        assert best is not None
        return (best * 255).to(torch.uint8)

    def _loss(
        self, images: Tensor, labels: Tensor, number: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The generator's loss and the averages m_l and s²_l; ``images`` are in [0, 1], ``labels`` indices in O."""
        options, context = self.options, self.context
        x = _scaled(images, context.lowest, context.highest - context.lowest)
        with _observed(context.network) as observed:
            teacher = self._logits(self.teacher, x)
        averages = [(m, s) for _, _, m, s in observed]
        if self.earlier:
            keep = options.bn_momentum
            averages = [
                (keep * m0 + (1 - keep) * m, keep * s0 + (1 - keep) * s)
                for (m0, s0), (m, s) in zip(self.earlier, averages, strict=True)
            ]
        loss = options.ce * F.cross_entropy(teacher, labels)
        for (mean, var, _, _), (m, s) in zip(observed, averages, strict=True):
            loss = loss + options.bn * (
                torch.linalg.vector_norm(var - s) + torch.linalg.vector_norm(mean - m)
            )
        if number >= options.warmup:
            student = self._logits(self.student, x)
            agrees = (student.argmax(-1) == teacher.argmax(-1)).to(student.dtype)
            loss = loss - options.adversarial * (agrees * _divergence(teacher, student)).mean()
        return loss, averages

    def _train_student(self, images: Tensor, teacher: Tensor, number: int) -> None:
        """Distil the teacher's logits on the images so far into the student."""
        options, context = self.options, self.context
        rng = context.generator("synthetic batches", self.round, number)
        batches = shuffled_batches(rng, len(images), options.batch_size, options.student_steps)
        params, tau = self.student.params, options.student_tau
        for rows in islice(batches, options.student_steps):
            chosen = rows.to(context.device)
            context.network.seed_dropout(torch.tensor(int(rng.integers(2**32)), device=context.device))
            student = self._logits(self.student, _inputs(images[chosen], context), train=True)
            loss = tau**2 * _divergence(teacher[chosen], student, tau).mean()
            gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
            for weights, gradient in zip(params.values(), gradients, strict=True):
                weights.grad = gradient
            self.sgd.step()
        self.schedule.step()

    def _logits(self, model: _Model, x: Tensor, train: bool = False) -> Tensor:
        """A model's logits of the classes of O."""
        network = self.context.network
        return network.apply(*model, network.to_fast_layout(x), train).logits[:, self.classes]

    def _new_student(self) -> _Model:
        """A copy of the teacher with random convolutions, linear layers and BatchNorm's weights."""
        rng = self.context.generator("student weights", self.round)
        params, buffers = _copy(*self.teacher)
        for layer, module in self.context.network.net.named_modules():
            weight, bias = (f"{layer}.{name}" if layer else name for name in ("weight", "bias"))
            random = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
            if random and weight in params:
                params[weight] = self._tensor(_xavier_normal(rng, params[weight].shape))
            if random and bias in params:
                params[bias] = self._tensor(rng.standard_normal(params[bias].shape))
            if isinstance(module, NORMS) and weight in params:
                params[weight] = self._tensor(1 + 0.02 * rng.standard_normal(params[weight].shape))
            if isinstance(module, NORMS) and bias in params:
                params[bias] = torch.zeros_like(params[bias])
        return _Model({k: p.requires_grad_() for k, p in params.items()}, buffers)

    def _new_generator(self) -> Tensors:
        """The generator's weights, drawn as PyTorch initialises them."""
        rng = self.context.generator("generator weights", self.round)
        channels, quarter = self.shape[0], _quarter(self.shape)
        shapes = {
            "linear.weight": (2 * WIDTH * quarter, NOISE), "linear.bias": (2 * WIDTH * quarter, NOISE),
            "conv1.weight": (2 * WIDTH, 2 * WIDTH, 3, 3), "conv2.weight": (WIDTH, 2 * WIDTH, 3, 3),
            "conv3.weight": (channels, WIDTH, 3, 3), "conv3.bias": (channels, WIDTH, 3, 3),
        }  # fmt: skip
        weights = {}
        for name, shape in shapes.items():
            bound = math.prod(shape[1:]) ** -0.5
            weights[name] = self._tensor(rng.uniform(-bound, bound, shape[:1] if "bias" in name else shape))
        for layer, size in (("norm0", 2 * WIDTH), ("norm1", 2 * WIDTH), ("norm2", WIDTH)):
            weights |= {
                f"{layer}.weight": self._tensor(np.ones(size)), f"{layer}.bias": self._tensor(np.zeros(size))
            }  # fmt: skip
        return weights

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.context.device, self.context.dtype)


def _quarter(shape: Sequence[int]) -> int:
    """The pixels of the generator's first feature map, a quarter of the image in height and width, rounded up."""
    _, height, width = shape
    return -(-height // 4) * -(-width // 4)


def _generated(weights: Tensors, noise: Tensor, shape: Sequence[int]) -> Tensor:
    """Images with values in [0, 1] ``[B, *shape]`` from noise ``[B, NOISE]``."""

    def normalised(x: Tensor, layer: str) -> Tensor:
        return F.batch_norm(x, None, None, weights[f"{layer}.weight"], weights[f"{layer}.bias"], True)

    _, height, width = shape
    x = F.linear(noise, weights["linear.weight"], weights["linear.bias"])
    x = x.view(len(noise), 2 * WIDTH, -(-height // 4), -(-width // 4))
    x = F.interpolate(normalised(x, "norm0"), scale_factor=2)
    x = F.leaky_relu(normalised(F.conv2d(x, weights["conv1.weight"], padding=1), "norm1"), 0.2)
    x = F.interpolate(x, scale_factor=2)
    x = F.leaky_relu(normalised(F.conv2d(x, weights["conv2.weight"], padding=1), "norm2"), 0.2)
    x = F.conv2d(x, weights["conv3.weight"], weights["conv3.bias"], padding=1)
    return x.sigmoid()[..., :height, :width]


@contextmanager
def _observed(network: Network) -> Iterator[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """μ_l, σ²_l, m_l and s²_l of every BatchNorm layer that is applied in this context."""
    found = []

    def observe(norm: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        mean, var = (getattr(norm, name, None) for name in ("running_mean", "running_var"))
        if isinstance(mean, Tensor) and isinstance(var, Tensor):
            x = inputs[0]
            axes = [0, *range(2, x.dim())]
            found.append((mean, var, x.mean(axes), x.var(axes, correction=0)))

    hooks = [m.register_forward_hook(observe) for m in network.net.modules() if isinstance(m, NORMS)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _divergence(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """KL of the softmax at temperature τ, for each sample: ``[B]``."""
    return kl_divergence(F.log_softmax(teacher / tau, dim=-1), F.log_softmax(student / tau, dim=-1))


def _inputs(images: Tensor, context: RunContext) -> Tensor:
    """The model's inputs for 8-bit images."""
    return _scaled(images.to(context.dtype) / 255, context.lowest, context.highest - context.lowest)


def _scaled(images: Tensor, lowest: Tensor, span: Tensor) -> Tensor:
    """The model's inputs for images with values in [0, 1]."""
    return lowest + span * images


def _xavier_normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Normal weights with variance 2 / (fan in + fan out)."""
    fans = (shape[0] + shape[1]) * math.prod(shape[2:])
    return rng.standard_normal(shape) * math.sqrt(2 / fans)


def _copy(params: Tensors, buffers: Tensors) -> _Model:
    return _Model({k: p.clone() for k, p in params.items()}, {k: b.clone() for k, b in buffers.items()})
