"""The interface of a method: a client half and a server half, pure functions on tensors, the same on every engine.

One round, with the hooks in the order in which they are called::

    server                                          each sampled client k
    ------                                          ---------------------
    begin_round                                     (server-side learning before a stage of a stream)
    broadcast, broadcast_to --- payload, w ------>  initial_params       initial weights (default: w)
                                                    client_init          the carry of the local steps
                                                    tables, teachers     values for each sample
                                                    +-- each step: perturb -> task_loss + loss ->
                                                    |              edit_gradient, proximal_mu -> SGD ->
                                                    |              after_step
                                                    +-- each epoch: after_epoch
    aggregate, update <-- upload_params, sums ----  client_final         what it uploads, its new state
    refine                                          (server-side learning: public data, ensembles)

Hooks inside the step (``task_loss``, ``loss``, ``ascent_loss``, ``perturb``, ``edit_gradient``, ``after_step``,
``after_epoch``) run for many clients at once under ``torch.func.vmap`` and inside CUDA graphs: no branch on a tensor's
value, no in-place change of an argument, static shapes. All other hooks run for one client, or once on the server, as
ordinary PyTorch code. ``proximal_mu`` and ``learning_rate`` return plain numbers that hold for all clients.

Batches are padded only for methods that exclude padding: the built-in methods, and classes that declare ``uses_mask``.
For all others ``batch.mask`` is None, so that a loss in plain PyTorch on ``out.logits`` and ``batch.y`` is correct on
every engine. ``uses_mask`` makes steps faster in which clients have batches of different sizes.

Payloads, carries, states and sums are dictionaries of tensors, nested where that is clearer. What clients upload
besides their weights is **summed** over clients before a method receives it: the server receives no single upload
unless the method sets ``keeps_uploads``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import validate_fields
from holdfast.core.trees import Tensors as Tensors
from holdfast.core.trees import Tree as Tree
from holdfast.methods.card import Card
from holdfast.methods.guard import guard_hooks
from holdfast.models.network import Output
from holdfast.tasks.base import Task
from holdfast.tasks.classes import Multiclass

if TYPE_CHECKING:
    from holdfast.methods.context import Client, RunContext


@dataclass
class Batch:
    """One mini-batch of one client.

    ``mask`` is 1 for real samples and 0 for padding, or None without padding, as always unless the method has
    ``uses_mask``. ``teacher[name]`` holds a frozen model's outputs for these samples, ``table[name]`` their rows of the
    arrays from ``Method.tables``.
    """

    x: Tensor  # [B, ...] the model's input
    y: Tensor  # [B, ...] targets: int64 labels [B] for a multiclass task
    epoch: Tensor  # scalar: the local epoch, from 0
    mask: Tensor | None = None
    teacher: Mapping[str, Output] = field(default_factory=dict)
    table: Mapping[str, Tensor] = field(default_factory=dict)
    task: Task = field(default_factory=Multiclass)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the real samples of one value per sample, ``[B]``."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)

    def members(self, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One-hot labels ``[B, C]``, zero rows for padding; in the dtype of ``x``, or ``dtype`` if that is integer."""
        classes = torch.arange(num_classes, device=self.y.device)
        member = self.y.unsqueeze(-1) == classes
        member = member.to(self.x.dtype if self.x.is_floating_point() else dtype)
        return member if self.mask is None else member * self.mask.unsqueeze(-1)


@dataclass
class Local:
    """The weights in a term of the objective: the local ``params`` (w) and the ``global_params`` (w^{t-1})."""

    params: Tensors
    global_params: Tensors


class Trainer(Protocol):
    """An engine's interface for a method that replaces the whole step."""

    lr: float

    def forward(self, params: Tensors, x: Tensor) -> Output:
        """The model's outputs in training mode, differentiable in ``params`` and ``x``."""

    def gradient(self, objective: Callable[[Tensors], Tensor], params: Tensors) -> tuple[Tensors, Tensor]:
        """The gradient of ``objective`` at ``params``, and its value."""


@dataclass
class Upload:
    """One client's upload, for a method with ``keeps_uploads``."""

    client: int
    weight: float
    params: Tensors
    buffers: Tensors
    sums: Tree


@dataclass
class Server:
    """The server's state: the global model and the method's own state."""

    params: Tensors
    buffers: Tensors
    state: Tree
    round: int = 0  # the round in progress, from 1
    final: bool = False  # whether ``params`` and ``buffers`` are what `Method.finalize` returned
    stage: int = 0  # the round's stage, for streams; 0 otherwise. Set for `Method.begin_round`


@dataclass(frozen=True)
class Method:
    """A federated method; the hooks' defaults are FedAvg. Its fields are its hyper-parameters.

    The default ``name`` is the class's name.
    """

    name: ClassVar[str] = "Method"
    card: ClassVar[Card] = Card()
    teachers: ClassVar[tuple[str, ...]] = ()
    """Frozen models whose outputs the loss reads: ``global``, ``previous``."""
    keeps_uploads: ClassVar[bool] = False
    """Whether the server receives every single upload, not only their sum."""
    ascends: ClassVar[bool] = True
    """Whether ``perturb``, if overridden, needs a gradient; each step then has a second pass."""
    needs_public: ClassVar[bool] = False
    """Whether the server trains on public data."""
    needs_classes: ClassVar[bool] = False
    """Whether it needs a multiclass task: labels ``batch.y`` and one logit for each class."""
    needs_features: ClassVar[bool] = False
    """Whether it reads the features or the classifier, and so needs a model that ends in a Linear layer."""
    holdout: ClassVar[float] = 0.0
    """The share of a client's samples that is excluded from training, as ``client.heldout``."""
    compares_samples: ClassVar[bool] = False
    """Whether its loss compares the samples of a batch, so that it is not a mean over samples."""
    assumes_sgd: ClassVar[str] = ""
    """Why the method requires local SGD with a constant learning rate per round; part of the error for other runs."""
    uses_mask: ClassVar[bool] = False
    """Whether the hooks of this class exclude padding by ``batch.mask``, ``batch.mean`` or ``batch.members``; the
    vectorized engine may then pad batches. Subclasses must declare it again."""

    def __init_subclass__(cls) -> None:
        if not cls.__dict__.get("name"):
            cls.name = cls.__name__
        if isinstance(cls.name, str) and set(cls.name) & set("+:/"):
            raise HoldfastError(f"the name of {cls.__name__} is '{cls.name}'; it must not contain +, : or /")
        if not _is_builtin(cls):
            guard_hooks(cls)

    def __post_init__(self) -> None:
        validate_fields(self, self.name)
        self.check()

    def __add__(self, other: Method) -> Method:
        """Both methods as a stack, as ``fedntd+fedprox`` on the command line."""
        from holdfast.methods.stack import Stack

        return Stack(self, other)

    def check(self) -> None:
        """Raise an error for hyper-parameters that contradict each other; annotations define types and ranges."""

    def describe(self) -> dict[str, Any]:
        """The name and the hyper-parameters as plain values."""
        return {"name": self.name} | {f.name: getattr(self, f.name) for f in fields(self)}

    # Server: initial state and broadcast ----------------------------------------------------------------

    def init_server_state(self, context: RunContext) -> Tree:
        """The method's server state before round 1."""
        return {}

    def begin_round(self, server: Server, context: RunContext) -> Tree:
        """The server state at the beginning of a round, which trains ``server.stage``."""
        return server.state

    def broadcast(self, server: Server) -> Tree:
        """The payload for every client of the round, besides the global weights."""
        return {}

    def broadcast_to(self, server: Server, client: int) -> Tree:
        """The additional payload for this client alone."""
        return {}

    # The client half -----------------------------------------------------------------------------------

    def init_client_state(self, client: Client) -> Tree:
        """A client's state before it first takes part."""
        return {}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The initial weights of local training; ``params`` are the received ones."""
        return params

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The carry of the local steps; its shapes are the same for every client."""
        return {}

    def tables(self, payload: Tree, state: Tree, client: Client) -> Tensors:
        """Per-sample arrays ``[n, ...]`` in the order of ``client.x``; ``batch.table`` holds a batch's rows."""
        return {}

    def teacher(self, name: str, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The weights of a declared teacher, and its buffers if they differ from the broadcast ones."""
        return client.global_params

    def extra_inputs(self, carry: Tree) -> Tensor | None:
        """Inputs ``[E, ...]`` that pass through the model with every batch; their outputs are ``out.extra``."""
        return None

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """The loss of the learning task: cross-entropy for classes."""
        return batch.task.batch_loss(out.logits, batch.y, batch.mask)

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """The method's own term, added to ``task_loss``; None for none."""
        return None

    def ascent_loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """The loss whose gradient ``perturb`` receives; None for the loss of the step."""
        return None

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """The weights at which the step's gradient is computed, and the carry.

        ``grads`` is the gradient of ``ascent_loss`` at ``local.params``, empty if the method does not ``ascend``. The
        optimiser then updates ``local.params``; all other hooks of the step except the losses receive these. Only the
        first pass updates buffers.
        """
        return local.params, carry

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """The gradient for the optimiser; terms on the weights alone are added here, as their gradient."""
        return grads

    def proximal_mu(self) -> float:
        """μ of a proximal term (μ/2) ‖w - w^{t-1}‖²: μ (w - w^{t-1}) is added to the gradient."""
        return 0.0

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float | None:
        """A parameter's own learning rate in a local epoch (from 0): None for the default, 0 to freeze it."""
        return None

    def step(
        self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local
    ) -> Tensors | tuple[Tensors, Tree] | None:
        """The weights after a local step, for a method that replaces the whole step.

        Returns the carry too if the step changes it; None for the default step.
        """
        return None

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """Weights and carry after the optimiser's step; ``out`` are the outputs from which the loss was computed."""
        return params, carry

    def after_epoch(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        """Weights and carry after each local epoch."""
        return params, carry

    def resets_optimizer(self, epoch: int, context: RunContext) -> bool:
        """Whether the optimiser's momentum and moments are reset after this local epoch (from 0)."""
        return False

    def upload_params(self, params: Tensors, carry: Tree, client: Client) -> Tensors:
        """The tensors to upload in place of the trained weights."""
        return params

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Further tensors to upload, which are summed over clients, and the client's new state."""
        return {}, {}

    def is_shared(self, name: str, context: RunContext) -> bool:
        """Whether this parameter is exchanged; other parameters are private to each client."""
        return True

    def client_weight(self, client: Client) -> float:
        """The client's weight in the mean of the models."""
        return float(client.samples)

    # The server half -----------------------------------------------------------------------------------

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """The new global parameters and the server state; ``mean`` is the weighted mean of the uploads."""
        return mean, server.state

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """The server state after the round; ``server.params`` are already aggregated."""
        return server.state

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """Server-side learning after the aggregation."""
        return server

    # Evaluation ------------------------------------------------------------------------------------

    def eval_params(self, server: Server) -> Tensors:
        """The parameters that are evaluated as the global model, and its buffers if they are not the server's."""
        return server.params

    def global_logits(self, out: Output, server: Server) -> Tensor:
        """The global model's scores, such as logits ``[B, C]``, from its outputs."""
        return out.logits

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """A client's scores, such as logits ``[B, C]``, from its trained model's outputs and its state."""
        return out.logits

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """The parameters of a client's own model after training, from the final server and the client's state."""
        return server.params

    def prototype_logits(self, out: Output, server: Server) -> Tensor:
        """Scores ``[B, C]`` by distance to the federation's class prototypes; the classifier's without prototypes."""
        return out.logits

    # After the last round ------------------------------------------------------------------------------

    def final_statistics(self, params: Tensors, client: Client) -> Tree | None:
        """Statistics of a client's data under the final model, which are summed over clients; None for none."""
        return None

    def finalize(self, server: Server, sums: Tree, context: RunContext) -> Server:
        """The final model from these sums; ``server`` has the model of ``eval_params``."""
        return server

    # Composition ---------------------------------------------------------------------------------------

    def overrides(self, hook: str) -> bool:
        """Whether this method defines a hook itself."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    def prepare(self, context: RunContext) -> Self:
        """Validation against the run before training: raises if the method cannot run on it."""
        return self


def weights_and_carry(stepped: Tensors | tuple[Tensors, Tree], carry: Tree) -> tuple[Tensors, Tree]:
    """The result of ``step`` as a pair, with the previous carry if it returned weights only."""
    return stepped if isinstance(stepped, tuple) else (stepped, carry)


def check_task(method: Method, context: RunContext) -> None:
    """Raise an error if a method needs classes, features or a classifier that the task or the model lacks."""
    parts = getattr(method, "parts", (method,))
    if context.task.changes_loss and context.task.own_loss is not None:
        raise HoldfastError(
            "class_weights and label_smoothing cannot be combined with loss, because both change the task's "
            "loss; leave one of them out"
        )
    for part in parts:
        if context.task.changes_loss and (part.overrides("task_loss") or part.overrides("step")):
            raise HoldfastError(
                f"{part.name} replaces the task's loss, so class_weights and label_smoothing would have no effect; "
                "leave them out, or use another method"
            )
        if part.needs_classes and context.task.name != "multiclass":
            raise HoldfastError(
                f"{part.name} needs classes, with one model output per class, but the task is "
                f"'{context.task.name}'; use a method without this requirement, such as fedavg, fedprox, scaffold "
                "or feddyn, or task='multiclass'"
            )
        if part.needs_features and not context.network.has_head:
            raise HoldfastError(
                f"{part.name} reads the features of the model, the inputs of its last torch.nn.Linear layer, but "
                "this model does not end in such a layer; add one, or use a method such as fedavg or fedprox"
            )


def own_classes(kind: type[Method]) -> list[type[Method]]:
    """The classes among a method's bases, itself included, that are not part of Holdfast."""
    return [base for base in kind.__mro__ if issubclass(base, Method) and not _is_builtin(base)]


def _is_builtin(kind: type) -> bool:
    return kind.__module__.startswith("holdfast.methods.")


def check_public(method: Method, context: RunContext) -> None:
    """Raise an error if a method needs public data and there is none."""
    if method.needs_public and len(context.public_y) == 0:
        raise HoldfastError(
            f"{method.name} trains on the server with a public set, but this federation has none; add one with "
            "federate(..., public=0.025) or --public 0.025"
        )
