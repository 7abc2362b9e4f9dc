"""Hooks of the user's own: what goes wrong in one is a sentence that names it, and what vmap cannot run falls back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine_world import federation, loop
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.methods import FedNTD
from holdfast.methods.base import Method


def of(hook: str, function: Any, **attributes: Any) -> Method:
    """A method with this hook."""
    kind = type("Mine", (Method,), {hook: function, "name": "mine", "__module__": "mine", **attributes})
    return dataclass(frozen=True)(kind)()


def plain(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out.logits, batch.y)


def train(method: Method, engine: str, rounds: int = 2) -> str:
    """The engine that trained two rounds."""
    run = loop(method, engine=engine, among=federation((7, 4, 5, 6)))
    for number in range(1, rounds + 1):
        run.round(number)
    return run.engine.name


def changing(path: str) -> Any:
    def client_init(self: Any, payload: Any, state: Any, client: Any) -> Any:
        (client.context.network.params if path == "network" else client.global_params)["0.weight"].zero_()
        return {}

    return client_init


def changing_buffer(self: Any, params: Any, carry: Any, client: Any) -> Any:
    client.context.network.buffers["1.running_mean"].add_(1)
    return {}, {}


def missing_name(self: Any, grads: Any, carry: Any, local: Any) -> Any:
    return {name: g for name, g in grads.items() if name != "0.bias"}


def live_weights(self: Any, name: Any, payload: Any, state: Any, client: Any) -> Any:
    return dict(client.context.network.net.named_parameters())


def growing_carry(self: Any, params: Any, out: Any, batch: Any, carry: Any) -> Any:
    return params, {"seen": torch.cat([carry["seen"], carry["seen"]])}


WRONG: list[tuple[str, Any, str]] = [
    ("task_loss", lambda self, out, batch, carry: None, "task_loss returns None; it must return a scalar"),
    ("task_loss", lambda self, out, batch, carry: 1.5, "task_loss returns a float; it must return a scalar"),
    (
        "task_loss",
        lambda self, out, batch, carry: F.cross_entropy(out.logits, batch.y, reduction="none"),
        r"of shape \(3,\)",
    ),
    (
        "task_loss",
        lambda self, out, batch, carry: out.logits.detach().mean(),
        "does not depend on the model's weights",
    ),
    (
        "loss",
        lambda self, out, batch, carry, local: carry["mean"].sum(),
        "loss raises KeyError in line .*: 'mean'",
    ),
    (
        "loss",
        lambda self, out, batch, carry, local: out.features @ out.features,
        "loss raises RuntimeError in line",
    ),
    (
        "loss",
        lambda self, out, batch: out.logits.mean(),
        "loss raises TypeError: .*takes 3 positional arguments",
    ),
    (
        "loss",
        lambda self, out, batch, carry, local: batch.x.mul_(2).mean() * out.logits.mean(),
        "loss changes batch.x in place",
    ),
    ("edit_gradient", missing_name, "edit_gradient returns no '0.bias'; it must return exactly"),
    (
        "edit_gradient",
        lambda self, grads, carry, local: {k: g.sum() for k, g in grads.items()},
        r"'0.weight' with shape \(\)",
    ),
    (
        "after_step",
        lambda self, params, out, batch, carry: params,
        "after_step returns a dict; it must return a pair",
    ),
    (
        "after_step",
        lambda self, params, out, batch, carry: (params, {"new": out.logits}),
        "'new', which is not one",
    ),
    (
        "step",
        lambda self, trainer, params, batch, carry, local: params,
        "without calling trainer.gradient",
    ),
    (
        "step",
        lambda self, trainer, params, batch, carry, local: (params, {"new": params["0.bias"]}),
        "step returns 'new', which is not one",
    ),
    (
        "client_init",
        lambda self, payload, state, client: {"weight": 2.0},
        "client_init returns a float as 'weight'",
    ),
    ("client_init", changing("payload"), "client_init changes client.global_params"),
    (
        "tables",
        lambda self, payload, state, client: {"t": client.y[:1]},
        r"tables returns \(1,\) as 't'.* [78] samples",  # 8 in the trial
    ),
    ("client_final", lambda self, params, carry, client: {"n": 1}, "client_final returns a dict; .* a pair"),
    (
        "client_final",
        lambda self, params, carry, client: ({"y": client.y}, {}),
        "client_final returns 'y' with shape",
    ),
    (
        "client_final",
        lambda self, params, carry, client: ({"n": torch.ones(2, dtype=torch.uint8)}, {}),
        "uint8 .* overflows",
    ),
    (
        "client_weight",
        lambda self, client: -1.0,
        "client_weight returns -1.0; it must return a number of at least 0",
    ),
    (
        "initial_params",
        lambda self, params, payload, state, client: {},
        "initial_params returns no '0.weight'",
    ),
    (
        "begin_round",
        lambda self, server, context: None,
        "begin_round returns None; it must return a dictionary",
    ),
    (
        "aggregate",
        lambda self, server, mean, sums, context: mean,
        "aggregate returns a dict; it must return a pair",
    ),
    (
        "update",
        lambda self, server, sums, uploads, context: None,
        "update returns None; it must return a dictionary",
    ),
    (
        "refine",
        lambda self, server, uploads, context: server.params,
        "refine returns a dict; it must return a Server",
    ),
    ("global_logits", lambda self, out, server: out.logits[:1], "global_logits returns a tensor of shape"),
]


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize(("hook", "function", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_hook(hook: str, function: Any, message: str, engine: str) -> None:
    with pytest.raises(HoldfastError, match=message) as raised:
        train(of(hook, function), engine)
    assert "\n" not in str(raised.value)


def test_the_original_error_is_chained() -> None:
    with pytest.raises(HoldfastError) as raised:
        train(of("loss", lambda self, out, batch, carry, local: carry["mean"]), "sequential")
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_teacher_that_is_the_trained_model() -> None:
    method = of("teacher", live_weights, teachers=("own",))
    with pytest.raises(HoldfastError, match=r"teacher returns '0\.weight' with a gradient"):
        train(method, "sequential")


def test_a_carry_that_is_the_weights_themselves() -> None:
    @dataclass(frozen=True)
    class Mine(Method):
        def client_init(self, payload: Any, state: Any, client: Any) -> Any:
            return {"last": torch.zeros(3, dtype=torch.float64)}

        def after_step(self, params: Any, out: Any, batch: Any, carry: Any) -> Any:
            return params, {"last": params["2.bias"].detach()}

    with pytest.raises(HoldfastError, match="the weights themselves as 'last'"):
        train(Mine(), "sequential")


def test_a_carry_that_grows() -> None:
    method = of("after_step", growing_carry, client_init=lambda *_: {"seen": torch.zeros(1)})
    with pytest.raises(HoldfastError, match=r"after_step returns 'seen' with shape \(2,\)"):
        train(method, "sequential")


FALLS_BACK: list[tuple[str, Any, str]] = [
    (
        "task_loss",
        lambda self, out, batch, carry: plain(out, batch) * (1 if plain(out, batch) > 1 else 2),
        "task_loss branches on a tensor's value",
    ),
    (
        "task_loss",
        lambda self, out, batch, carry: plain(out, batch) * batch.y.sum().item(),
        "task_loss branches on a tensor's value or reads it by item",
    ),
    (
        "task_loss",
        lambda self, out, batch, carry: (F.one_hot(batch.y, 3) - out.logits).square().mean(),
        "task_loss calls one_hot",
    ),
    (
        "loss",
        lambda self, out, batch, carry, local: out.logits[batch.y == 0].sum(),
        "loss makes a tensor whose shape depends",
    ),
    (
        "loss",
        lambda self, out, batch, carry, local: (out.logits * torch.randn(3)).mean(),
        "loss draws from a global random",
    ),
    (
        "loss",
        lambda self, out, batch, carry, local: (out.logits * np.random.rand()).mean(),
        "loss draws from a global random",
    ),
    (
        "client_init",
        lambda self, payload, state, client: {"x": torch.randn(3)},
        "client_init draws from a global random",
    ),
    (
        "client_init",
        lambda self, payload, state, client: {"y": client.y},
        "client_init returns tensors of different shapes",
    ),
]


@pytest.mark.parametrize(("hook", "function", "message"), FALLS_BACK, ids=range(len(FALLS_BACK)))
def test_hooks_that_vmap_cannot_run_fall_back_to_sequential(hook: str, function: Any, message: str) -> None:
    method = of(hook, function)
    with pytest.warns(HoldfastWarning, match=f"mine: {message}.*engine 'sequential'"):
        assert train(method, "auto") == "sequential"
    with pytest.raises(HoldfastError, match=f"mine: {message}.* or use engine 'sequential'"):
        train(method, "vectorized")


def test_a_method_that_keeps_values_in_python_falls_back() -> None:
    calls = []

    def loss(self: Any, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
        calls.append(1)
        result: Tensor = out.logits.mean() * len(calls)
        return result

    with pytest.warns(HoldfastWarning, match="keeps values outside of its carry and states"):
        assert train(of("loss", loss), "auto") == "sequential"


def test_a_mask_that_is_declared_and_not_applied_falls_back() -> None:
    method = of("task_loss", lambda self, out, batch, carry: plain(out, batch), uses_mask=True)
    with pytest.warns(HoldfastWarning, match=r"gives different results .*batch\.mask"):
        assert train(method, "auto") == "sequential"


def test_the_trial_leaves_generators_and_the_model_as_they_are() -> None:
    def trained() -> tuple[Tensor, Tensor, float, Tensor]:
        torch.manual_seed(0)
        np.random.seed(0)
        run = loop(method, engine="vectorized", among=federation((7, 4, 5, 6)))
        weights = {k: v.clone() for k, v in run.server.params.items()}
        return (
            torch.rand(2),
            weights["0.weight"],
            np.random.rand(),
            run.context.network.net.state_dict()["0.weight"],
        )

    for method in (FedNTD(), of("loss", lambda self, out, batch, carry, local: out.logits.mean())):
        first = trained()
        torch.manual_seed(0)
        loop(FedNTD(), engine="vectorized", among=federation((7, 4, 5, 6)))
        assert torch.equal(first[0], torch.rand(2))
        assert torch.equal(first[1], first[3])


def test_shapes_that_change_from_round_to_round() -> None:
    """A carry may grow with the rounds as long as all clients of a round have the same."""

    @dataclass(frozen=True)
    class Growing(Method):
        name: ClassVar[str] = "growing"

        def client_init(self, payload: Any, state: Any, client: Any) -> Any:
            return {"history": torch.ones(client.round, dtype=client.context.dtype)}

        def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> Tensor:
            return out.logits.square().mean() * carry["history"].sum()  # type: ignore[no-any-return]

    results = []
    for engine in ("sequential", "vectorized"):
        run = loop(Growing(), engine=engine, among=federation((7, 4, 5, 6)), parallel_clients=None)
        for number in (1, 2, 3):
            run.round(number)
        results.append(run.server.params["0.weight"].clone())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_a_method_without_fault_trains_side_by_side_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = loop(of("task_loss", lambda self, out, batch, carry: plain(out, batch)), engine="auto")
    assert isinstance(run.engine, VectorizedEngine)
