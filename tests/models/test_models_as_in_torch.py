"""A user's modules train as in plain PyTorch, on both engines, with any kind of layers."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.data.federation import Federation
from holdfast.models.network import Network

EPOCHS, ROUNDS, LR, MOMENTUM, DECAY = 3, 2, 0.05, 0.9, 1e-3
VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (5, 4), (2, 8, 8), (1, 4, 4, 4)


class Classifier(nn.Module):
    """A body under a linear layer."""

    def __init__(self, *body, features):
        super().__init__()
        self.body, self.last = nn.Sequential(*body), nn.Linear(features, 3)

    def forward(self, x):
        return self.last(self.body(x).flatten(1))


class Attention(nn.Module):
    """Attention to a class token, or across the samples of a batch."""

    def __init__(self, across):
        super().__init__()
        self.across, width = across, 6 if across else 4
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = x[None] if self.across else torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        seen = self.attention(x, x, x, need_weights=False)[0]
        return self.last(seen[0] if self.across else seen[:, 0]) + 0 * self.token.sum()


class Whitened(nn.Module):
    """Batch statistics computed by hand; with a memory, buffers that are reassigned."""

    def __init__(self, memory):
        super().__init__()
        self.memory, self.last = memory, nn.Linear(6, 3)
        self.register_buffer("middle", torch.zeros(6))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if not self.memory:
            return self.last((x - x.mean(0)) / (x.std(0, correction=0) + 1))
        if self.training:
            self.middle = 0.9 * self.middle + 0.1 * x.detach().mean(0)
            self.batches = self.batches + 1
        return self.last(x - self.middle)


class Counted(nn.Module):
    """A buffer that counts calls, which padding does not affect."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.batches = self.batches + 1
        return self.last(x)


class Tapped(nn.Module):
    """Reads the outputs between the layers of a Sequential, by index, by slice and by name."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU()
        )
        self.last = nn.Linear(4 * (36 + 9 + 4) + 4 * 36, 3)

    def forward(self, x):
        seen = [self.body[:2](x)]
        for at, layer in enumerate(self.body):
            x = layer(x)
            if at in (1, 2, 4):
                seen.append(x)
        return self.last(torch.cat([one.flatten(1) for one in seen], 1))


class PartlyUsed(nn.Module):
    """Parameters without gradient: never called, called under no_grad, or detached."""

    def __init__(self):
        super().__init__()
        self.spare, self.token = nn.Conv2d(1, 1, 3), nn.Parameter(torch.ones(3))
        self.without, self.detached, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        with torch.no_grad():
            x = self.without(x)
        return self.last(self.detached(x).detach())


class Branches(nn.Module):
    """One of two branches, chosen by the values of the samples."""

    def __init__(self):
        super().__init__()
        self.this, self.that, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.relu(self.this(x) if x.sum() > 0 else self.that(x)))


class Scaled(nn.Module):
    """Logits times a number that is learned."""

    def __init__(self):
        super().__init__()
        self.last, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(x) * self.scale


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.over, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.over(x)[0][:, -1])


def twice(norm):
    return Classifier(nn.Linear(6, 6), norm, nn.ReLU(), nn.Linear(6, 6), norm, features=6)


MODELS = {  # the shape of a sample, the model, and whether lanes can train it
    "batch norm": (IMAGE, lambda: Classifier(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1), features=36), True),
    "batch norm without weights": (IMAGE, lambda: Classifier(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False), features=144), True),
    "batch norm without statistics": (IMAGE, lambda: Classifier(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), features=144), True),
    "batch norm of sequences": (SEQUENCE, lambda: Classifier(nn.BatchNorm1d(5), features=20), True),
    "batch norm of volumes": (VOLUME, lambda: Classifier(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), features=54), True),
    "one batch norm twice": (VECTOR, lambda: twice(nn.BatchNorm1d(6)), False),
    "instance norm": (IMAGE, lambda: Classifier(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), features=144), False),
    "layer and group norm": (IMAGE, lambda: Classifier(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(144), nn.GELU(), features=144), True),
    "weight norm": (VECTOR, lambda: Classifier(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.PReLU(), features=5), True),
    "spectral norm": (VECTOR, lambda: Classifier(
        nn.utils.spectral_norm(nn.Linear(6, 5)), nn.ReLU(), features=5), False),
    "transformer": (SEQUENCE, lambda: Classifier(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), features=20), True),
    "attention": (SEQUENCE, lambda: Attention(across=False), True),
    "attention across the batch": (VECTOR, lambda: Attention(across=True), False),
    "batch statistics by hand": (VECTOR, lambda: Whitened(memory=False), False),
    "a mean that is remembered": (VECTOR, lambda: Whitened(memory=True), False),
    "batches that are counted": (VECTOR, Counted, True),
    "recurrent": (SEQUENCE, Recurrent, False),
    "layers one by one": (IMAGE, Tapped, True),
    "parameters without gradients": (VECTOR, PartlyUsed, True),
    "a number": (VECTOR, Scaled, True),
    "branches": (VECTOR, Branches, False),
    "odd convolutions": (IMAGE, lambda: Classifier(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect", groups=2), nn.ConvTranspose2d(4, 2, 2, 2), nn.ReLU(),
        nn.MaxPool2d(3, ceil_mode=True), features=72), True),
}  # fmt: skip


def dataset(shape, samples):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(samples, *shape)).astype(np.float32), np.arange(samples) % 3
    return hf.Dataset.from_arrays(x, y, x[:9], y[:9]), torch.from_numpy(x).double(), torch.from_numpy(y)


def trained(net, federation, engine, **schedule):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf.HoldfastWarning)
        return hf.train(
            "fedavg", net, federation, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, engine=engine,
            precision="float64", rounds=ROUNDS, local_epochs=EPOCHS, **schedule,
        )  # fmt: skip


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.allclose(got[name].double(), value.double(), rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_a_client_alone_trains_as_in_plain_torch(name, engine):
    shape, make, as_lanes = MODELS[name]
    data, x, y = dataset(shape, 12)
    torch.manual_seed(0)
    net = make()
    plain = copy.deepcopy(net).double().train()
    for _ in range(ROUNDS):
        optimiser = torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        for _ in range(EPOCHS):
            optimiser.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimiser.step()
    run = trained(net, hf.federate(data, hf.IID(), clients=1, seed=0), engine, batch_size=12)
    assert_same(run.model.state_dict(), plain.state_dict())
    right = plain.eval()(x[:9]).argmax(-1) == y[:9]
    assert run.accuracy == pytest.approx(right.double().mean().item())
    assert run.experiment["engine"] == ("vectorized" if as_lanes and engine == "auto" else "sequential")


@pytest.mark.parametrize("name", MODELS)
def test_clients_of_unequal_size_train_alike_on_both_engines(name):
    shape, make, _ = MODELS[name]
    data, *_ = dataset(shape, 38)
    federation = Federation(data, np.arange(38), np.array([0, 9, 21, 38]))  # last batches of 4, 2 and 2
    torch.manual_seed(0)
    net = make()
    one, other = (
        trained(copy.deepcopy(net), federation, engine, batch_size=5).model.state_dict()
        for engine in ("sequential", "auto")
    )
    assert_same(one, other)


def test_parameters_without_gradient_are_reported_and_not_sent():
    data, *_ = dataset(VECTOR, 12)
    federation = hf.federate(data, hf.IID(), clients=2, seed=0)
    with pytest.warns(
        hf.HoldfastWarning, match="no gradient reaches detached.bias, detached.weight, spare.bias"
    ):
        run = hf.train("scaffold", PartlyUsed(), federation, rounds=1)
    assert run.records[0]["bytes_up"] == 2 * 2 * 4 * (6 * 3 + 3)  # the classifier, and its control variate


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrappers_of_a_module_are_removed(wrap):
    data, *_ = dataset(VECTOR, 12)
    federation = hf.federate(data, hf.IID(), clients=2, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    plain, wrapped = (trained(model, federation, "auto", batch_size=5).model for model in (net, wrap(net)))
    assert type(wrapped) is nn.Sequential
    assert_same(wrapped.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_activation_of_any_model_is_found(name):
    shape, make, _ = MODELS[name]
    network = Network(make())
    assert network.max_activation_size(torch.zeros(2, *shape)) >= network.head.features
    assert not any(module._forward_hooks for module in network.net.modules())
