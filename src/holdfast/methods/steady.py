"""Steady: the library's recipe for label skew and fluctuation between rounds, without hyper-parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.methods.balanced import Balanced
from holdfast.methods.base import Batch, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.ema import EMA
from holdfast.methods.fedavgm import FedAvgM
from holdfast.models.network import Output

LOSS = Balanced(tau=0.25)
MOMENTUM = FedAvgM(beta=0.7)
MEAN = EMA(beta=0.9)


@dataclass(frozen=True)
class Steady(Method):
    """A logit-adjusted local loss, server momentum and a running mean of the global model, with fixed strengths.

    The same arithmetic as `balanced:tau=0.25+fedavgm:beta=0.7+ema:beta=0.9`; other methods can be added to it as to any
    other, as in `steady+ccvr`.

    Local: CE(z + ¼ log π_k, y), π_k the client's class frequencies, at least 1e-8.
    Server: Δ = w^{t-1} - mean;  v ← 0.7 v + Δ;  w^t = w^{t-1} - v.
    Tested, and the final model: m^t = Σ_s 0.9^{t-s} w^s / Σ_s 0.9^{t-s}.
    This library; chosen by a search with a rule that was specified in advance (docs/recipe.md).
    """

    name: ClassVar[str] = "steady"
    card: ClassVar[Card] = Card(
        when="the best method is unknown: few clients take part in a round, clients hold different classes, "
        "and tuning is not possible",
        server="keeps a velocity and a mean of the model's size",
    )
    needs_classes: ClassVar[bool] = True

    def init_server_state(self, context: RunContext) -> Tree:
        return {"momentum": MOMENTUM.init_server_state(context), "mean": MEAN.init_server_state(context)}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        return LOSS.client_init(payload, state, client)

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(z + ¼ log π_k, y)."""
        return LOSS.task_loss(out, batch, carry)

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = w^{t-1} - v."""
        params, momentum = MOMENTUM.aggregate(_of_part(server, "momentum"), mean, sums, context)
        return params, server.state | {"momentum": momentum}

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """m^t."""
        refined = MEAN.refine(_of_part(server, "mean"), uploads, context)
        return Server(server.params, server.buffers, server.state | {"mean": refined.state}, server.round)

    def eval_params(self, server: Server) -> Tensors:
        """m^t, with its buffers."""
        return MEAN.eval_params(_of_part(server, "mean"))


def _of_part(server: Server, part: str) -> Server:
    """The server with only one part's state."""
    return Server(server.params, server.buffers, server.state[part], server.round)
