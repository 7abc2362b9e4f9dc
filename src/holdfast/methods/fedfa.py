"""FedFA: shared feature anchors that align the clients' features and calibrate their classifiers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.core.spec import Fraction, NonNegative
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import class_means
from holdfast.models.network import Output

ADAM_RATE, ADAM_BETAS, ADAM_EPS = 1e-3, (0.9, 0.999), 1e-8  # of the authors' code; not decayed


@dataclass(frozen=True)
class FedFA(Method):
    """Feature anchors a_c, one for each class, in the space of the classifier's input h.

    Each step: 1. an SGD step on CE + L_fa;  2. calibration: a step of the classifier alone on
    mean_c CE(W a_c + b, c);  3. the batch's class means of h, as computed in step 1, are added to m_c.
    Each epoch: m_c is divided by the number of batches; ã_c ← λ ã_c + (1 - λ) m_c for the client's own classes.
    ã starts at the received anchors a, which steps 1 and 2 use unchanged during the whole round.
    Server: the mean of the ã, weighted like the models by n_k, becomes the next round's anchors.
    Zhou et al., 2023, Eq. 6-8 and Algorithm 1. μ = 0.1, λ = 0.5; the defaults follow the authors' code.

    ``anchor_loss``: ``code`` is μ (1/C) Σ_{c in the batch} mean_{j of c} ‖h_j - a_c‖², ``paper`` is
    (μ/2) mean_j ‖h_j - a_{y_j}‖². ``calibration``: ``adam`` (1e-3), ``sgd`` (the round's η) or ``off``,
    after each ``step`` or ``epoch`` (``calibrate_each``). ``update_anchors``: whether anchors are updated.
    ``anchor_init``: ``orthogonal`` (distinct rows of the identity; with more classes than features, as ``random``)
    or ``random`` (Gaussian rows of length 1). ``class_means``: ``faithful`` divides m_c by the number of all batches
    of the epoch, ``per-class`` by that of the batches with class c. ``warmup``: round 1 omits L_fa.
    """

    name: ClassVar[str] = "fedfa"
    card: ClassVar[Card] = Card(
        when="label or feature skew makes the clients' features diverge, and little more may be sent",
        client="no extra pass; after each step, a step of the classifier on one anchor for each class",
        uploads="the change of its classes' anchors, and so which classes it holds",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True
    compares_samples: ClassVar[bool] = True

    mu: NonNegative = 0.1  # μ: weight of L_fa
    lam: Fraction = 0.5  # λ: weight of the old anchor in an epoch's update
    anchor_loss: Literal["code", "paper"] = "code"
    calibration: Literal["adam", "sgd", "off"] = "adam"
    calibrate_each: Literal["step", "epoch"] = "step"
    update_anchors: bool = True
    anchor_init: Literal["orthogonal", "random"] = "orthogonal"
    class_means: Literal["faithful", "per-class"] = "faithful"
    warmup: bool = False

    def init_server_state(self, context: RunContext) -> Tree:
        """The initial anchors ``[C, d]``."""
        classes, width = context.num_classes, context.network.head.features
        rng = context.generator("feature anchors")
        if self.anchor_init == "orthogonal" and classes <= width:
            anchors = np.eye(width)[rng.choice(width, classes, replace=False)]
        else:
            anchors = rng.standard_normal((classes, width))
            anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
        return {"anchors": torch.from_numpy(anchors).to(context.device, context.dtype)}

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The anchors, their running update, and the state of the calibration's optimiser."""
        anchors, context = payload["anchors"], client.context
        without_loss = self.warmup and client.round == 1
        carry: Tree = {"anchors": anchors, "mu": context.scalar(0.0 if without_loss else self.mu)}
        if self.update_anchors:
            carry |= {
                "updated": anchors,
                "sums": torch.zeros_like(anchors),
                "batches": torch.zeros_like(client.label_counts),
                "owned": client.owned,
            }
        if self.calibration != "off":
            carry["classifier"] = {
                name: self._optimiser(client.global_params[name], client)
                for name in context.network.head.names
            }
        return carry

    def _optimiser(self, parameter: Tensor, client: Client) -> Tensors:
        """The calibration optimiser's initial state for one of the classifier's parameters."""
        if self.calibration == "sgd":
            return {"rate": client.context.scalar(client.lr)}
        zeros = torch.zeros_like(parameter)
        return {"steps": client.context.scalar(0.0), "mean": zeros, "square": zeros}

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """L_fa."""
        if self.mu == 0:
            return None
        strength: Tensor = carry["mu"]
        anchors: Tensor = carry["anchors"]
        distance = (out.features - anchors[batch.y]).square().sum(-1)
        if self.anchor_loss == "paper":
            return strength / 2 * batch.mean(distance)
        members = batch.members(len(anchors), anchors.dtype)
        weight = (members / members.sum(0).clamp(min=1)).sum(-1)  # of each sample in its class's mean
        return strength / len(anchors) * (weight * distance).sum()

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """Calibrate, and add the batch's class means."""
        if self.calibrate_each == "step":
            params, carry = self._calibrate(params, carry)
        if self.update_anchors:
            means, counts = class_means(
                out.features, batch.members(len(carry["anchors"]), out.features.dtype)
            )
            counted = counts > 0 if self.class_means == "per-class" else torch.ones_like(counts)
            carry = carry | {"sums": carry["sums"] + means, "batches": carry["batches"] + counted}
        return params, carry

    def after_epoch(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        """Update the anchors of the client's own classes."""
        if self.calibrate_each == "epoch":
            params, carry = self._calibrate(params, carry)
        if self.update_anchors:
            means = carry["sums"] / carry["batches"].clamp(min=1).unsqueeze(-1)
            moved = self.lam * carry["updated"] + (1 - self.lam) * means
            carry = carry | {
                "updated": torch.where(carry["owned"].unsqueeze(-1), moved, carry["updated"]),
                "sums": torch.zeros_like(carry["sums"]),
                "batches": torch.zeros_like(carry["batches"]),
            }
        return params, carry

    def _calibrate(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        """One step of the classifier on mean_c CE(W a_c + b, c)."""
        if self.calibration == "off":
            return params, carry
        anchors, classifier = carry["anchors"], carry["classifier"]
        weight = next(name for name in classifier if params[name].ndim == 2)
        logits = anchors @ params[weight].T
        for name in classifier.keys() - {weight}:
            logits = logits + params[name]
        # The gradient of the mean cross-entropy with respect to the logits.
        labels = torch.eye(len(anchors), dtype=logits.dtype, device=logits.device)
        error = (logits.softmax(-1) - labels) / len(anchors)
        new, kept = dict(params), {}
        for name, state in classifier.items():
            move, kept[name] = self._move(error.T @ anchors if name == weight else error.sum(0), state)
            new[name] = params[name] - move
        return new, carry | {"classifier": kept}

    def _move(self, gradient: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The amount to subtract from a parameter, and the optimiser's new state."""
        if self.calibration == "sgd":
            return state["rate"] * gradient, state
        first, second = ADAM_BETAS
        steps = state["steps"] + 1
        mean = first * state["mean"] + (1 - first) * gradient
        square = second * state["square"] + (1 - second) * gradient.square()
        scale = (square / (1 - second**steps)).sqrt() + ADAM_EPS
        return ADAM_RATE * mean / (1 - first**steps) / scale, {"steps": steps, "mean": mean, "square": square}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """n_k (ã - a) and n_k; sending changes keeps an anchor that no client updates unchanged to the bit."""
        if not self.update_anchors:
            return {}, {}
        samples = client.context.scalar(client.samples)
        return {"moved": samples * (carry["updated"] - carry["anchors"]), "samples": samples}, {}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """The n_k-weighted mean of ã."""
        if not self.update_anchors:
            return server.state
        return {"anchors": server.state["anchors"] + sums["moved"] / sums["samples"]}
