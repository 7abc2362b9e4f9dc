"""Tests of models, counted once more in NumPy: overall, by class, by domain, on all samples and on a few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_world import INPUTS, loop
from torch import Tensor, nn

from holdfast.data.dataset import Dataset, Group
from holdfast.data.federation import federate
from holdfast.engine.rounds import RoundLoop
from holdfast.methods.base import Tensors
from holdfast.methods.fedavg import FedAvg
from holdfast.models.network import Output

TESTED = np.repeat(np.arange(4), [170, 90, 0, 40])  # of class 2 there is no test sample
DOMAIN = np.arange(len(TESTED)) % 7 // 5  # five sevenths are of the first
CLASSES = 4


def rounds_with(domains: bool = True, **changes: object) -> RoundLoop:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, INPUTS)).astype(np.float32), np.arange(40) % CLASSES
    x_test = rng.normal(size=(len(TESTED), INPUTS)).astype(np.float32)
    groups = {"domain": Group(("near", "far"), np.zeros(40, np.int64), DOMAIN)} if domains else {}
    data = Dataset.from_arrays(x, y, x_test, TESTED, classes=tuple("abcd"), groups=groups)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(INPUTS, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    return loop(FedAvg(), model=model, among=federate(data, np.split(np.arange(40), 4)), **changes)


def logits_of(params: Tensors, rounds: RoundLoop) -> np.ndarray:
    w = {name: p.numpy() for name, p in params.items()}
    x = rounds.federation.dataset.x_test.numpy().astype(np.float64)
    return np.maximum(x @ w["0.weight"].T + w["0.bias"], 0) @ w["2.weight"].T + w["2.bias"]


def by_group(right: np.ndarray, group: np.ndarray, groups: int) -> list[float]:
    return [float(right[group == g].mean()) if (group == g).any() else np.nan for g in range(groups)]


def raw(out: Output) -> Tensor:
    return out.logits


def test_overall_by_class_and_by_domain() -> None:
    rounds = rounds_with()
    z = logits_of(rounds.server.params, rounds)
    right = z.argmax(1) == TESTED
    found = rounds.evaluate_global()
    assert found.accuracy == pytest.approx(right.mean())
    np.testing.assert_allclose(found.class_accuracy, by_group(right, TESTED, CLASSES))
    near, far = by_group(right, DOMAIN, 2)
    assert found.domain_accuracy == {"near": pytest.approx(near), "far": pytest.approx(far)}
    surprise = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), TESTED]
    assert found.loss == pytest.approx(surprise.mean())
    assert rounds_with(domains=False).evaluate_global().domain_accuracy == {}


@pytest.mark.parametrize("limit", [30, 130, 299])
def test_a_few_samples_are_spread_over_the_classes(limit: int) -> None:
    rounds = rounds_with(evaluate_locals=True, local_test_samples=limit)
    few, places = rounds.local_test, rounds.local_test.indices.numpy()
    assert len(few) == limit == len(set(places.tolist()))
    held = np.bincount(TESTED, minlength=CLASSES)
    level = next(m for m in range(1, 300) if np.minimum(held, m).sum() >= limit)  # a class gives no more
    counts = np.bincount(TESTED[places], minlength=CLASSES)
    assert (counts >= np.minimum(held, level - 1)).all()
    assert (counts <= np.minimum(held, level)).all()
    right = (logits_of(rounds.server.params, rounds).argmax(1) == TESTED)[places]
    expected = by_group(right, TESTED[places], CLASSES)
    np.testing.assert_allclose(rounds.evaluate_global(few).class_accuracy, expected)
    np.testing.assert_allclose(few.class_accuracy_within(rounds.evaluate_global()), expected)
    np.testing.assert_allclose(
        list(rounds.evaluate_global(few).domain_accuracy.values()), by_group(right, DOMAIN[places], 2)
    )


@pytest.mark.parametrize("together", [None, 2])
@pytest.mark.parametrize("shared", ["nothing", "the body"])
def test_many_models_are_tested_as_each_alone(shared: str, together: int | None) -> None:
    rounds = rounds_with()
    params, draw = rounds.server.params, torch.Generator().manual_seed(1)
    models: list[tuple[Tensors, Tensors]] = []
    for _ in range(5):
        moved = {k: p + torch.randn(p.shape, generator=draw, dtype=p.dtype) for k, p in params.items()}
        body = {k: p for k, p in params.items() if k.startswith("0.")} if shared == "the body" else {}
        models.append((moved | body, {}))
    found = rounds.test.evaluate_many(models, [raw] * 5, together)
    for (model, _), one in zip(models, found, strict=True):
        right = logits_of(model, rounds).argmax(1) == TESTED
        assert one.accuracy == pytest.approx(right.mean())
        np.testing.assert_allclose(one.class_accuracy, by_group(right, TESTED, CLASSES))


def test_on_a_gpu_as_many_samples_are_tested_at_once_as_fill_a_part_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = rounds_with().context
    assert context.evaluation_batch == 128
    for memory, expected in ((32 * 6 * 8 * 1000, 1000), (1, 128), (2**40, 2**14)):
        monkeypatch.setattr("holdfast.methods.context.gpu_share_bytes", lambda _, memory=memory: memory)
        on_gpu = replace(context, device=torch.device("cuda"))  # 6 values, the hidden layer's, 8 bytes each
        assert on_gpu.evaluation_batch == expected
