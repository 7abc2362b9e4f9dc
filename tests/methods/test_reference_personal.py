"""Methods that leave each client something of its own, against their equations in NumPy float64."""

from __future__ import annotations

import pytest
from reference.numpy_model import BODY, HEAD, Weights
from reference.world import (
    PARTS,
    assert_models_equal,
    assert_round_equal,
    ce_gradient,
    descend,
    initial_weights,
    lr_at,
    run,
    settings,
    steps_of,
    weighted,
)

from holdfast.methods.fedrep import FedRep

CLIENTS = range(len(PARTS))


def head_of(w: Weights) -> Weights:
    return {name: w[name] for name in HEAD}


# FedRep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "body_epochs"), [(2, 1), (3, 1), (3, 2)])
def test_fedrep(epochs: int, body_epochs: int) -> None:
    w, chosen = initial_weights(), settings(epochs=epochs)
    heads = [head_of(w) for _ in CLIENTS]
    for t, got in enumerate(run(FedRep(body_epochs=body_epochs), rounds=3, epochs=epochs).rounds, start=1):
        local = [
            descend(
                w | heads[k],
                steps_of(k, t, chosen),
                ce_gradient,
                lr_at(t),
                only=lambda step: BODY if step.epoch >= epochs - body_epochs else HEAD,
            )
            for k in CLIENTS
        ]
        heads, w = [head_of(m) for m in local], weighted(local)
        assert_round_equal(got, local, w)
        for k in CLIENTS:
            assert_models_equal(got.clients[k].memory["head"], heads[k])
