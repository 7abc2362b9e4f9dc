"""A method without its term is FedAvg: to the bit where the arithmetic is the same, to rounding elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from reference.numpy_model import Weights
from reference.world import LABELS, PARTS, federation, run

from holdfast.data.federation import Federation, federate
from holdfast.methods.base import Method
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedavgm import FedAvgM
from holdfast.methods.fedcurv import FedCurv
from holdfast.methods.fedfa import FedFA
from holdfast.methods.fedka import FedKA
from holdfast.methods.fedmlp import FedMLP
from holdfast.methods.fednova import FedNova
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.fedprox import FedProx
from holdfast.methods.flashback import Flashback
from holdfast.methods.moon import Moon
from holdfast.methods.scaffold import Scaffold

SWITCHED_OFF = [
    FedProx(mu=0.0),
    FedNTD(beta=0.0),
    FedKA(beta=0.0, shared=(1, 4, 11, 14)),
    Moon(mu=0.0),
    FedCurv(lam=0.0),
    FedFA(mu=0.0, calibration="off"),
    FedMLP(use_prototype=False, use_inter_task=False, use_semantic=False, head="shared"),
]


def final(method: Method, among: Federation | None = None, rounds: int = 3) -> Weights:
    return run(method, rounds=rounds, among=among).rounds[-1].params


def same_bits(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def assert_close(one: Weights, other: Weights) -> None:
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("method", SWITCHED_OFF, ids=lambda m: m.name)
def test_without_its_term_to_the_bit(method: Method) -> None:
    assert same_bits(final(method), final(FedAvg()))


def test_flashback_in_round_1_without_its_server_half_to_the_bit() -> None:
    """Round 1 has no teacher yet."""
    one, other = Flashback(half="client"), FedAvg()
    assert same_bits(final(one, rounds=1), final(other, rounds=1))
    assert not same_bits(final(one, rounds=2), final(other, rounds=2))


def test_flashback_that_has_seen_almost_nothing_to_rounding() -> None:
    """a = π / (ν + π) vanishes with γ, for classes the client holds; here both clients hold the same ones."""
    among = federate(federation().dataset, [np.array([0, 1, 2, 4]), np.array([3, 7, 5, 8, 9])])
    assert set(LABELS[among.client(0)]) == set(LABELS[among.client(1)])
    assert_close(final(Flashback(gamma=1e-14, half="client"), among), final(FedAvg(), among))


def test_scaffold_on_one_client_to_rounding() -> None:
    """c is always c_k, and g - c_k + c is g but for rounding."""
    alone = federate(federation().dataset, [PARTS[0]])
    assert_close(final(Scaffold(), alone), final(FedAvg(), alone))


def test_fednova_with_equal_steps_to_rounding() -> None:
    """a_k cancels."""
    equal = federate(federation().dataset, [np.arange(0, 4), np.arange(4, 8), np.arange(8, 12)])
    assert_close(final(FedNova(), equal), final(FedAvg(), equal))


def test_fednova_with_unequal_steps_is_another_model() -> None:
    assert not same_bits(final(FedNova()), final(FedAvg()))


def test_fedavgm_without_momentum_to_rounding() -> None:
    """w - (w - mean) is the mean but for rounding."""
    assert_close(final(FedAvgM(beta=0.0)), final(FedAvg()))
