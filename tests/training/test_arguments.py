"""What the user gives is of the wrong kind, or cannot be: one sentence names it and what would be right."""

import numpy as np
import pytest
from torch import nn

import holdfast as hf

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
DATA = hf.Dataset.from_arrays(X, Y, X[:30], Y[:30])
SHORT = {"rounds": 2, "local_epochs": 2, "batch_size": 5, "lr": 0.1, "evaluate_locals": False}


@pytest.fixture
def federation():
    return hf.federate(DATA, hf.IID(), clients=4, seed=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": hf.FedAvg}, r"method is the class FedAvg; it must be an instance, such as FedAvg\(\)"),
        ({"method": 3}, "method is a int"),
        ({"model": hf.models.mlp}, r"model is the function mlp; .* models\.mlp\(64\)"),
        ({"model": nn.Linear}, "model is the class Linear"),
        (
            {"model": lambda width: nn.Linear(6, width)},
            "the function <lambda>, which requires width; a model function is called",
        ),
        ({"federation": DATA}, "federation is a Dataset; it must come from holdfast.federate"),
        ({"rounds": "3"}, "rounds is '3'; it must be a whole number"),
        ({"rounds": 2.0}, "rounds is 2.0; it must be a whole number"),
        ({"rounds": True}, "rounds is True; it must be a whole number"),
        ({"lr": "0.1"}, "lr is '0.1'; it must be a number"),
        ({"lr": float("inf")}, "lr is inf; it must be a number"),
        ({"clients_per_round": 2.5}, "clients_per_round is 2.5; it must be a whole number"),
        ({"evaluate_locals": 1}, "evaluate_locals is 1; it must be true or false"),
        ({"local_test_samples": 0}, "local_test_samples is 0; it must be at least 1 sample"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds is -1.0; it must be at least 0"),
        ({"min_clients": 5}, "min_clients is 5, but a round has 4 clients; it must be at most 4"),
        ({"parallel_clients": 0, "engine": "vectorized"}, "parallel_clients is 0; it must be at least 1"),
        (
            {"parallel_clients": 2, "engine": "sequential"},
            "parallel_clients is given, .* use engine 'vectorized'",
        ),
        ({"device": "mps"}, "device is 'mps'; it must be auto, cpu or cuda"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"resume": True}, "resume needs out"),
        ({"resume": "yes"}, "resume is 'yes'; it must be true or false"),
        ({"progress": "no"}, "progress is 'no'; it must be true or false"),
        ({"device": 0}, "device is 0; it must be text"),
        ({"parallel_clients": "2"}, "parallel_clients is '2'; it must be a whole number"),
        ({"classifier": ["2"]}, r"classifier is \['2'\]; it must be text"),
        ({"out": 1}, r"out is a int; it must be the path of a directory, such as 'runs/x'"),
        ({"on_round": "print"}, "on_round is a str; it must be a function"),
        (
            {"trackers": "csv"},
            r"trackers holds a str; it must be a list of trackers, .*tracker\('csv', 'runs/x'\)",
        ),
        ({"trackers": [1]}, "trackers holds a int"),
        ({"task": 1}, "task is 1; it must be text or a mapping"),
        ({"dp": 8}, "dp is 8; it must be text or a mapping"),
        ({"dp_samples": [8]}, r"dp_samples is \[8\]; it must be text or a mapping"),
        ({"secure": True}, "secure is True; it must be text or a mapping"),
        ({"robust": 2}, "robust is 2; it must be text or a mapping"),
        ({"attack": 0.2}, r"attack is 0\.2; it must be text or a mapping"),
        ({"compress": 8}, "compress is 8; it must be text or a mapping"),
    ],
)
def test_one_sentence_on_what_is_wrong(federation, changes, said):
    given = {"method": "fedavg", "model": "linear", "federation": federation} | SHORT | changes
    with pytest.raises(hf.HoldfastError, match=said):
        hf.train(**given)


def test_numbers_of_numpy_are_numbers(federation):
    run = hf.train("fedavg", "linear", federation, **SHORT | {"rounds": np.int64(1), "lr": np.float32(0.5)})
    assert (run.experiment["rounds"], run.experiment["lr"]) == (1, 0.5)


def test_more_clients_than_there_are(federation):
    with pytest.warns(
        hf.HoldfastWarning, match="clients_per_round is 9, but there are 4 clients: all of them take part"
    ):
        hf.train("fedavg", "linear", federation, clients_per_round=9, **SHORT)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: hf.federate("digits", hf.IID(), clients=2),
            r"dataset is a str; .* holdfast\.load\('digits'\)",
        ),
        (
            lambda: hf.federate(DATA, hf.IID, clients=2),
            r"partition is the class IID; .*holdfast\.Dirichlet\(",
        ),
        (
            lambda: hf.federate(DATA, {"Bern": [0], "Oslo": [1]}),
            "partition is a dict; .* a list with the sample",
        ),
        (
            lambda: hf.Stack((hf.FedNTD(), hf.FedProx())),
            r"a part of a stack is a tuple; .* Stack\(FedNTD\(\), ",
        ),
        (lambda: hf.Stack("fedntd", "fedprox"), "a part of a stack is a str"),
        (lambda: hf.stream(DATA, [[0], [1]], clients=2), r"partition is a list; .*holdfast\.ClassShards\("),
        (lambda: hf.federate(DATA, hf.IID(), clients="5"), "clients is '5'; it must be a whole number"),
        (lambda: hf.federate(DATA, hf.IID(), clients=2, seed=1.5), "seed is 1.5; it must be a whole number"),
        (lambda: hf.federate(DATA, hf.IID(), clients=2, long_tail=0.1), r"a float; .* holdfast\.LongTail"),
        (lambda: hf.federate(DATA, hf.IID(), clients=2, skew={"noise": 1}), r"a dict; .*FeatureSkew"),
        (lambda: hf.federate(DATA, hf.IID(), clients=4).client(4), "no client 4: the clients are 0 to 3"),
        (lambda: hf.federate(DATA, hf.IID(), clients=4).client(-1), "no client -1"),
        (lambda: hf.stream(DATA, hf.IID(), clients=2, tasks_per_client="5"), "tasks_per_client is '5'"),
        (lambda: hf.FedNTD(beta="1"), "fedntd: beta is '1'; it must be a number"),
        (lambda: hf.FedMLP(use_prototype=1), "fedmlp: use_prototype is 1; it must be true or false"),
    ],
)
def test_one_sentence_on_what_is_of_the_wrong_kind(make, said):
    with pytest.raises(hf.HoldfastError, match=said):
        make()
