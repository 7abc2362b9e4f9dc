"""Stacks: one part is that part, order of terms does not matter, contradictions are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference.numpy_model import CLASSES, Forward, Weights, combine, forward, softmax
from reference.world import (
    PARTS,
    SAMPLES,
    Step,
    as_numpy,
    assert_round_equal,
    descend,
    initial_weights,
    lr_at,
    run,
    steps_of,
    weighted,
    with_term,
)

from holdfast.core.errors import HoldfastError
from holdfast.methods.base import Method
from holdfast.methods.fedavgm import FedAvgM
from holdfast.methods.feddf import FedDF
from holdfast.methods.fedfa import FedFA
from holdfast.methods.fedka import FedKA
from holdfast.methods.fednova import FedNova
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.fedprox import FedProx
from holdfast.methods.fedreg import FedReg
from holdfast.methods.fedrep import FedRep
from holdfast.methods.fedrod import FedRoD
from holdfast.methods.flashback import Flashback
from holdfast.methods.moon import Moon
from holdfast.methods.registry import METHODS
from holdfast.methods.scaffold import Scaffold
from holdfast.methods.stack import Stack
from holdfast.models.network import Output

KA = FedKA(beta=0.2, gamma=0.2, shared=(1, 4, 11, 14))
PAIRS = [
    (FedNTD(beta=0.5), FedProx(mu=0.3)),
    (KA, FedNTD()),
    (Moon(), KA),
    (Scaffold(), FedProx(mu=0.3)),
    (FedNTD(), FedFA(mu=0.3)),
    (Flashback(), Moon()),
]


def as_torch(tree: Any) -> Any:
    """A tree of NumPy arrays as tensors."""
    return {k: as_torch(v) for k, v in tree.items()} if isinstance(tree, dict) else torch.from_numpy(tree)


@pytest.mark.parametrize("part", [KA if m is FedKA else m() for m in METHODS.values()], ids=lambda m: m.name)
def test_stack_of_one_is_the_part_to_the_bit(part: Method) -> None:
    stack = Stack(part)
    x = torch.from_numpy(SAMPLES)
    for one, other in zip(run(part).rounds, run(stack).rounds, strict=True):
        np.testing.assert_equal(other.params, one.params)
        np.testing.assert_equal(other.state.get(part.name, {}), one.state)
        np.testing.assert_equal(other.payload.get(part.name, {}), one.payload)
        for k, client in one.clients.items():
            same = other.clients[k]
            assert same.weight == client.weight
            np.testing.assert_equal(same.shared, client.shared)
            np.testing.assert_equal(same.sums.get(part.name, {}), client.sums)
            np.testing.assert_equal(same.memory.get(part.name, {}), client.memory)
        tested = part.eval_params(one.server)
        np.testing.assert_equal(as_numpy(stack.eval_params(other.server)), as_numpy(tested))
        features = torch.relu(x @ tested["0.weight"].T + tested["0.bias"])
        out = Output(features, features @ tested["2.weight"].T + tested["2.bias"])
        assert torch.equal(stack.global_logits(out, other.server), part.global_logits(out, one.server))
        memory = as_torch(one.clients[0].memory)
        assert torch.equal(stack.personal_logits(out, {part.name: memory}), part.personal_logits(out, memory))


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda m: m.name)
def test_order_of_two_terms_does_not_matter(one: Method, other: Method) -> None:
    first, second = (run(stack).rounds[-1].params for stack in (Stack(one, other), Stack(other, one)))
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-12, atol=1e-12)


def test_terms_add_up_to_the_sum_of_their_equations() -> None:
    mu, w = 0.3, initial_weights()
    for t, got in enumerate(run(Stack(FedNTD(), FedProx(mu=mu))).rounds, start=1):

        def not_true(f: Forward, step: Step, sent: Weights = w) -> tuple[np.ndarray, float]:
            dz, teacher = np.zeros_like(f.z), forward(sent, step.x).z
            for j, y in enumerate(step.y):
                others = [c for c in range(CLASSES) if c != y]
                dz[j, others] = (softmax(f.z[j, others]) - softmax(teacher[j, others])) / len(step.y)
            return dz, 0.0

        def gradient(now: Weights, step: Step, sent: Weights = w) -> Weights:
            return combine((1, with_term(not_true)(now, step)), (mu, now), (-mu, sent))

        local = [descend(w, steps_of(k, t), gradient, lr_at(t)) for k in range(len(PARTS))]
        w = weighted(local)
        assert_round_equal(got, local, w)


def test_a_stack_of_stacks_is_one_stack() -> None:
    nested, flat = Stack(Stack(FedNTD(), FedProx()), Moon()), Stack(FedNTD(), FedProx(), Moon())
    assert nested == flat
    one, other = (run(stack).rounds[-1] for stack in (nested, flat))
    for name in one.params:
        np.testing.assert_array_equal(one.params[name], other.params[name])
    with pytest.raises(HoldfastError, match="twice"):
        Stack(Stack(FedNTD(), FedProx()), FedNTD())


def test_parts_keep_their_states_apart() -> None:
    last = run(Stack(Scaffold(), FedFA())).rounds[-1]
    assert set(last.state) == {"scaffold", "fedfa"}
    assert set(last.clients[0].memory) == {"scaffold"}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((FedAvgM(), FedNova()), "replace the aggregation"),
        ((FedReg(), FedProx()), "replaces the whole step"),
        ((FedReg(), FedRep()), "replaces the whole step"),
        ((FedRoD(), FedReg()), "replaces the whole step"),
        ((FedNova(), FedDF()), "needs the clients' models"),
        ((Flashback(), FedNova()), "needs the clients' models"),
        ((FedProx(mu=0.1), FedProx(mu=0.2)), "twice"),
        ((), "at least one"),
    ],
)
def test_contradictions_are_refused(parts: tuple[Method, ...], said: str) -> None:
    with pytest.raises(HoldfastError, match=said):
        Stack(*parts)
