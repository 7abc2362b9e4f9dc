"""The example of a method of one's own: what it says it computes, on every engine."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = {"local_epochs": 2, "lr": 0.1, "precision": "float64", "evaluate_locals": False}


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("own_method")


@pytest.fixture(scope="module")
def federation():
    return hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.3), clients=6, seed=0)


def weights(run):
    return {name: value.double().numpy() for name, value in run.model.state_dict().items()}


def test_the_servers_step_is_adams(example, federation):
    start = weights(hf.train("fedavg", "mlp:8", federation, rounds=1, **SHORT | {"lr": 1e-300}))
    mean = weights(hf.train("fedavg", "mlp:8", federation, rounds=1, **SHORT))
    found = weights(hf.train(example.FedAdam(eta=0.5), "mlp:8", federation, rounds=1, **SHORT))
    for name, value in found.items():
        step = mean[name] - start[name]
        wanted = start[name] + 0.5 * 0.1 * step / (np.sqrt(0.01 * step**2) + 1e-3)
        np.testing.assert_allclose(value, wanted, atol=1e-12)


def test_the_clients_loss_is_shifted_by_their_classes(example):
    x, y = torch.arange(12.0).view(6, 2) / 12, torch.tensor([0, 0, 0, 0, 1, 1])  # of three classes
    data = hf.Dataset.from_arrays(x, y, x, y, classes=["a", "b", "c"])
    net = torch.nn.Linear(2, 3).double()
    run = hf.train(
        example.Calibrated(tau=2.0),
        net,
        hf.federate(data, [range(6)]),
        rounds=1,
        **SHORT | {"local_epochs": 1},
    )
    logits = (
        x.double() @ net.weight.detach().T + net.bias.detach() + 2 * torch.tensor([4 / 6, 2 / 6, 1e-4]).log()
    )
    error = (logits.softmax(1) - torch.eye(3)[y]) / 6
    torch.testing.assert_close(
        run.model.bias.detach(), net.bias.detach() - 0.1 * error.sum(0), atol=1e-6, rtol=0
    )


def test_engines_agree_and_a_resumed_run_has_the_same_bits(example, federation, tmp_path):
    both = hf.Stack(example.Calibrated(), example.FedAdam())
    runs = [
        hf.train(both, "mlp:8", federation, rounds=3, engine=e, **SHORT) for e in ("sequential", "vectorized")
    ]
    for name, value in weights(runs[0]).items():
        np.testing.assert_allclose(weights(runs[1])[name], value, atol=1e-9)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    settings = SHORT | {"rounds": 3, "engine": "vectorized", "out": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        hf.train(both, "mlp:8", federation, on_round=stop, **settings)
    again = hf.train(both, "mlp:8", federation, resume=True, **settings)
    assert all(np.array_equal(weights(again)[name], value) for name, value in weights(runs[1]).items())


def test_a_private_and_attacked_federation(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        example = importlib.import_module("private_federation")
    runs = example.main(tmp_path, rounds=8)
    assert runs["attacked"].accuracy + 0.1 < runs["defended"].accuracy <= runs["plain"].accuracy
    assert runs["private"].accuracy > runs["attacked"].accuracy
    assert 7 < runs["private"].records[-1]["epsilon"] <= 8
    hostile = sum(len(record["attackers"]) for record in runs["defended"].records)
    assert example.left_out(runs["defended"]) > 0.8 * hostile
    assert "defended" in (tmp_path / "report.html").read_text()
