"""Every method gives the same model on every engine: lanes against the sequential reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from small_world import close, learnt, world
from torch import nn

from holdfast.core.settings import Settings
from holdfast.core.trees import leaves
from holdfast.data.dataset import Dataset, Group
from holdfast.data.federation import Federation, federate
from holdfast.data.partitions import (
    IID,
    PARTITIONS,
    ByDomain,
    BySite,
    ByWriter,
    ClassesPerClient,
    ClassShards,
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    Partition,
    QuantitySkew,
    Shards,
    WriterTransfer,
)
from holdfast.data.preprocess import Preprocess
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree
from holdfast.methods.context import Client
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedka import FedKA
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.registry import METHODS, parse_method
from holdfast.models.network import Output
from holdfast.training.session import Training

SIZES = (7, 4, 1, 9, 5)
CLASSES = 4
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


def images(samples: int, preprocess: Preprocess | None = None) -> Dataset:
    """Noise with a bright column for the class, in two domains and by six writers."""
    rng = np.random.default_rng(1)

    def part(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % CLASSES
        x = rng.integers(0, 160, size=(n, 1, 4, 4))
        x[np.arange(n), :, :, y] += 90
        return x.astype(np.uint8), y

    def group(names: tuple[str, ...], each: int) -> Group:
        return Group(names, np.arange(samples) // each % len(names), np.zeros(12, np.int64))

    domain = group(("here", "there"), 1)
    groups = {"domain": domain, "site": domain, "writer": group(tuple("uvwxyz"), 4)}
    return Dataset.from_arrays(*part(samples), *part(12), preprocess=preprocess, groups=groups)


def unequal(preprocess: Preprocess | None = None, sizes: tuple[int, ...] = SIZES) -> Federation:
    """Five clients of 7, 4, 1, 9 and 5 samples, and four public ones."""
    order = np.random.default_rng(2).permutation(26)
    parts = np.split(order, np.cumsum(sizes)[:-1])
    return federate(images(30, preprocess), parts, public=np.arange(26, 30))


def mlp(norm: bool = False, dropout: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(16, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Dropout(0.3)] if dropout else []), nn.Linear(8, CLASSES))


def convolution(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), *([nn.BatchNorm2d(3)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES))


def after_two_rounds(
    method: Method, federation: Federation, model: nn.Module, engine: str, *,
    precision: str = "float64", parallel_clients: int | None = None, clients_per_round: int | None = None,
    optimizer: str = "sgd", **options: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Everything a run has learnt: weights, buffers, the server's state, what clients remember."""
    settings = Settings(
        rounds=2,
        clients_per_round=clients_per_round,
        local_epochs=2,
        batch_size=3,
        lr=0.05,
        optimizer=optimizer,
        momentum=0.9 if optimizer == "sgd" else 0.0,
        weight_decay=0.01,
        lr_decay=0.9,
        seed=4,
        evaluate_locals=False,
    )
    training = Training(
        method,
        model,
        federation,
        settings,
        engine=engine,
        device="cpu",
        precision=precision,
        parallel_clients=parallel_clients,
        **options,
    )
    client_states = StateCache(None, None)
    loop = training.loop(client_states)
    for number in (1, 2):
        loop.round(number)
    server = loop.server
    learnt = {"params": server.params, "buffers": server.buffers, "state": server.state}
    learnt |= {f"client {k}": client_states.get(k) or {} for k in range(federation.clients)}
    return dict(leaves(learnt))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape, name
        scale = max(1e-3, float(value.double().abs().max())) if value.numel() else 1.0
        apart = float((value.double() - other[name].double()).abs().max()) if value.numel() else 0.0
        assert apart <= tolerance * scale, f"{name} differs by {apart} of {scale}"


def assert_parity(
    method: Method, federation: Federation, model: nn.Module, precision: str = "float64", **options: Any
) -> None:
    """With two lanes, so that clients wait for one, against one by one."""
    reference = after_two_rounds(method, federation, model, "sequential", precision=precision, **options)
    lanes = after_two_rounds(
        method, federation, model, "vectorized", precision=precision, parallel_clients=2, **options
    )
    assert_same(reference, lanes, TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method(name: str, precision: str) -> None:
    assert_parity(METHODS[name](), unequal(), mlp(), precision)


@pytest.mark.parametrize("distance", ["squared", "plain"])
@pytest.mark.parametrize("logits", ["raw", "centred"])
def test_strong_anchors(logits: Literal["raw", "centred"], distance: Literal["squared", "plain"]) -> None:
    assert_parity(FedKA(beta=0.5, logits=logits, distance=distance, discard="dominant"), unequal(), mlp())


@pytest.mark.parametrize("text", [
    "fedka:beta=0.5,discard=own,anchor_ce=0.3",
    "fedmlp:minority=sum,strength=0.5,head_epochs=1,weights=uniform",
    "fedmlp:clustering=fixed",
])  # fmt: skip
def test_variants(text: str) -> None:
    assert_parity(parse_method(text), unequal(), mlp())


@pytest.mark.parametrize("name", ["fedsam", "fedsmoo", "ditto"])
def test_perturbed_gradients_and_new_starts_with_another_optimizer(name: str) -> None:
    assert_parity(METHODS[name](), unequal(), mlp(), optimizer="adam")


@pytest.mark.parametrize("lanes", [1, 3, 5, 8])
def test_any_number_of_lanes(lanes: int) -> None:
    """Fewer lanes than clients, as many, and more."""
    method = parse_method("fedntd+fedprox+fedavgm")
    reference = after_two_rounds(method, unequal(), mlp(), "sequential")
    assert_same(
        reference, after_two_rounds(method, unequal(), mlp(), "vectorized", parallel_clients=lanes), 1e-9
    )


@dataclass(frozen=True)
class OwnPast(Method):
    """Learns from the model that was sent, and once it has one from its own of the round before."""

    name: ClassVar[str] = "own-past"
    teachers: ClassVar[tuple[str, ...]] = ("past",)

    def teacher(self, name: str, payload: Tree, state: Tree, client: Client) -> Tensors:
        return state.get("past", client.global_params)  # type: ignore[return-value]

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> torch.Tensor:
        return batch.mean((out.logits - batch.teacher["past"].logits).square().mean(-1))

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"past": {**params, **client.buffers}}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sample", [None, 3])  # all have a past in round 2, or some
def test_a_teacher_that_becomes_a_clients_own(sample: int | None, norm: bool) -> None:
    augmented = unequal(Preprocess((0.5,), (0.5,), crop=1), sizes=(7, 4, 10, 5))
    assert_parity(OwnPast(), augmented, mlp(norm), clients_per_round=sample)


ONE_OF_EACH: list[Partition] = [
    IID(),
    Shards(2),
    ClassShards(2),
    Dirichlet(0.5, min_size=1),
    DirichletUncapped(0.5, min_size=1),
    DirichletInner(0.5),
    DirichletTwoStage(0.5),
    ClassesPerClient(2),
    QuantitySkew(0.5, min_size=1),
    ByDomain(),
    BySite(),
    ByWriter(),
    WriterTransfer(),
]


@pytest.mark.parametrize("partition", ONE_OF_EACH, ids=lambda p: p.name)
def test_every_partition(partition: Partition) -> None:
    assert_parity(FedAvg(), federate(images(24), partition, clients=4), mlp())


def test_no_partition_is_left_out() -> None:
    assert {type(p) for p in ONE_OF_EACH} == set(PARTITIONS.values())


@pytest.mark.parametrize("norm", ["average", "local", "drop"])
@pytest.mark.parametrize("name", ["fedavg", "fedntd", "fedka", "moon", "fedsam"])
def test_batch_norm(name: str, norm: str) -> None:
    """Clients of 7, 4 and 10 samples end an epoch with a single one, which joins the batch before it."""
    assert_parity(METHODS[name](), unequal(sizes=(7, 4, 10, 5)), mlp(norm=True), batchnorm=norm)


@pytest.mark.parametrize("norm", ["average", "local", "drop"])
def test_batch_norm_with_a_client_of_one_sample(norm: str) -> None:
    """Its batches have no variance; testing and teaching with it must leave the statistics alone."""
    assert_parity(METHODS["fedntd"](), unequal(), mlp(norm=True), batchnorm=norm)


def test_batch_norm_with_what_a_hold_out_leaves() -> None:
    """Of 5 samples 4 are trained on, in batches of 3: the last one joins them, though of 5 two would be left."""
    assert_parity(METHODS["fedfomo"](), unequal(sizes=(5, 5, 8, 8)), mlp(norm=True))


@pytest.mark.parametrize("norm", [False, True])
def test_convolutions(norm: bool) -> None:
    assert_parity(FedAvg(), unequal(), convolution(norm))


@pytest.mark.parametrize("name", ["fedavg", "fedsam"])
def test_dropout_layers(name: str) -> None:
    assert_parity(METHODS[name](), unequal(), mlp(dropout=True))


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "fedka", "fedreg", "flashback", "moon", "fedsol"])
def test_augmentation(name: str) -> None:
    assert_parity(METHODS[name](), unequal(Preprocess(crop=1, flip=True, cutout=2)), mlp())


@pytest.mark.parametrize("norm", ["average", "local", "drop"])
@pytest.mark.parametrize("name", ["fedntd", "moon"])
def test_teachers_do_not_see_padding(name: str, norm: str) -> None:
    """Without running statistics what fills a batch up would count."""
    federation = unequal(Preprocess(crop=1, flip=True), sizes=(7, 4, 11, 5))
    assert_parity(METHODS[name](), federation, mlp(norm=True), batchnorm=norm)


def test_teachers_see_what_their_students_see() -> None:
    """In the first step a student is its teacher, so distillation pulls nowhere, however inputs are augmented."""
    augmented = world([0, 1, 2, 3] * 2, [1, 2, 3], preprocess=Preprocess(crop=1, flip=True))
    one_step = {"local_epochs": 1, "batch_size": 8}
    distilled, plain = (learnt(method, augmented, 1, **one_step) for method in (FedNTD(beta=5), FedAvg()))
    assert close(distilled, plain)


def test_augmentation_changes_the_result() -> None:
    plain = after_two_rounds(FedAvg(), unequal(), mlp(), "sequential")
    moved = after_two_rounds(FedAvg(), unequal(Preprocess(crop=1, flip=True)), mlp(), "sequential")
    assert any(not torch.allclose(plain[name], moved[name], atol=1e-4) for name in plain)


def test_norm_policies_differ() -> None:
    results = [
        after_two_rounds(FedAvg(), unequal(), convolution(norm=True), "sequential", batchnorm=policy)[
            "params/0.weight"
        ]
        for policy in ("average", "local")
    ]
    assert not torch.allclose(*results, atol=1e-4)
