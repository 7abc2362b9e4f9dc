"""Every method learns to read digits, if only a little, within twenty rounds."""

import pytest

import holdfast as hf
from holdfast.methods import METHODS, parse_method
from holdfast.models import parse_model

QUICK = {"creff": "creff:epochs=10", "ccvr": "fedavg+ccvr"}
CHANCE, CLEARLY = 0.1, 4


@pytest.fixture(scope="module")
def federation() -> hf.Federation:
    return hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.5), clients=8, seed=0, public=0.05)


@pytest.mark.parametrize("name", METHODS)
def test_above_chance_within_20_rounds(name: str, federation: hf.Federation) -> None:
    run = hf.train(
        parse_method(QUICK.get(name, name)),
        parse_model("mlp:32"),
        federation,
        rounds=20,
        clients_per_round=4,
        local_epochs=2,
        lr=0.05,
        device="cpu",
        evaluate_every=20,
        evaluate_locals=False,
    )
    assert run.accuracy > CLEARLY * CHANCE
