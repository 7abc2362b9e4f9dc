"""EMA: a running mean of the global model over the rounds, for testing and as the final model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import Momentum
from holdfast.methods.base import Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext


@dataclass(frozen=True)
class EMA(Method):
    """Exponential moving average of the global model; a part for other methods, as in `fedntd+ema`.

    Server, after every round: m^t = Σ_s β^{t-s} w^s / Σ_s β^{t-s} over the rounds s = 1 … t, of the parameters and
    of buffers such as BatchNorm's statistics; integer buffers are those of w^t. m^t is tested and is the final
    model; the initial model has no part in it. Clients train w^t, as without this part, so that training does not
    change; with ``start`` the next round begins at m^t instead of w^t.
    Averages of iterates: Polyak and Juditsky, 1992; with exponential weights and the correction of the first steps
    (the division by Σ β^{t-s}) as in Kingma and Ba, 2015, Sec. 7.2.

    If ``ema`` is the last part of a stack, the mean includes the other parts' changes of w^t. A final calibration,
    as in `ema+ccvr`, starts from m. Personal models, and the private models of streams, are trained from w^t and do
    not use m.
    """

    name: ClassVar[str] = "ema"
    card: ClassVar[Card] = Card(
        when="the accuracy of the global model changes from round to round with the clients that took part; over few "
        "rounds the mean lags behind by about β/(1 - β) rounds",
        server="keeps a mean of the model's size",
    )

    beta: Momentum = 0.9  # β: weight of the previous mean; 0 for no averaging
    start: bool = False  # whether the next round begins at the mean

    def init_server_state(self, context: RunContext) -> Tree:
        """m^0 = w^0, with a weight of 0."""
        network = context.network
        return {"mean": {**network.params, **network.buffers}, "weight": context.scalar(0)}

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """m^t = m^{t-1} + (1-β) / (1-β^t) (w^t - m^{t-1})."""
        weight = self.beta * server.state["weight"] + (1 - self.beta)
        share = (1 - self.beta) / weight
        now, before = {**server.params, **server.buffers}, server.state["mean"]
        mean = {
            k: torch.lerp(before[k], v, share.to(v.dtype)) if v.is_floating_point() else v
            for k, v in now.items()
        }
        params, buffers = server.params, server.buffers
        if self.start:
            params, buffers = {k: mean[k] for k in params}, {k: mean[k] for k in buffers}
        return Server(params, buffers, {"mean": mean, "weight": weight}, server.round)

    def eval_params(self, server: Server) -> Tensors:
        """m^t, with its buffers."""
        mean: Tensors = server.state["mean"]
        return mean
