"""Integer samples reach an embedding unchanged on every engine, and a model without one as floats."""

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import federate
from holdfast.engine.state_cache import StateCache
from holdfast.methods.registry import parse_method
from holdfast.models.registry import parse_model
from holdfast.training.session import Training
from holdfast.training.train import train

SIZES = (7, 4, 1, 9, 5)
HUGE = 2**24 + 1  # float32 rounds it to 2**24


class Tokens(nn.Module):
    """The mean of the tokens' embeddings, then a classifier; ids are taken from a huge offset on."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.offset = offset
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.embedding(x - self.offset).mean(1))


def sentences(offset=0):
    """Sequences of five tokens; a class prefers four of the twelve."""
    rng = np.random.default_rng(1)

    def part(n):
        y = np.arange(n) % 3
        x = np.where(
            rng.random((n, 5)) < 0.7,
            4 * y[:, None] + rng.integers(4, size=(n, 5)),
            rng.integers(12, size=(n, 5)),
        )
        return x.astype(np.int32) + offset, y

    return Dataset.from_arrays(*part(30), *part(12))


def federation(offset=0):
    parts = np.split(np.random.default_rng(2).permutation(26), np.cumsum(SIZES)[:-1])
    return federate(sentences(offset), parts, public=np.arange(26, 30))


def trained(engine, method, model, offset=0):
    settings = Settings(rounds=2, local_epochs=2, batch_size=3, lr=0.2, evaluate_locals=True)
    training = Training(
        parse_method(method),
        model,
        federation(offset),
        settings,
        engine=engine,
        device="cpu",
        precision="float64",
    )
    loop = training.loop(StateCache(None, None))
    records = [loop.round(1), loop.round(2)]
    return loop.server.params, records


METHODS = [
    "fedavg",
    "fedprox",
    "scaffold",
    "fedntd",
    "fedfa",
    "fedproto",
    "fedrod",
    "moon",
    "fedka",
    "fedcurv",
    "flashback",
]


@pytest.mark.parametrize("method", METHODS)
def test_engines_agree_on_an_embedding(method):
    (one, _), (other, _) = (trained(engine, method, Tokens()) for engine in ("sequential", "vectorized"))
    start = dict(Tokens().double().named_parameters())
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=0, atol=1e-9), name
        assert not torch.equal(value, start[name])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_ids_above_those_that_float32_can_hold_reach_the_model(engine):
    shifted, _ = trained(engine, "fedavg", Tokens(HUGE), HUGE)
    plain, _ = trained(engine, "fedavg", Tokens())
    for name, value in plain.items():
        assert torch.equal(shifted[name], value), name


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_model_without_embedding_gets_floats(engine):
    given = federation()
    as_floats = Dataset.from_arrays(
        given.dataset.x_train.float(),
        given.dataset.y_train,
        given.dataset.x_test.float(),
        given.dataset.y_test,
    )
    parts = [given.client(k) for k in range(given.clients)]
    same = federate(as_floats, parts, public=given.public)
    options = {"rounds": 2, "lr": 0.05, "engine": engine, "device": "cpu"}
    one, other = (train("fedavg", parse_model("mlp:8"), fed, **options) for fed in (given, same))
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name])


def test_a_method_that_moves_samples_refuses_integers():
    with pytest.raises(
        HoldfastError, match="fedreg moves samples along a gradient, so it needs floats or images"
    ):
        trained("sequential", "fedreg", Tokens())
