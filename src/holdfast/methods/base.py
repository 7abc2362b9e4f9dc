"""What a method is: a client half and a server half, pure functions on tensors, the same for every engine.

One round, with the hooks in the order in which they are called::

    server                                      each sampled client k
    ------                                      ---------------------
    down, down_to       --- payload, w ------>  start                where training starts (default: w)
                                                begin                what the client carries through its steps
                                                tables, teachers     what it looks up for each sample
                                                +-- each step: task_loss + loss -> edit_gradient, pull
                                                |              -> SGD -> after_step
                                                +-- each epoch: after_epoch
    aggregate, update   <-- share, sums ------  share, finish        what it sends, what it remembers
    refine                                      (server-side learning: public data, ensembles, calibration)

Hooks inside the step (``task_loss``, ``loss``, ``edit_gradient``, ``after_step``, ``after_epoch``)
run for many clients at once under ``torch.func.vmap`` and inside CUDA graphs: no branch on a tensor's value,
no in-place change of an argument, static shapes; what may be absent is a mask. All other hooks run for one
client, or once on the server, as ordinary PyTorch code; ``pull`` and ``rate``, which is asked for an epoch, are plain
numbers and hold for all clients alike.

Everything that travels or is remembered is a dictionary of tensors, nested where that reads better. What
clients upload besides their weights is **summed** over clients before a method sees it, so that a client is
never looked at alone unless the method says ``keeps_uploads``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import as_number
from holdfast.core.trees import Tensors as Tensors
from holdfast.core.trees import Tree as Tree
from holdfast.methods.functional import cross_entropy
from holdfast.models.network import Output

if TYPE_CHECKING:
    from holdfast.methods.context import Client, RunContext


@dataclass
class Batch:
    """One mini-batch of one client.

    ``mask`` is 1 for real samples and 0 for padding, or None where nothing is padded. ``teacher[name]`` holds a
    frozen model's outputs for these samples, ``table[name]`` rows of what ``Method.tables`` made.
    """

    x: Tensor  # [B, ...] the model's input
    y: Tensor  # [B] int64 labels
    epoch: Tensor  # scalar: the local epoch, from 0
    mask: Tensor | None = None
    teacher: Mapping[str, Output] = field(default_factory=dict)
    table: Mapping[str, Tensor] = field(default_factory=dict)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value a sample, ``[B]``, over the real samples."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)

    def members(self, num_classes: int) -> Tensor:
        """Which sample belongs to which class: ``[B, C]`` of 0 and 1, zero rows for padding."""
        classes = torch.arange(num_classes, device=self.y.device)
        member = (self.y.unsqueeze(-1) == classes).to(self.x.dtype)
        return member if self.mask is None else member * self.mask.unsqueeze(-1)


@dataclass
class Local:
    """The weights as a term of the objective sees them: ``params`` (w) and what the server sent (w^{t-1})."""

    params: Tensors
    sent: Tensors


class Trainer(Protocol):
    """What an engine offers a method that replaces the whole step."""

    lr: float

    def forward(self, params: Tensors, x: Tensor) -> Output:
        """The model's outputs in training mode, differentiable in ``params`` and ``x``."""

    def gradient(self, objective: Callable[[Tensors], Tensor], params: Tensors) -> tuple[Tensors, Tensor]:
        """The gradient of ``objective`` at ``params``, and its value."""


@dataclass
class Upload:
    """One client's contribution, as a method with ``keeps_uploads`` sees it."""

    client: int
    weight: float
    params: Tensors
    buffers: Tensors
    sums: Tree


@dataclass
class Server:
    """What the server knows: the global model and the method's own state."""

    params: Tensors
    buffers: Tensors
    state: Tree
    round: int = 0  # the round in progress, from 1


@dataclass(frozen=True)
class Method:
    """A federated method; the hooks' defaults are FedAvg. Its fields are its hyper-parameters."""

    name: ClassVar[str] = ""
    teachers: ClassVar[
        tuple[str, ...]
    ] = ()  # frozen models whose outputs the loss reads: "global", "previous"
    keeps_uploads: ClassVar[bool] = False  # sees every upload by itself, not only their sum
    needs_public: ClassVar[bool] = False  # learns on the server from a public set
    holdout: ClassVar[float] = 0.0  # share of a client's samples kept out of its training, as client.heldout

    def __post_init__(self) -> None:
        numbers = {"bool": bool, "int": int, "float": float}
        for f in fields(self):
            kind = numbers.get(f.type if isinstance(f.type, str) else getattr(f.type, "__name__", ""))
            if kind is not None:
                as_number(f"{self.name}: {f.name}", getattr(self, f.name), kind)
        self.check()

    def check(self) -> None:
        """Refuse hyper-parameters out of range."""

    def require(self, **conditions: tuple[bool, str]) -> None:
        """Raise for the first field whose condition is false: ``require(beta=(self.beta >= 0, "at least 0"))``."""
        for name, (holds, right) in conditions.items():
            if not holds:
                value = getattr(self, name)
                raise HoldfastError(f"{self.name}: {name} is {value!r}; it must be {right}")

    def describe(self) -> dict[str, Any]:
        """Name and hyper-parameters as plain values."""
        name = self.name or type(self).__name__
        return {"name": name} | {f.name: getattr(self, f.name) for f in fields(self)}

    # The server's first and last word ------------------------------------------------------------------

    def init_server_state(self, context: RunContext) -> Tree:
        """The server's own state before round 1."""
        return {}

    def broadcast(self, server: Server) -> Tree:
        """What every client of this round receives besides the global weights."""
        return {}

    def broadcast_to(self, server: Server, client: int) -> Tree:
        """What this client alone receives besides that."""
        return {}

    # The client half -----------------------------------------------------------------------------------

    def init_client_state(self, client: Client) -> Tree:
        """What a client remembers before it first takes part."""
        return {}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The weights at which local training starts; ``params`` are the received ones."""
        return params

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """What the client carries through its steps; every client's carry has the same shapes."""
        return {}

    def tables(self, payload: Tree, state: Tree, client: Client) -> Tensors:
        """Per-sample values ``[n, ...]`` in the order of ``client.x``; a batch finds its rows in ``batch.table``."""
        return {}

    def teacher(self, name: str, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The weights of a declared teacher; with buffers among them where they are not those that were sent."""
        return client.sent

    def extra_inputs(self, carry: Tree) -> Tensor | None:
        """Inputs ``[E, ...]`` forwarded along with every batch; their outputs are ``out.extra``."""
        return None

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """The loss of the task itself: cross-entropy."""
        return batch.mean(cross_entropy(out.logits, batch.y))

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """The method's own term, added to the task's loss."""
        return None

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """The gradient the optimiser gets; terms on the weights alone go here, as their gradient."""
        return grads

    def proximal_mu(self) -> float:
        """μ, where every weight is pulled towards the one that was sent: μ (w - w^{t-1}) is added to its gradient."""
        return 0.0

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float | None:
        """This parameter's own learning rate in this local epoch, from 0: None for the usual one, 0 where it rests."""
        return None

    def step(
        self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local
    ) -> Tensors | None:
        """A whole step of a method that does not descend one loss; None for the usual step."""
        return None

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """Weights and carry after the optimiser's step; ``out`` is what the model said before it."""
        return params, carry

    def after_epoch(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        """Weights and carry after each local epoch."""
        return params, carry

    def upload_params(self, params: Tensors, carry: Tree, client: Client) -> Tensors:
        """What is sent in the place of the trained weights."""
        return params

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """What is sent besides (to be summed over clients), and what the client remembers."""
        return {}, {}

    def is_shared(self, name: str, context: RunContext) -> bool:
        """Whether this parameter is exchanged; one that is not stays with its client and is seen only in tests."""
        return True

    def client_weight(self, client: Client) -> float:
        """The client's weight in the mean of the models."""
        return float(client.samples)

    # The server half -----------------------------------------------------------------------------------

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """The new global parameters, and the server's state; ``mean`` is the weighted mean of what clients shared."""
        return mean, server.state

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """The server's own state after the round; ``server.params`` are already aggregated."""
        return server.state

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """Learning on the server after the aggregation."""
        return server

    # What is tested ------------------------------------------------------------------------------------

    def eval_params(self, server: Server) -> Tensors:
        """The parameters that are tested as the global model."""
        return server.params

    def global_logits(self, out: Output, server: Server) -> Tensor:
        """The global model's scores ``[B, C]`` from its outputs."""
        return out.logits

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """A client's own scores ``[B, C]`` from its trained model's outputs and its state."""
        return out.logits

    def prototype_logits(self, out: Output, server: Server) -> Tensor:
        """Scores ``[B, C]`` by how near the federation's class prototypes are; without any, the classifier's."""
        return out.logits

    # After the last round ------------------------------------------------------------------------------

    def final_statistics(self, params: Tensors, client: Client) -> Tree | None:
        """What every client computes with the final model, to be summed; None for nothing."""
        return None

    def finalize(self, server: Server, sums: Tree, context: RunContext) -> Server:
        """The final model from that."""
        return server

    # Composition ---------------------------------------------------------------------------------------

    def overrides(self, hook: str) -> bool:
        """Whether this method has its own version of a hook."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    def prepare(self, context: RunContext) -> Self:
        """Check against the task before training; a method that cannot run on it says so here."""
        return self


def check_public(method: Method, context: RunContext) -> None:
    """Refuse to start a method that learns from public data where there is none."""
    if method.needs_public and len(context.public_y) == 0:
        raise HoldfastError(
            f"{method.name} learns on the server from a public set and this federation has none; "
            "give one with federate(..., public=0.025) or --public 0.025"
        )
