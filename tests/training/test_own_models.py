"""Modules and methods of the user's own: frozen, tied, or unfit for lanes."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.engine.evaluation import TestSet
from holdfast.training.session import Training

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
DATA = hf.Dataset.from_arrays(X, Y, X[:30], Y[:30])
SHORT = {"rounds": 2, "local_epochs": 2, "batch_size": 5, "lr": 0.1, "evaluate_locals": False}


@pytest.fixture
def federation():
    return hf.federate(DATA, hf.IID(), clients=4, seed=0)


def two_layers(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6, bias=bias), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
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


def test_a_frozen_layer_is_refused_as_the_classifier(federation):
    net = two_layers()
    net[4].requires_grad_(False)
    with pytest.raises(hf.HoldfastError, match="classifier '4' requires no gradient"):
        hf.train("fedavg", net, federation, classifier="4", **SHORT)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
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


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.batches += 1
        return self.last(x)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def own_norm():
    return nn.Sequential(nn.Linear(6, 4), OwnNorm(4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("model", [Branches, Recurrent, Dropping, Counting, own_norm])
def test_what_cannot_train_as_lanes_trains_one_by_one(federation, model):
    with pytest.warns(
        hf.HoldfastWarning, match=r"cannot train on the vectorized engine \(.+\); its clients train one after"
    ):
        run = hf.train("fedavg", model(), federation, **SHORT)
    assert run.experiment["engine"] == "sequential"
    with pytest.raises(
        hf.HoldfastError, match=r"cannot train on the vectorized engine .*; use engine 'sequential'"
    ):
        hf.train("fedavg", model(), federation, engine="vectorized", **SHORT)


class Words(nn.Module):
    """Samples that are indices."""

    def __init__(self, converts):
        super().__init__()
        self.converts, self.words, self.last = converts, nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.words(x.long() if self.converts else x).mean(1))


@pytest.mark.parametrize(("dtype", "converts"), [(int, False), (int, True), (float, True)])
def test_indices_may_be_integers_or_floats_that_a_model_makes_indices(dtype, converts):
    x = np.random.default_rng(0).integers(0, 11, (30, 7)).astype(dtype)
    data = hf.Dataset.from_arrays(x, Y[:30], x[:9], Y[:9])
    federation = hf.federate(data, hf.IID(), clients=3, seed=0)
    one, other = (
        hf.train("fedavg", Words(converts), federation, engine=engine, **SHORT).experiment["engine"]
        for engine in ("sequential", "auto")
    )
    assert (one, other) == ("sequential", "vectorized")


def test_floats_are_no_indices():
    x = np.random.default_rng(0).integers(0, 11, (30, 7)).astype(float)
    data = hf.Dataset.from_arrays(x, Y[:30], x[:9], Y[:9])
    federation = hf.federate(data, hf.IID(), clients=3, seed=0)
    with pytest.raises(hf.HoldfastError, match=r"samples are floats: x.long\(\) makes indices of them"):
        hf.train("fedavg", Words(converts=False), federation, **SHORT)


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
    [
        (Unused, "does not call its layer 'spare', the last Linear"),
        (Two, "output for one sample is a tuple"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
            "the weight of the model's classifier '0' is computed from other parameters",
        ),
    ],
)
def test_a_model_that_is_not_as_it_must_be(federation, model, said):
    with pytest.raises(hf.HoldfastError, match=said):
        hf.train("fedavg", model(), federation, **SHORT)


def test_a_run_with_a_method_that_no_file_leads_to_says_how_it_goes_on(tmp_path):
    @dataclass(frozen=True)
    class Mine(hf.FedAvg):
        """Of the user's own, without a name."""

        name: ClassVar[str] = ""

    federation = hf.federate(hf.load("digits"), hf.IID(), clients=4)
    hf.train(Mine(), "linear", federation, out=tmp_path, **SHORT)
    with pytest.raises(hf.HoldfastError, match=r"the method of this run is a Python object.*resume=True"):
        hf.Experiment.from_file(tmp_path / "experiment.yaml")
    assert hf.Run.open(tmp_path).experiment["method"] == {"name": "Mine", "own": True}
    hf.train(Mine(), "linear", federation, out=tmp_path, resume=True, **SHORT)


@dataclass(frozen=True)
class Shaped(hf.Method):
    name: ClassVar[str] = "shaped"
    shape: object = None


@pytest.mark.parametrize("own", [Shaped, lambda shape: hf.Stack(hf.FedProx(), Shaped(shape))])
def test_what_a_method_is_made_of_can_be_written_down(federation, own):
    with pytest.raises(
        hf.HoldfastError, match=r"shaped: shape is the function <lambda>; .* they must be numbers"
    ):
        hf.train(own(lambda x: x), "linear", federation, **SHORT)
    run = hf.train(own((np.float32(2), torch.ones(1))), "linear", federation, **SHORT)
    assert "'shape': [2.0, [1.0]]" in str(run.experiment["method"])


@dataclass(frozen=True)
class Says(hf.Method):
    """A method one of whose hooks gives what it should not."""

    name: ClassVar[str] = "says"
    hook: str = ""
    said: ClassVar[object] = None

    def init_server_state(self, context):
        return self.said if self.hook == "init_server_state" else {}

    def broadcast(self, server):
        return self.said if self.hook == "broadcast" else {}

    def broadcast_to(self, server, client):
        return self.said if self.hook == "broadcast_to" else {}

    def client_init(self, payload, state, client):
        return self.said if self.hook == "client_init" else {}

    def client_final(self, params, carry, client):
        return {}, self.said if self.hook == "client_final" else {}

    def aggregate(self, server, mean, sums, context):
        return mean, self.said if self.hook == "aggregate" else server.state

    def update(self, server, sums, uploads, context):
        return self.said if self.hook == "update" else server.state


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    "hook",
    ["init_server_state", "broadcast", "broadcast_to", "client_init", "client_final", "aggregate", "update"],
)
@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"seen": 3}, "a int as 'seen'"),
        ({"a": {"seen": np.zeros(2)}}, "a ndarray as 'seen'"),
        ({0: torch.zeros(2)}, "a dictionary with the key 0"),
        ({"a/b": torch.zeros(2)}, "a dictionary with the key 'a/b'"),
        ([torch.zeros(2)], "a list"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_named(
    federation, tmp_path, monkeypatch, engine, hook, said, named
):
    """At once, and not at the first checkpoint, when it must be written down."""
    monkeypatch.setattr(Says, "said", said)
    with pytest.raises(hf.HoldfastError, match=f"says: {hook} returns {named}; .* dictionary of tensors"):
        hf.train(Says(hook), "linear", federation, engine=engine, out=tmp_path / "run", **SHORT)


@dataclass(frozen=True)
class Halves(hf.Method):
    name: ClassVar[str] = "halves"
    hook: str = "upload_params"

    def upload_params(self, params, carry, client):
        return {} if self.hook == "upload_params" else params

    def aggregate(self, server, mean, sums, context):
        return (dict(list(mean.items())[:1]), {}) if self.hook == "aggregate" else (mean, {})


def test_a_model_with_other_parameters_is_not_the_clients_fault(federation):
    with pytest.raises(
        hf.HoldfastError, match=r"client 0: wrong keys.*; uploaded parameters must have the names"
    ):
        hf.train(Halves(), "linear", federation, **SHORT)
    with pytest.raises(hf.HoldfastError, match="halves: aggregate must return exactly the parameters"):
        hf.train(Halves("aggregate"), "linear", federation, **SHORT)


class Tied(nn.Module):
    """A classifier whose weight is the embedding's too, as language models have it."""

    def __init__(self, embedding_first):
        super().__init__()
        torch.manual_seed(0)
        embedding, last = nn.Embedding(3, 6), nn.Linear(6, 3, bias=False)
        last.weight = embedding.weight
        for name in ("embedding", "last") if embedding_first else ("last", "embedding"):
            self.add_module(name, {"embedding": embedding, "last": last}[name])

    def forward(self, x):
        return self.last(x + self.embedding.weight.sum(0))


@pytest.mark.parametrize("embedding_first", [True, False])
def test_a_classifier_may_share_its_weight(embedding_first):
    net = Tied(embedding_first)
    one = hf.federate(DATA, [range(60)])
    run = hf.train("fedavg", net, one, rounds=1, batch_size=60, lr=0.1, precision="float64")
    w = net.last.weight.detach().double().requires_grad_()
    F.cross_entropy((torch.tensor(X).double() + w.sum(0)) @ w.T, torch.tensor(Y)).backward()
    assert run.model.last.weight is run.model.embedding.weight
    torch.testing.assert_close(run.model.last.weight.detach(), w.detach() - 0.1 * w.grad)


@pytest.mark.parametrize("embedding_first", [True, False])
def test_a_head_that_is_also_part_of_the_body_is_tested_in_both_places(federation, embedding_first):
    """Models that differ in their heads alone share what is before it; not where the head is there too."""
    training = Training(hf.FedAvg(), Tied(embedding_first), federation, Settings(rounds=1), device="cpu")
    test, network = TestSet(DATA, training.context), training.context.network
    torch.manual_seed(1)
    heads = [{network.head.weight: torch.randn(3, 6)} for _ in range(4)]
    models = [({**network.params, **head}, network.buffers) for head in heads]
    found = [each.accuracy for each in test.evaluate_many(models, [lambda out: out.logits] * 4)]
    x, wanted = torch.tensor(X[:30]), []
    for (w,) in (head.values() for head in heads):
        wanted.append(float((((x + w.sum(0)) @ w.T).argmax(1) == torch.tensor(Y[:30])).float().mean()))
    assert found == pytest.approx(wanted)


def test_a_model_with_lazy_layers(federation):
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(hf.HoldfastError, match=r"lazy layers, .*; call it once"):
        hf.train("fedavg", net, federation, **SHORT)
    net(torch.zeros(2, 6))
    assert hf.train("fedavg", net, federation, **SHORT).accuracy > 0


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.other = nn.Linear(6, 3), nn.Linear(6, 5)

    def forward(self, x):
        return self.main(x) + self.other(x).mean()


def test_one_of_two_heads_is_the_classifier(federation):
    with pytest.raises(hf.HoldfastError, match=r"has 5 outputs, .* 3 classes; .* classifier='main'"):
        hf.train("fedavg", TwoHeads(), federation, **SHORT)
    assert hf.train("fedavg", TwoHeads(), federation, classifier="main", **SHORT).accuracy > 0


@pytest.mark.parametrize(
    ("net", "draws"),
    [
        (Dropping(), True),
        (nn.Sequential(nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True),
                       nn.Flatten(), nn.Linear(6, 3)), True),
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)), False),
    ],
    ids=["functional", "attention", "layer"],
)  # fmt: skip
def test_a_model_that_the_seed_does_not_decide_is_told_of(federation, net, draws):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hf.train("fedavg", net, federation, engine="sequential", **SHORT)
    assert any("the same seed will not give the same bits" in str(each.message) for each in said) == draws
    if not draws:
        assert torch.equal(torch.rand(3), expected)  # looking did not move the generator of others


@pytest.mark.parametrize(
    ("last", "said"), [(nn.Identity(), False), (nn.LogSoftmax(-1), False), (nn.Softmax(-1), True), (nn.Tanh(), True)]
)  # fmt: skip
def test_what_follows_the_classifier_is_told_of(federation, last, said):
    net = nn.Sequential(two_layers(), last)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hf.train("fedavg", net, federation, **SHORT)
    assert any("something follows the model's classifier" in str(each.message) for each in told) == said


def test_a_run_does_not_go_on_with_another_module(federation, tmp_path):
    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    def network(width):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

    def run(net, **more):
        return hf.train("fedntd", net, federation, **SHORT | {"rounds": 4, "checkpoint_seconds": 0} | more)

    with pytest.raises(KeyboardInterrupt):
        run(network(4), out=tmp_path, on_round=stop)
    for other, said in (
        (network(5), r"another model: '0\.weight' was of shape \(4, 6\), now it is of shape \(5, 6\)"),
        (
            nn.Sequential(nn.Linear(6, 3)),
            r"another model: '0\.weight' was of shape \(4, 6\), now it is of shape",
        ),
        (
            nn.Sequential(*network(4)[:2], nn.BatchNorm1d(4), nn.Linear(4, 3)),
            r"'2\.weight' was of shape \(3, 4\)",
        ),
        (
            nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)),
            r"'2\.weight' was of shape \(3, 4\), now it is absent",
        ),
    ):
        with pytest.raises(hf.HoldfastError, match=said):
            run(other, out=tmp_path, resume=True)
    assert weights_of(run(network(4), out=tmp_path, resume=True)) == weights_of(run(network(4)))


def weights_of(run):
    return {name: value.tolist() for name, value in run.model.state_dict().items()}
