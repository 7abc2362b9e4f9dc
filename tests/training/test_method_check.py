"""`check_method`: wrong methods are named with what is wrong; methods that are right pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.methods import METHODS

QUICK = {"creff": "creff:epochs=3"}
COUNTER: list[int] = []


@pytest.mark.parametrize("name", [*METHODS, "fedntd+fedprox+fedavgm"])
def test_built_in_methods_pass(name: str) -> None:
    found = hf.check_method(QUICK.get(name, name))
    assert found
    assert len(found.passed) == 9


def plain(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out.logits, batch.y)


class Mine(hf.Method):
    """The base of the methods below."""


@dataclass(frozen=True)
class WithSteps(Mine):
    steps: int = 3  # an option whose name is almost a hook's


class PlainLoss(Mine):
    def task_loss(self, out: Any, batch: Any, carry: Any) -> Tensor:
        return plain(out, batch)


class Decorrelated(Mine):
    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        centred = out.features - out.features.mean(0)
        return (centred.T @ centred).square().mean()  # type: ignore[no-any-return]


class RunningState(Mine):
    """States of clients and of the server, in float32, which float64 training refuses."""

    def init_client_state(self, client: Any) -> Any:
        return {"seen": torch.zeros(4)}

    def client_final(self, params: Any, carry: Any, client: Any) -> Any:
        counts = client.label_counts.float()
        return {"counts": counts}, {"seen": counts}

    def init_server_state(self, context: Any) -> Any:
        return {"total": torch.zeros(4)}

    def update(self, server: Any, sums: Any, uploads: Any, context: Any) -> Any:
        return {"total": server.state["total"] + sums["counts"]}


@pytest.mark.parametrize("kind", [PlainLoss, Decorrelated, RunningState, WithSteps])
def test_methods_of_ones_own_pass(kind: type[Mine]) -> None:
    assert hf.check_method(kind())


class UnmaskedMean(Mine):
    uses_mask = True

    def task_loss(self, out: Any, batch: Any, carry: Any) -> Tensor:
        return plain(out, batch)


class BatchStatistics(Mine):
    uses_mask = True

    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        return (out.features - out.features.mean(0)).square().mean()  # type: ignore[no-any-return]


class InPlace(Mine):
    def edit_gradient(self, grads: Any, carry: Any, local: Any) -> Any:
        return {name: g.add_(local.params[name], alpha=0.1) for name, g in grads.items()}


class Branching(Mine):
    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        penalty = out.logits.square().mean()
        return penalty if penalty > 1 else 2 * penalty  # type: ignore[no-any-return]


class GrowingState(Mine):
    def init_client_state(self, client: Any) -> Any:
        return {"history": torch.zeros(0)}

    def client_final(self, params: Any, carry: Any, client: Any) -> Any:
        return {}, {"history": torch.ones(3 * client.round)}


class GrowingServer(Mine):
    def init_server_state(self, context: Any) -> Any:
        return {"history": torch.zeros(1)}

    def update(self, server: Any, sums: Any, uploads: Any, context: Any) -> Any:
        return {"history": torch.cat([server.state["history"], torch.ones(1)])}


class OwnDraws(Mine):
    def client_init(self, payload: Any, state: Any, client: Any) -> Any:
        return {"noise": torch.randn(4, dtype=client.context.dtype)}

    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        return (out.logits * carry["noise"]).mean()  # type: ignore[no-any-return]


class OwnGenerator(Mine):
    def client_init(self, payload: Any, state: Any, client: Any) -> Any:
        return {"noise": client.context.scalar(np.random.default_rng().normal())}

    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        return out.logits.mean() * carry["noise"]  # type: ignore[no-any-return]


class WrongShape(Mine):
    def client_final(self, params: Any, carry: Any, client: Any) -> Any:
        return {"means": client.x.flatten(1).mean(1)}, {}


class WrittenBuffer(Mine):
    def client_final(self, params: Any, carry: Any, client: Any) -> Any:
        client.buffers["2.running_mean"].zero_()
        return {}, {}


class LiveTeacher(Mine):
    teachers = ("own",)

    def teacher(self, name: str, payload: Any, state: Any, client: Any) -> Any:
        return {k: p.to(client.context.dtype) for k, p in client.context.network.net.named_parameters()}

    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        return (out.logits - batch.teacher["own"].logits).square().mean()  # type: ignore[no-any-return]


class NarrowSums(Mine):
    def client_final(self, params: Any, carry: Any, client: Any) -> Any:
        return {"counts": client.label_counts.to(torch.uint8)}, {}


class NarrowState(Mine):
    def init_client_state(self, client: Any) -> Any:
        return {"rounds": torch.zeros(1, dtype=torch.int8)}

    def client_final(self, params: Any, carry: Any, client: Any) -> Any:
        return {}, {"rounds": torch.full((1,), client.round, dtype=torch.int8)}


class KeepsLastClient(Mine):
    """Each client's loss depends on the client that was trained before it."""

    def client_weight(self, client: Any) -> float:
        COUNTER.append(client.id)
        return 1.0 + len(COUNTER) % 7


@dataclass(frozen=True)
class KeepsItself(Mine):
    """A fresh copy behaves the same, so that only the order and a resumed run show it."""

    calls: list[int] = None  # type: ignore[assignment]

    def check(self) -> None:
        object.__setattr__(self, "calls", [])

    def client_weight(self, client: Any) -> float:
        self.calls.append(1)
        return float(len(self.calls))


class Lost(Mine):
    def upload_params(self, params: Any, carry: Any, client: Any) -> Any:
        return {name: p / (client.id != 1) for name, p in params.items()}


class Deviation(Mine):
    """A loss with a standard deviation, which a batch of one sample does not have."""

    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        return ((out.features - out.features.mean(0)) / (1 + out.features.std(0))).square().mean()  # type: ignore[no-any-return]


class Misspelt(Mine):
    def task_los(self, out: Any, batch: Any, carry: Any) -> Tensor:
        return plain(out, batch)


class MisspeltAttribute(Mine):
    use_mask = True


WRONG: list[tuple[type[Mine], str]] = [
    (UnmaskedMean, r" gives different results when many clients train in parallel: .* differ.*batch\.mask marks"),
    (BatchStatistics, r" gives different results when many clients train in parallel: .* differ.*batch\.mask"),
    (InPlace, r": edit_gradient changes grads\['1\.weight'\] in place; change a copy"),
    (Branching, r": loss branches on a tensor's value .*use torch\.where"),
    (GrowingState, r"client \d's state grows in every round, to 3, 6, 9 values"),
    (GrowingServer, r"the server's state grows in every round, to 2, 3, 4 values"),
    (OwnDraws, r": client_init draws from a global random generator; draw with client\.generator"),
    (OwnGenerator, " gives other results when it is trained again"),
    (WrongShape, ": client_final returns 'means' with shape"),
    (WrittenBuffer, r"client_final changes client\.buffers\['2\.running_mean'\] in place"),
    (LiveTeacher, r"teacher returns '1\.weight' with a gradient: training would flow through a value that must stay"),
    (NarrowSums, r"client_final returns 'counts' as torch\.uint8 .* overflows"),
    (NarrowState, r"client \d's state has 'rounds' as torch\.int8, .* overflows; use int64"),
    (KeepsLastClient, " gives other results when it is trained again: it keeps values outside"),
    (KeepsItself, " gives other results when the clients of a round are trained in another order"),
    (Deviation, ": training fails where a last batch has one sample, .* left out: not finite"),
    (Misspelt, r" defines task_los, which is neither a hook nor an attribute of a method; did you mean task_loss\?"),
    (MisspeltAttribute,
     r" defines use_mask, which is neither a hook nor an attribute of a method; did you mean uses_mask\?"),
    (Lost, r": the upload of client 1 in round 1 is left out: "),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sentence"), WRONG, ids=[kind.__name__ for kind, _ in WRONG])
def test_wrong_methods_are_caught(kind: type[Mine], sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence) as raised:
        hf.check_method(kind())
    assert "\n" not in str(raised.value)


def test_a_misspelt_hook_warns_before_training() -> None:
    federation = hf.federate(hf.load("digits"), hf.IID(), clients=3)
    with pytest.warns(hf.HoldfastWarning, match="Misspelt defines task_los, .* did you mean task_loss"):
        hf.train(hf.FedNTD() + Misspelt(), "linear", federation, rounds=1)


def test_all_problems_are_listed() -> None:
    found = hf.check_method(KeepsItself(), raise_error=False)
    assert not found
    assert [any(part in p for p in found.problems) for part in ("another order", "stopped after round 1 and")] == [
        True,
        True,
    ]  # fmt: skip
    assert str(found).startswith("KeepsItself: not correct\n  passed: ")


def test_a_model_and_data_of_ones_own() -> None:
    rng = np.random.default_rng(0)
    data = hf.Dataset.from_arrays(rng.normal(size=(60, 5)), rng.normal(size=60))
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    assert hf.check_method("fedprox", net, data)
    assert hf.check_method("feddf", "mlp:8", hf.federate(hf.load("digits"), hf.IID(), clients=3, public=0.1))
    with pytest.raises(hf.HoldfastError, match="fedntd needs classes"):
        hf.check_method("fedntd", net, data)
    with pytest.raises(hf.HoldfastError, match=r"custom has 16 training samples; the check .* at least 28"):
        hf.check_method("fedavg", None, hf.Dataset.from_arrays(rng.normal(size=(20, 5)), np.arange(20) % 2))
    with pytest.raises(hf.HoldfastError, match=r"federation is a str; it must come from holdfast\.federate"):
        hf.check_method("fedavg", None, "digits")  # type: ignore[arg-type]


class Mixing(nn.Module):
    """Each output depends on the whole batch, so that the model itself cannot be trained side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x - x.mean(0))  # type: ignore[no-any-return]


def test_a_model_that_vmap_cannot_run_is_not_the_methods_fault() -> None:
    found = hf.check_method(PlainLoss(), Mixing())
    assert found
    assert any(
        "engine sequential only (its output for a sample depends on the other" in p for p in found.passed
    )


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    hf.check_method(OwnDraws(), raise_error=False)
    assert torch.equal(torch.rand(1), expected)


MINE = """
from dataclasses import dataclass
import holdfast as hf
from torch.nn import functional as F

@dataclass(frozen=True)
class Right(hf.Method):
    def task_loss(self, out, batch, carry):
        return F.cross_entropy(out.logits, batch.y)

@dataclass(frozen=True)
class Wrong(hf.Method):
    uses_mask = True
    def task_loss(self, out, batch, carry):
        return F.cross_entropy(out.logits, batch.y)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    right = CliRunner().invoke(app, ["check", "mine.py:Right", "--model", "mlp:8", "--data", "digits"])
    assert right.exit_code == 0, right.output
    assert right.stdout.startswith("Right: correct\n  passed: ")
    wrong = CliRunner().invoke(app, ["check", "mine.py:Wrong"])
    assert wrong.exit_code == 1
    assert "  failed: Wrong gives different results when many clients train in parallel" in wrong.stdout
    refused = CliRunner().invoke(app, ["check", "mine.py:Rigth"])
    assert refused.exit_code == 2
    assert "did you mean" in refused.stderr
