"""Modules and methods of the user's own: frozen, tied, or unfit for lanes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
DATA = hf.Dataset.from_arrays(X, Y, X[:30], Y[:30])
SHORT = {"rounds": 2, "epochs": 2, "batch_size": 5, "lr": 0.1, "evaluate_locals": False}


@pytest.fixture
def federation():
    return hf.federate(DATA, hf.IID(), clients=4, seed=0)


def two_layers(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6, bias=bias), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("engine", ["sequential", "lanes"])
@pytest.mark.parametrize("method", ["fedavg", "fedntd", "scaffold", "fedfa"])
def test_what_asks_for_no_gradient_is_neither_trained_nor_sent(federation, method, engine):
    net = two_layers()
    net[0].requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    run = hf.train(method, net, federation, engine=engine, **SHORT)
    after = run.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("0."), name
    sent = sum(v.numel() for k, v in before.items() if not k.startswith("0."))
    assert run.records[0]["bytes_down"] <= 4 * 4 * (
        2 * sent + 100
    )  # four clients; SCAFFOLD sends as much again


def test_a_frozen_classifier_is_refused(federation):
    net = two_layers()
    net[4].requires_grad_(False)
    with pytest.raises(hf.HoldfastError, match="classifier '4' asks for no gradient"):
        hf.train("fedavg", net, federation, **SHORT)


@pytest.mark.parametrize("engine", ["sequential", "lanes"])
def test_weights_that_are_one_tensor_stay_so(federation, engine, tmp_path):
    net = two_layers()
    net[2].weight = net[0].weight
    run = hf.train("fedavg", net, federation, engine=engine, out=tmp_path, **SHORT)
    assert run.model[0].weight is run.model[2].weight
    assert not torch.equal(run.model[0].weight, net[0].weight)
    assert (tmp_path / "model.safetensors").exists()


def test_the_users_module_is_left_as_it_was(federation):
    net = two_layers()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    hf.train("fedavg", net, federation, precision="float64", **SHORT)
    assert all(torch.equal(net.state_dict()[k], v) for k, v in before.items())
    assert all(v.dtype == torch.float32 for v in net.state_dict().values())


def test_a_classifier_alone(federation):
    assert hf.train("fedfa", nn.Linear(6, 3), federation, **SHORT).accuracy > 0


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(x if x.sum() > 0 else -x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.over = nn.GRU(1, 4, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.over(x[..., None])[0][:, -1])


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(F.dropout(x, 0.2, self.training))


@pytest.mark.parametrize("model", [Branches, Recurrent, Dropping])
def test_what_cannot_train_as_lanes_trains_one_by_one(federation, model):
    with pytest.warns(hf.HoldfastWarning, match=r"cannot train as lanes \(.+\); its clients train one after"):
        run = hf.train("fedavg", model(), federation, **SHORT)
    assert run.experiment["engine"] == "sequential"
    with pytest.raises(hf.HoldfastError, match=r"cannot train as lanes .*; use engine 'sequential'"):
        hf.train("fedavg", model(), federation, engine="lanes", **SHORT)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(x), x


@pytest.mark.parametrize(
    ("model", "said"),
    [(Unused, "does not use its layer 'spare', the last Linear"), (Two, "turns one sample into a tuple")],
)
def test_a_model_that_is_not_as_it_must_be(federation, model, said):
    with pytest.raises(hf.HoldfastError, match=said):
        hf.train("fedavg", model(), federation, **SHORT)


@dataclass(frozen=True)
class Mine(hf.FedAvg):
    """Of the user's own, without a name."""

    name: ClassVar[str] = ""


def test_a_run_with_a_method_of_ones_own_says_how_it_goes_on(tmp_path):
    federation = hf.federate(hf.load("digits"), hf.IID(), clients=4)
    hf.train(Mine(), "linear", federation, out=tmp_path, **SHORT)
    with pytest.raises(hf.HoldfastError, match=r"the method of this run came from Python.*resume=True"):
        hf.Experiment.from_file(tmp_path / "experiment.yaml")
    assert hf.Run.open(tmp_path).experiment["method"] == {"name": "Mine", "own": True}
    hf.train(Mine(), "linear", federation, out=tmp_path, resume=True, **SHORT)
