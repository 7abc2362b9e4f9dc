"""FedALA: each client learns how much of the global model to take over."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from holdfast.core.spec import NonNegative, PositiveCount, PositiveFraction
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client

MOST_PASSES = 100  # bounds the first learning of the weights, should its loss never settle


@dataclass(frozen=True)
class FedALA(Method):
    """Adaptive local aggregation before each client's training.

    ŵ = w_old + (w^{t-1} - w_old) ∘ W for the top ``top`` parameter tensors, w_old the client's last trained
    model; the tensors below are those of w^{t-1}. W starts at 1 and is learnt on a random share s of the
    client's samples: for each batch W ← clip(W - η ∂CE/∂ŵ ∘ (w^{t-1} - w_old), 0, 1). The first time there
    are more than 10 passes, until the losses at the end of the last 10 deviate by less than 0.1; later one a
    round. Training starts from ŵ; where w_old is w^{t-1}, as in round 1, nothing is learnt.
    Server: as FedAvg.
    Zhang et al., AAAI 2023; defaults from PFLlib (2 tensors: the classifier's weight and bias).
    """

    name: ClassVar[str] = "fedala"
    card: ClassVar[Card] = Card(
        when="every client wants its own model, close to the global one",
        client="a pass over 80 % of its samples each round, backward through the mixed layers; 11 to 100 the "
        "first time",
    )

    top: PositiveCount = 2  # p: how many of the last parameter tensors are mixed
    sampled: PositiveFraction = 0.8  # s: share of the client's samples for learning W
    eta: NonNegative = 1.0  # η: rate of W

    def init_client_state(self, client: Client) -> Tree:
        """w_old is the run's initial model, W = 1, and W was never learnt."""
        old = self._top(client.context.network.params, client)
        ones = {k: torch.ones_like(p) for k, p in old.items()}
        return {"old": old, "weights": ones, "learnt": client.context.scalar(0)}

    def _top(self, params: Tensors, client: Client) -> Tensors:
        """The tensors that are mixed."""
        return {name: params[name] for name in list(client.context.network.params)[-self.top :]}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """Learn W and mix."""
        old, weights, learnt = state["old"], state["weights"], state["learnt"]
        if any(not torch.equal(params[k], p) for k, p in old.items()):
            weights = self._learn(params, old, weights, client, once=bool(learnt))
            learnt = torch.ones_like(learnt)
        client.notes[self.name] = {"weights": weights, "learnt": learnt}
        return _mixed(params, old, weights)

    def _learn(self, sent: Tensors, old: Tensors, weights: Tensors, client: Client, once: bool) -> Tensors:
        """W after one pass over the client's share of samples, or after as many as it takes."""
        context = client.context
        order = client.generator("aggregation samples").permutation(client.samples)
        chosen = torch.from_numpy(order[: max(1, int(self.sampled * client.samples))]).to(context.device)
        losses: list[float] = []
        while len(losses) < (1 if once else MOST_PASSES):
            for rows in torch.split(chosen, context.batch_size):
                mixed = _mixed(sent, old, weights)
                leaves = {k: mixed[k].requires_grad_() for k in old}
                with torch.enable_grad():
                    logits = context.network.apply(mixed, client.buffers, client.x[rows]).logits
                    loss = F.cross_entropy(logits, client.y[rows])
                slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                weights = {
                    k: (weights[k] - self.eta * slope * (sent[k] - old[k])).clamp(0, 1)
                    for k, slope in zip(leaves, slopes, strict=True)
                }
            losses.append(loss.item())
            if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
                break
        return weights

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Remember the trained model's top and W."""
        return {}, {"old": self._top(params, client), **client.notes[self.name]}


def _mixed(sent: Tensors, old: Tensors, weights: Tensors) -> Tensors:
    """ŵ."""
    return sent | {k: torch.lerp(p, sent[k], weights[k]) for k, p in old.items()}
