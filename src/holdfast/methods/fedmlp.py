"""FedMLP: prototypes on three levels that align features across clients and over a stream of tasks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import Count, NonNegative
from holdfast.data.skew import minority_classes
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import CLASS_MEANS, Card
from holdfast.methods.clustering import Clustering, cluster
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import class_means, kl_divergence, prototype_scores, smooth_l1
from holdfast.models.network import Output

GLOBAL_CLUSTERS, LOCAL_CLUSTERS = 5, 2  # with clustering='fixed'


@dataclass(frozen=True)
class FedMLP(Method):
    """Multi-level prototypes, for clients whose data changes from task to task.

    c_k: the mean feature of class k at a client after training, which is stored in the client's memory.
    g_k: the unweighted mean of the participants' c_k. P: the means of clusters of all g_k. O: the means of
    clusters of a client's memory.
    Local: CE + s (L_P + L_I) + α L_S, means over the batch; h is a sample's feature, y its class, σ the softmax
    over features. L_P = SmoothL1(h, g_y). L_S = SmoothL1(h, the P of y's cluster), over minority classes.
    L_I = KL(σ(h) ‖ σ(c̃)), c̃ the stored c_y or, for a class new to the client, the O nearest to h.
    A term without a prototype is 0.
    Server: the feature extractor as FedAvg; classifiers are not sent.
    Guo et al., AAAI 2025, Eq. 1-11, where α and the clustering are not given. Minority classes are the rarer
    half of the classes over all clients; there are none if all are equally frequent.

    ``smooth_l1``: the ``mean`` over feature dimensions, or their ``sum``, as in the work cited by the paper.
    ``strength``: s, 1 in the paper; 0.5 in the options of FedPRP, by the same authors. ``minority``: L_S is the
    ``mean`` over the minority samples of the batch, or the ``sum`` of the means of its minority classes (Eq. 6).
    ``clustering``: ``finch``, ``kmeans`` with √C clusters, or ``fixed``: k-means with 5 clusters on the server and 2 at
    a client, as in the options of FedPRP. ``inter_task_kl``: ``feature-memory`` as above,
    ``memory-feature`` for KL(σ(c̃) ‖ σ(h)). ``memory``: new prototypes ``overwrite`` the stored ones or are
    averaged with them (``ema``).
    ``use_prototype``, ``use_inter_task``, ``use_semantic``: whether to use L_P, L_I, L_S.
    ``head``: ``personal``; ``epoch``, also personal, but reset to the average of all clients' whenever the stages
    of a stream restart, as in the authors' code of FedPRP; or ``shared``, averaged as the other layers.
    ``head_epochs``: of the local epochs, the first ones train only the classifier and the others only the body,
    as in the code of FedPRP; 0 to train both in all epochs. ``weights``: clients count by their ``samples`` or are
    ``uniform``.
    """

    name: ClassVar[str] = "fedmlp"
    card: ClassVar[Card] = Card(
        when="the data is a stream of tasks at every client, and each client needs a personal classifier",
        client="a forward pass over its samples each round, for prototypes",
        server="clusters at most one prototype for each class",
        uploads=CLASS_MEANS,
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    alpha: NonNegative = 1.0  # α: weight of L_S
    smooth_l1: Literal["mean", "sum"] = "mean"
    clustering: Literal["finch", "kmeans", "fixed"] = "finch"
    inter_task_kl: Literal["feature-memory", "memory-feature"] = "feature-memory"
    memory: Literal["overwrite", "ema"] = "overwrite"
    use_prototype: bool = True
    use_inter_task: bool = True
    use_semantic: bool = True
    head: Literal["personal", "epoch", "shared"] = "personal"
    strength: NonNegative = 1.0  # s: weight of L_P and L_I
    minority: Literal["mean", "sum"] = "mean"
    head_epochs: Count = 0  # local epochs that train only the classifier, before those of the body
    weights: Literal["samples", "uniform"] = "samples"

    def overrides(self, hook: str) -> bool:
        """Whether this method defines a hook itself, which depends on its hyper-parameters."""
        has = {
            "initial_params": self.head != "shared",
            "personal_params": self.head != "shared",
            "prototype_logits": self._from_server,
            "learning_rate": self.head_epochs > 0,
            "client_weight": self.weights == "uniform",
        }
        return super().overrides(hook) and has.get(hook, True)

    def prepare(self, context: RunContext) -> Self:
        """Raises if no local epoch would train the body."""
        if self.head_epochs and context.whole_epochs(self.name) <= self.head_epochs:
            raise HoldfastError(
                f"fedmlp trains the body after the {self.head_epochs} epochs of the classifier; local_epochs is "
                f"{context.local_epochs} and must be at least {self.head_epochs + 1}"
            )
        return self

    @property
    def compares_samples(self) -> bool:  # type: ignore[override]
        """L_S is divided by the number of samples of minority classes in the batch."""
        return self._semantic

    @property
    def _semantic(self) -> bool:
        return self.use_semantic and self.alpha > 0

    @property
    def _from_server(self) -> bool:
        """Whether a term needs the federation's prototypes."""
        return self.use_prototype or self._semantic

    def init_server_state(self, context: RunContext) -> Tree:
        if not self._from_server:
            return {}
        prototypes, known = _nothing(context)  # g, and which of them exist
        clusters = torch.zeros_like(known, dtype=torch.int64)  # the index in P for each class
        return {"prototypes": prototypes, "known": known, "semantic": prototypes[:0], "cluster": clusters}

    def broadcast(self, server: Server) -> Tree:
        """g, P, and the index in P for each class."""
        return server.state

    def init_client_state(self, client: Client) -> Tree:
        memory, remembered = _nothing(client.context)
        return {"memory": memory, "remembered": remembered}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The received body with the client's own classifier, if it has one."""
        anew = self.head == "epoch" and client.stage < int(state.get("stage", 0))
        own: Tensors = {} if anew else state.get("head", {})
        return params | own

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The prototypes in the terms L_P, L_S and L_I."""
        return self._from_federation(payload, client) | self._from_memory(state, client)

    def _from_federation(self, payload: Tree, client: Client) -> Tree:
        """g_k and, last, the P of k's cluster: ``targets`` [terms, C, d], and their weights ``counts`` [terms, C]."""
        if not self._from_server:
            return {}
        prototypes, known = payload["prototypes"], payload["known"]
        targets, counts = ([prototypes], [known]) if self.use_prototype else ([], [])
        if self._semantic:
            semantic = torch.zeros_like(prototypes)
            semantic[known] = payload["semantic"][payload["cluster"][known]]
            minority = torch.from_numpy(minority_classes(client.context.class_counts.cpu().numpy()))
            targets, counts = [*targets, semantic], [*counts, minority.to(known.device) & known]
        return {"targets": torch.stack(targets), "counts": torch.stack(counts).to(prototypes.dtype)}

    def _from_memory(self, state: Tree, client: Client) -> Tree:
        """The memory, and O with its squared norms; ``goals`` are log σ of both, concatenated."""
        if not self.use_inter_task:
            return {}
        memory, remembered = state["memory"], state["remembered"]
        means, _ = self._clusters(
            memory[remembered], client.context, client.generator("clusters"), LOCAL_CLUSTERS
        )
        neighbours, exists = _nothing(client.context)
        neighbours[: len(means)], exists[: len(means)] = means, True
        # Padding is never nearest.
        lengths = torch.where(exists, neighbours.square().sum(-1), torch.inf)
        goals = F.log_softmax(torch.cat([memory, neighbours]), dim=-1)
        return {
            "memory": memory, "remembered": remembered, "anything": remembered.any(),
            "neighbours": neighbours, "lengths": lengths, "goals": goals,
        }  # fmt: skip

    def _clusters(
        self, prototypes: Tensor, context: RunContext, rng: np.random.Generator, fixed: int
    ) -> tuple[Tensor, Tensor]:
        """Semantic prototypes ``[V, d]`` and each one's cluster ``[n]``. ``fixed`` sets the number of clusters."""
        how: Clustering = "finch" if self.clustering == "finch" else "kmeans"
        wanted = fixed if self.clustering == "fixed" else math.ceil(math.sqrt(context.num_classes))
        found = cluster(prototypes.double().cpu().numpy(), how, wanted, rng)
        labels = torch.from_numpy(found).to(context.device)
        count = int(found.max()) + 1 if len(found) else 0
        members = labels.unsqueeze(1) == torch.arange(count, device=context.device)
        return class_means(prototypes, members.to(prototypes.dtype))[0], labels

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """The enabled terms of L_P + L_I + α L_S."""
        terms, h, y = [], out.features, batch.y
        if self._from_server:
            counts = carry["counts"][:, y]
            distances = counts * self._distance(h - carry["targets"][:, y])  # [terms, B]
        if self.use_prototype:
            terms.append(self.strength * batch.mean(distances[0]))
        if self.use_inter_task:
            terms.append(self.strength * batch.mean(self._inter_task(h, y, carry)))
        if self._semantic:
            terms.append(
                self.alpha * self._minority_mean(distances[-1], counts[-1], batch, carry["counts"].shape[-1])
            )
        return torch.stack(terms).sum() if terms else None

    def _minority_mean(self, distances: Tensor, minority: Tensor, batch: Batch, classes: int) -> Tensor:
        """The mean over minority samples, or the sum of the means by class; ``distances`` of other samples are 0."""
        if self.minority == "sum":
            members = batch.members(classes)
            return (members * distances.unsqueeze(-1)).sum(0).div(members.sum(0).clamp(min=1)).sum()
        share = batch.mean(minority)  # the mean over the batch is divided by it
        return batch.mean(distances) / torch.where(share > 0, share, 1.0)

    def _distance(self, difference: Tensor) -> Tensor:
        """SmoothL1 of each sample: ``[..., B]`` from ``[..., B, d]``."""
        each = smooth_l1(difference)
        return each.mean(-1) if self.smooth_l1 == "mean" else each.sum(-1)

    def _inter_task(self, h: Tensor, y: Tensor, carry: Tree) -> Tensor:
        """The divergence in L_I of each sample: ``[B]``."""
        apart = carry["lengths"] - 2 * h.detach() @ carry["neighbours"].T  # less ‖h‖², which is equal for all
        remembered = carry["remembered"]
        row = torch.where(remembered[y], y, len(remembered) + apart.argmin(-1))
        feature, goal = F.log_softmax(h, dim=-1), carry["goals"][row]
        both = (feature, goal) if self.inter_task_kl == "feature-memory" else (goal, feature)
        divergence: Tensor = carry["anything"] * kl_divergence(*both)
        return divergence

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send the prototypes of the current task; keep them and the classifier."""
        sums, state = {}, {}  # type: Tree, Tree
        if self._from_server or self.use_inter_task:
            members = F.one_hot(client.y, client.context.num_classes).to(client.context.dtype)
            prototypes = class_means(client.forward(params).features, members)[0]
        if self._from_server:
            sums = {"prototypes": prototypes, "owners": client.owned.to(client.context.dtype)}
        if self.use_inter_task:
            old, remembered, owned = carry["memory"], carry["remembered"], client.owned
            kept = 0.5 * (remembered & (self.memory == "ema")).to(old.dtype).unsqueeze(-1)
            new = kept * old + (1 - kept) * prototypes
            state = {"memory": torch.where(owned.unsqueeze(-1), new, old), "remembered": remembered | owned}
        if self.head != "shared":
            state["head"] = {name: params[name] for name in client.context.network.head.names}
        if self.head == "epoch":
            state["stage"] = torch.tensor(client.stage)
        return sums, state

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """The body with the client's own classifier."""
        own: Tensors = state.get("head", {})
        return server.params | own

    def is_shared(self, name: str, context: RunContext) -> bool:
        return self.head != "personal" or name not in context.network.head.names

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float:
        """0 for the body in the first epochs and for the classifier in the others."""
        return lr if (name in context.network.head.names) == (epoch < self.head_epochs) else 0.0

    def client_weight(self, client: Client) -> float:
        return 1.0 if self.weights == "uniform" else super().client_weight(client)

    def prototype_logits(self, out: Output, server: Server) -> Tensor:
        """Scores by distance to g."""
        return prototype_scores(out.features, server.state["prototypes"], server.state["known"])

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """g_k from this round's owners of class k, unchanged if there are none; then P."""
        if not self._from_server:
            return server.state
        owners, old = sums["owners"].unsqueeze(-1), server.state["prototypes"]
        prototypes = torch.where(owners > 0, sums["prototypes"] / owners.clamp(min=1), old)
        known = server.state["known"] | (sums["owners"] > 0)
        semantic, labels = self._clusters(
            prototypes[known], context, context.generator("clusters", server.round), GLOBAL_CLUSTERS
        )
        clusters = torch.zeros_like(server.state["cluster"])
        clusters[known] = labels
        return {"prototypes": prototypes, "known": known, "semantic": semantic, "cluster": clusters}


def _nothing(context: RunContext) -> tuple[Tensor, Tensor]:
    """No prototypes: zeros ``[C, d]`` and which of them exist, bool ``[C]``."""
    shape = (context.num_classes, context.network.head.features)
    return (
        torch.zeros(shape, dtype=context.dtype, device=context.device),
        torch.zeros(context.num_classes, dtype=torch.bool, device=context.device),
    )
