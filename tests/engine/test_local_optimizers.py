"""The optimisers of local training: against torch.optim, on every engine, kept between rounds, resumed, refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engine_world import CLASSES, INPUTS, federation, loop, net
from torch import nn

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.core.trees import leaves
from holdfast.engine.local_optimizer import LocalOptimizer
from holdfast.methods.base import Local, Method, Tensors, Tree
from holdfast.methods.context import RunContext

OPTIMISERS: dict[str, tuple[dict[str, Any], Any]] = {
    "nesterov": (
        {"optimizer": "sgd:nesterov=true", "momentum": 0.9},
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    ),
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adam options": (
        {"optimizer": "adam:betas=[0.8,0.95],eps=1e-3"},
        partial(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adamw": ({"optimizer": "adamw"}, torch.optim.AdamW),
    "rmsprop": ({"optimizer": "rmsprop"}, torch.optim.RMSprop),
    "rmsprop options": (
        {"optimizer": "rmsprop:alpha=0.9,eps=1e-3", "momentum": 0.8},
        partial(torch.optim.RMSprop, alpha=0.9, eps=1e-3, momentum=0.8),
    ),
    "adagrad": ({"optimizer": "adagrad:eps=1e-5"}, partial(torch.optim.Adagrad, eps=1e-5)),
}
MAIN = ("nesterov", "adam", "adamw", "rmsprop options", "adagrad")


def settings(**changes: Any) -> Settings:
    return Settings(**({"rounds": 1, "weight_decay": 0.02} | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_as_in_torch_optim(name: str, dtype: torch.dtype) -> None:
    chosen, factory = OPTIMISERS[name]
    ours = {k: torch.randn(shape, dtype=dtype) for k, shape in (("a", (3, 4)), ("b", (5,)))}
    theirs = [nn.Parameter(p.clone()) for p in ours.values()]
    reference = factory(theirs, lr=0.05, weight_decay=0.02)
    optimizer = LocalOptimizer(settings(**chosen))
    state = optimizer.new_state(ours)
    for _ in range(7):
        grads = [torch.randn_like(p) for p in theirs]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        reference.step()
        slots = {slot: list(values.values()) for slot, values in state.items()}
        optimizer.step_(list(ours.values()), grads, slots, lr=0.05)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for p, truth in zip(ours.values(), theirs, strict=True):
        assert torch.allclose(p, truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rates", ["one", "by parameter"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_lanes_at_different_steps(name: str, rates: str) -> None:
    """Three lanes, which begin at step 0, 2 and 4 of seven; a rate of 0 leaves a parameter and its state alone."""
    chosen, factory = OPTIMISERS[name]
    shapes = {"a": (2, 3), "b": (4,)}
    first = (0, 2, 4)
    begin = {k: torch.randn((3, *shape), dtype=torch.float64) for k, shape in shapes.items()}
    stacked = {k: v.clone() for k, v in begin.items()}
    optimizer = LocalOptimizer(settings(**chosen))
    state = optimizer.new_state(stacked, lanes=3)
    models = [[nn.Parameter(begin[k][lane].clone()) for k in shapes] for lane in range(3)]
    references = [factory([{"params": [p]} for p in model], lr=0.05, weight_decay=0.02) for model in models]
    for step in range(7):
        grads = [torch.randn_like(v) for v in stacked.values()]
        for lane in range(3):
            if step == first[lane]:  # a new client in this lane
                for k in shapes:
                    stacked[k][lane] = begin[k][lane]
                for _, value in leaves(state):
                    value[lane] = 0
        lr = torch.tensor(0.05, dtype=torch.float64)
        if rates == "by parameter":
            lr = torch.tensor([[0.05, 0.01], [0.0, 0.05], [0.02, 0.0 if step < 6 else 0.03]]).double()
        slots = {slot: list(values.values()) for slot, values in state.items()}
        optimizer.step_(list(stacked.values()), grads, slots, lr=lr)
        for lane in (k for k in range(3) if step >= first[k]):
            for i, (p, group) in enumerate(zip(models[lane], references[lane].param_groups, strict=True)):
                rate = float(lr[lane, i]) if lr.dim() else 0.05
                group["lr"], p.grad = rate, grads[i][lane].clone() if rate else None
            references[lane].step()
    for lane, model in enumerate(models):
        for value, truth in zip(stacked.values(), model, strict=True):
            assert torch.allclose(value[lane], truth, rtol=1e-12, atol=1e-12)


# In whole rounds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Everything(Method):
    """All hooks that meet the optimiser: an edited gradient, a proximal term, rates by parameter, a frozen one."""

    name: ClassVar[str] = "everything"

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        return {k: g + 0.1 * local.params[k] for k, g in grads.items()}

    def proximal_mu(self) -> float:
        return 0.3

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float | None:
        if name == "0.weight":
            return 0.0 if epoch == 0 else 2 * lr
        return None


def after(method: Method, engine: str, rounds: int = 2, **changes: Any) -> Tensors:
    """Weights and client states after some rounds."""
    run = loop(method, engine=engine, rounds=rounds, **({"momentum": 0.0, "lr": 0.02} | changes))
    for number in range(1, rounds + 1):
        run.round(number)
    states = {f"client {k}": run.client_states.get(k) or {} for k in range(run.federation.clients)}
    return dict(leaves({"server": run.server.params} | states))


def assert_close(one: Tensors, other: Tensors, tolerance: float = 1e-9) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("method", [hf.FedAvg(), Everything()], ids=lambda m: m.name)
@pytest.mark.parametrize("name", MAIN)
def test_engines_agree(name: str, method: Method, keep: bool) -> None:
    changes = OPTIMISERS[name][0] | {"weight_decay": 0.02, "keep_optimizer": keep}
    reference = after(method, "sequential", **changes)
    assert_close(reference, after(method, "vectorized", parallel_clients=2, **changes))
    assert any("optimizer" in key for key in reference) == keep


def norm_net_without_bias() -> nn.Module:
    """A bias before BatchNorm has the gradient 0 but for rounding, which Adam divides by its own size."""
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_engines_agree_on_clipping_and_batch_norm(name: str) -> None:
    changes = OPTIMISERS[name][0] | {"max_grad_norm": 0.5, "among": federation((6, 9, 3))}
    one, other = (
        after(hf.FedProx(mu=0.5), engine, model=norm_net_without_bias(), **changes)
        for engine in ("sequential", "vectorized")
    )
    assert_close(one, other)


@pytest.mark.parametrize("name", ["nesterov", "adam", "adagrad"])
def test_one_client_is_torch_optim_on_its_batches(name: str) -> None:
    """A round of one client with a batch of all its samples, which keeps its state, against a plain loop."""
    chosen, factory = OPTIMISERS[name]
    world = federation((8,))
    model, reference = net(), net().double()
    x, y = world.dataset.x_train.double(), world.dataset.y_train
    optimiser = factory(reference.parameters(), lr=0.02)
    for _ in range(6):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        optimiser.step()
    found = after(
        hf.FedAvg(), "vectorized", rounds=3, model=model, among=world, batch_size=8, keep_optimizer=True, **chosen
    )  # fmt: skip
    for key, truth in reference.named_parameters():
        assert torch.allclose(found[f"server/{key}"], truth, rtol=1e-9, atol=1e-11)


SMALL: dict[str, Any] = {
    "rounds": 4, "clients_per_round": 3, "local_epochs": 2, "batch_size": 3, "lr": 0.02, "device": "cpu",
    "checkpoint_seconds": 0,
}  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_same_bits_again_and_after_a_kill(engine: str, tmp_path: Path) -> None:
    chosen = {"optimizer": "adam", "keep_optimizer": True, "engine": engine} | SMALL
    calm = hf.train("fedavg", net(), federation(), **chosen)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.train("fedavg", net(), federation(), **chosen, out=tmp_path / "run", on_round=stop)
    resumed = hf.train("fedavg", net(), federation(), **chosen, out=tmp_path / "run", resume=True)
    for one, other in zip(calm.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(hf.HoldfastError, match="another optimizer"):
        hf.train(
            "fedavg",
            net(),
            federation(),
            **chosen | {"optimizer": "adamw"},
            out=tmp_path / "run",
            resume=True,
        )


def test_the_momentum_that_version_0_1_stored_is_read() -> None:
    run = loop(hf.FedAvg(), keep_optimizer=True)
    run.round(1)
    former = loop(hf.FedAvg(), keep_optimizer=True)
    former.round(1)
    for k in range(former.federation.clients):
        state = former.client_states.get(k) or {}
        former.client_states.put(k, {"momentum": state["optimizer"]["momentum"]})
    run.round(2)
    former.round(2)
    for name, value in run.server.params.items():
        assert torch.equal(value, former.server.params[name])


# Optimisers of the user's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["nesterov", "adam", "adagrad"])
def test_a_class_of_torch_optim_is_the_same_as_its_name(name: str, keep: bool) -> None:
    chosen, factory = OPTIMISERS[name]
    named = after(Everything(), "sequential", keep_optimizer=keep, **chosen)
    own = after(Everything(), "sequential", keep_optimizer=keep, optimizer=factory)
    weights = {k: v for k, v in named.items() if k.startswith("server")}
    assert_close(weights, {k: v for k, v in own.items() if k.startswith("server")})


def test_any_optimiser_of_torch_trains_and_resumes(tmp_path: Path) -> None:
    chosen = {
        "optimizer": partial(torch.optim.RAdam, weight_decay=0.01),
        "keep_optimizer": True,
    } | SMALL
    calm = hf.train("fedavg", net(), federation(), **chosen)
    assert calm.experiment["optimizer"] == {"name": "RAdam", "own": True, "weight_decay": "0.01"}
    assert calm.experiment["engine"] == "sequential"

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.train("fedavg", net(), federation(), **chosen, out=tmp_path / "run", on_round=stop)
    resumed = hf.train("fedavg", net(), federation(), **chosen, out=tmp_path / "run", resume=True)
    for one, other in zip(calm.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(hf.HoldfastError, match="the optimizer of this run is a Python object"):
        hf.Experiment.from_mapping({"optimizer": calm.experiment["optimizer"]})


# Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "adamm"}, "did you mean adam"),
        ({"optimizer": "adam:beta=1"}, "did you mean betas"),
        ({"optimizer": "adam:betas=[0.9]"}, "betas are .0.9.; they must be two numbers"),
        ({"optimizer": "adam:betas=[0.9,1.0]"}, "betas is"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is 0.9; it must be 0 for optimizer adam"),
        ({"optimizer": "sgd:nesterov=true"}, "must be false where momentum is 0"),
        ({"keep_optimizer": True}, "must be false for optimizer sgd"),
        ({"optimizer": 3}, "optimizer is a int; it must be text such as"),
        ({"optimizer": torch.optim.RAdam, "weight_decay": 0.1}, "functools.partial.RAdam"),
        ({"optimizer": torch.optim.RAdam, "engine": "vectorized"}, "RAdam runs only on engine 'sequential'"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss several times"),
        ({"optimizer": torch.nn.Linear}, "optimizer Linear cannot be created"),
        ({"optimizer": "adam", "method": "scaffold"}, "scaffold assumes local SGD"),
        ({"optimizer": "adam", "method": "fedprox+fednova"}, "fednova assumes local SGD"),
        ({"optimizer": "adam", "method": "fedreg"}, "fedreg replaces the local step"),
    ],
)
def test_bad_optimisers_are_refused_before_training(changes: dict[str, Any], sentence: str) -> None:
    chosen = {"rounds": 1} | changes
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.train(chosen.pop("method", "fedavg"), net(), federation(), **chosen)


def test_an_experiment_writes_its_optimiser_with_all_options() -> None:
    experiment = hf.Experiment(optimizer="adam:eps=1e-6")
    assert experiment.describe()["optimizer"] == {"name": "adam", "betas": [0.9, 0.999], "eps": 1e-6}
    assert hf.Experiment.from_mapping(experiment.describe()) == experiment
    assert hf.Experiment().describe()["optimizer"] == {"name": "sgd", "nesterov": False}
    assert experiment.with_settings(["optimizer.eps=0.1"]).describe()["optimizer"]["eps"] == 0.1


def test_the_default_learning_rate_is_that_of_the_optimiser() -> None:
    found = {name: settings(optimizer=name).lr for name in ("sgd", "adam", "adamw", "rmsprop", "adagrad")}
    assert found == {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "rmsprop": 1e-3, "adagrad": 1e-2}
    assert settings(optimizer=torch.optim.RAdam, weight_decay=0.0).lr == 1e-3
    assert settings(optimizer="adam", lr=0.3).lr == 0.3
