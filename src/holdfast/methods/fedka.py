"""FedKA: distillation of the global model's logits on one sample of each class that is rare or absent at a client."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import NonNegative, PositiveCount, PositiveFraction
from holdfast.methods.base import Batch, Local, Method, Server, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.models.network import Output

SMOOTHING = 1e-6  # of the plain distance near 0, where its gradient would be rounding noise


@dataclass(frozen=True)
class FedKA(Method):
    """Federated knowledge anchor.

    A class is missing at a client (C_m), non-dominant (C_n: its share of the samples is below γ) or dominant
    (C_d). The anchor T, drawn again in each round, contains one of the client's own samples for each class of C_n
    and the shared set S's sample for each class of C_m; of more than μ classes, μ are chosen at random.
    Local: CE + β (1/|T|) Σ_{(x,y)∈T} Σ_{c≠y} (z_g(x)_c - z_k(x)_c)², with logits z_k of the local and z_g of the
    global model.
    Server: as FedAvg; it also sends the shared set: one training sample of each class, fixed for the run.
    Chen et al., ACM MM 2023. There μ = 10 and β is tuned over 0.5, 0.1, 0.01, 0.001; γ is not given, but section 3.2
    reports collapse at a share of about 0.05.

    ``discard``: which logits of an anchor the distance leaves out: its ``own``, as in FedNTD, from which the paper
    takes the idea, or those of all ``dominant`` classes, c ∈ C_d, as in Eq. 3. With
    ``dominant`` training fails: the term prevents the logits of rare classes from falling, but nothing prevents those
    of dominant classes from rising, and each class is dominant at some client. All logits then rise from round to round
    until a step diverges, sooner with larger β and learning rate. With ``own``, logits of dominant classes are
    constrained as well.
    ``anchor_ce``: weight of the anchor's mean cross-entropy, another interpretation, which also limits dominant
    classes.
    ``sampling``: how the sample for a class of C_n is chosen: ``random``, ``hard`` or ``proficient`` (largest or
    smallest cross-entropy under w^{t-1}). ``anchors``: of ``both``, ``non-dominant`` or ``missing`` classes.
    ``shared``: the ids of the samples of S; drawn with the run's seed if none are given.
    ``logits``: ``raw`` as in Eq. 3, or ``centred``: z minus its mean over all classes, which leaves the softmax
    unchanged. Centred logits do not rise together, and β may be about ten times as large.
    ``distance``: ``squared`` as in Eq. 3, or ``plain``: the "L2 distance" of the paper's text,
    β (1/|T|) (Σ_{x∈T} Σ_{c∉C_d} (z_g(x)_c - z_k(x)_c)²)^½, whose gradient does not grow with the distance.
    The anchor is never augmented; it passes through the model with each batch.
    """

    name: ClassVar[str] = "fedka"
    card: ClassVar[Card] = Card(
        when="clients lack classes or hold few samples of them, and one sample of each class may be shared "
        "with all",
        client="up to μ = 10 anchor samples pass through the model with every batch",
        server="keeps the shared set",
        uploads="one raw training sample of each class, once, from a client to all (unless `shared` is "
        "public)",
    )
    needs_classes: ClassVar[bool] = True

    beta: NonNegative = 0.001  # β: strength of distillation
    gamma: PositiveFraction = 0.05  # γ: smallest share of a client's samples of a dominant class
    mu: PositiveCount = 10  # μ: the largest number of samples in an anchor
    sampling: Literal["random", "hard", "proficient"] = "random"
    anchors: Literal["both", "non-dominant", "missing"] = "both"
    shared: tuple[int, ...] = ()  # ids of the shared samples, one for each class in order; () draws them
    logits: Literal["raw", "centred"] = "raw"
    distance: Literal["squared", "plain"] = "squared"
    discard: Literal["own", "dominant"] = "own"
    anchor_ce: NonNegative = 0.0  # weight of the anchor's mean cross-entropy

    def prepare(self, context: RunContext) -> Self:
        """Raises unless the shared set has one sample of each class."""
        if not self._shares:
            return self
        if not self.shared:
            absent = np.flatnonzero(context.one_of_each < 0).tolist()
            if absent:
                raise HoldfastError(
                    f"fedka shares one sample of each class, but no client has samples of class {absent[0]}; "
                    "give sample ids as shared, or use anchors='non-dominant'"
                )
        elif _labels(context, self.shared) != list(range(context.num_classes)):
            raise HoldfastError(
                f"fedka: shared must be the ids of {context.num_classes} training samples, one of each class, "
                "in the order of the classes"
            )
        return self

    @property
    def _has_anchor(self) -> bool:
        return self.beta > 0 or self.anchor_ce > 0

    @property
    def _shares(self) -> bool:
        return self._has_anchor and self.anchors != "non-dominant"

    def init_server_state(self, context: RunContext) -> Tree:
        """The shared set."""
        if not self._shares:
            return {}
        ids = np.array(self.shared, np.int64) if self.shared else context.one_of_each
        return {"shared": context.read(ids)[0]}

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The anchor, the global model's logits on it, and each logit's weight in the distance and cross-entropy."""
        if not self._has_anchor:
            return {}
        context, rng = client.context, client.generator("anchor")
        label_counts = np.bincount(client.labels, minlength=context.num_classes)
        owned, dominant = label_counts > 0, label_counts / client.samples >= self.gamma
        of_kind = {"both": ~dominant, "non-dominant": owned & ~dominant, "missing": ~owned}
        classes = np.flatnonzero(of_kind[self.anchors])
        if len(classes) > self.mu:
            classes = np.sort(rng.choice(classes, self.mu, replace=False))
        # All anchors have the same size; they are padded with own samples, which suit BatchNorm's statistics.
        places = min(self.mu, context.num_classes)
        rows = rng.integers(client.samples, size=places)
        for place in np.flatnonzero(owned[classes]):
            rows[place] = self._representative(classes[place], client, rng)
        anchor = client.read(client.ids[rows])
        borrowed = np.flatnonzero(~owned[classes])
        if len(borrowed):
            anchor[torch.from_numpy(borrowed)] = payload["shared"][torch.from_numpy(classes[borrowed])]
        own = np.zeros((places, context.num_classes), bool)
        own[np.arange(len(classes)), classes] = True
        kept = own.any(1, keepdims=True) & (~own if self.discard == "own" else ~dominant)
        carry = {"anchor": anchor, "global": client.forward(client.global_params, anchor).logits}
        for name, entries in (("counts", kept), ("targets", own)):
            weights = torch.from_numpy(entries / max(len(classes), 1))
            carry[name] = weights.to(context.device, context.dtype)
        return carry

    def _representative(self, label: np.int64, client: Client, rng: np.random.Generator) -> int:
        """The row of the client's own sample that is chosen for a non-dominant class."""
        rows = np.flatnonzero(client.labels == label)
        if self.sampling == "random":
            return int(rng.choice(rows))
        logits = client.forward(client.global_params, client.read(client.ids[rows])).logits
        losses = F.cross_entropy(logits, client.y[torch.from_numpy(rows)], reduction="none")
        return int(rows[int(losses.argmax() if self.sampling == "hard" else losses.argmin())])

    def extra_inputs(self, carry: Tree) -> Tensor | None:
        return carry.get("anchor")

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """β times the distance of the anchor's logits from the global model's, and its cross-entropy."""
        if out.extra is None:
            return None
        distance = self._distance(out.extra.logits - carry["global"], carry["counts"])
        if self.anchor_ce == 0:
            return self.beta * distance
        entropy: Tensor = -(F.log_softmax(out.extra.logits, dim=-1) * carry["targets"]).sum()
        return self.beta * distance + self.anchor_ce * entropy

    def _distance(self, apart: Tensor, counts: Tensor) -> Tensor:
        """The distance of two sets of logits, of which ``counts`` are the weights."""
        if self.logits == "centred":
            apart = apart - apart.mean(-1, keepdim=True)
        squared: Tensor = (apart.square() * counts).sum()  # (1/|T|) ‖·‖²
        if self.distance == "squared":
            return squared
        return (squared * counts.amax() + SMOOTHING).sqrt()  # (1/|T|²) ‖·‖²


def _labels(context: RunContext, ids: tuple[int, ...]) -> list[int]:
    """The labels of these training samples; empty if an id does not exist."""
    try:
        return context.read(np.array(ids, np.int64))[1].tolist() if min(ids) >= 0 else []
    except IndexError:
        return []
