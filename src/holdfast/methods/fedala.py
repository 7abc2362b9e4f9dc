"""FedALA: each client learns element-wise weights for the mixture of its model and the global model."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from holdfast.core.spec import NonNegative, PositiveCount, PositiveFraction
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client

MAX_PASSES = 100  # limit on passes of the first learning of W, whose loss may not converge


@dataclass(frozen=True)
class FedALA(Method):
    """Adaptive local aggregation before each client's training.

    ŵ = w_old + (w^{t-1} - w_old) ∘ W for the top ``top`` parameter tensors, w_old the client's last trained
    model; the other tensors are those of w^{t-1}. W starts at 1 and is learnt on a random share s of the
    client's samples: for each batch W ← clip(W - η ∂CE/∂ŵ ∘ (w^{t-1} - w_old), 0, 1). The first time,
    passes are repeated (more than 10) until the final losses of the last 10 have a standard deviation below 0.1;
    afterwards there is one pass a round. Training starts from ŵ. If w_old equals w^{t-1}, as in round 1, W is not
    learnt.
    Server: as FedAvg.
    Zhang et al., AAAI 2023; defaults from PFLlib (2 tensors: the classifier's weight and bias).
    """

    name: ClassVar[str] = "fedala"
    card: ClassVar[Card] = Card(
        when="every client needs a personal model, close to the global one",
        client="a forward and backward pass over 80 % of its samples each round, backward only through the mixed "
        "layers; 11 to 100 passes the first time",
    )

    top: PositiveCount = 2  # p: how many of the last parameter tensors are mixed
    sampled: PositiveFraction = 0.8  # s: share of the client's samples for learning W
    eta: NonNegative = 1.0  # η: learning rate of W

    def init_client_state(self, client: Client) -> Tree:
        """w_old is the run's initial model, W = 1, and W has not been learnt."""
        old = self._top(client.context.network.params, client)
        ones = {k: torch.ones_like(p) for k, p in old.items()}
        return {"old": old, "weights": ones, "learnt": client.context.scalar(0)}

    def _top(self, params: Tensors, client: Client) -> Tensors:
        """The tensors to mix."""
        return {name: params[name] for name in list(client.context.network.params)[-self.top :]}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """ŵ, after learning W."""
        old, weights, learnt = state["old"], state["weights"], state["learnt"]
        if any(not torch.equal(params[k], p) for k, p in old.items()):
            weights = self._learn(params, old, weights, client, once=bool(learnt))
            learnt = torch.ones_like(learnt)
        client.notes[self.name] = {"weights": weights, "learnt": learnt}
        return _mixed(params, old, weights)

    def _learn(self, sent: Tensors, old: Tensors, weights: Tensors, client: Client, once: bool) -> Tensors:
        """W after one pass over the sampled share (``once``), or after passes until the loss converges."""
        context = client.context
        order = client.generator("aggregation samples").permutation(client.samples)
        chosen = torch.from_numpy(order[: max(1, int(self.sampled * client.samples))]).to(context.device)
        losses: list[float] = []
        while len(losses) < (1 if once else MAX_PASSES):
            for rows in torch.split(chosen, context.batch_size):
                mixed = _mixed(sent, old, weights)
                leaves = {k: mixed[k].requires_grad_() for k in old}
                with torch.enable_grad():
                    logits = context.network.apply(mixed, client.buffers, client.x[rows]).logits
                    loss = context.task.batch_loss(logits, client.y[rows])
                grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                weights = {
                    k: (weights[k] - self.eta * grad * (sent[k] - old[k])).clamp(0, 1)
                    for k, grad in zip(leaves, grads, strict=True)
                }
            losses.append(loss.item())
            if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
                break
        return weights

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"old": self._top(params, client), **client.notes[self.name]}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """ŵ, with the weights that were learnt last."""
        return _mixed(server.params, state["old"], state["weights"])


def _mixed(sent: Tensors, old: Tensors, weights: Tensors) -> Tensors:
    """ŵ."""
    return sent | {k: torch.lerp(p, sent[k], weights[k]) for k, p in old.items()}
