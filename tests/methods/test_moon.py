"""What MOON's two frozen models are, where they have statistics of their own."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from small_world import prepared, rounds, world
from torch import Tensor, nn

from holdfast.engine.clients import Broadcast, Job, PreparedClient
from holdfast.methods import Moon
from holdfast.methods.base import Tensors, Tree
from holdfast.training.session import Training

FEDERATION = world([0, 0, 1, 1, 2, 3], [1, 2, 2, 3])


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


def features(weights: Tensors, x: Tensor) -> Tensor:
    """What a plain module with these weights and statistics says in evaluation mode."""
    module = normed().double().eval()
    module.load_state_dict(weights)
    with torch.no_grad():
        return module[:-1](x)  # type: ignore[index, no-any-return]


def started(training: Training, sent: Broadcast, memory: Tree | None) -> PreparedClient:
    """Client 0 before its first step in a round."""
    runner = training.engine.runner  # type: ignore[attr-defined]
    (one,) = runner.start([runner.plan(Job(0, FEDERATION.client(0), client_state=memory), sent.round)], sent)
    return one  # type: ignore[no-any-return]


def test_the_previous_model_keeps_its_own_statistics() -> None:
    training = prepared(Moon(), FEDERATION, normed())
    loop, client_states = rounds(training, 0)
    jobs = [Job(k, FEDERATION.client(k)) for k in range(2)]
    first = Broadcast(1, loop.server.params, loop.server.buffers, {})
    trained = next(iter(training.engine.train(first, jobs)))
    own = {k: v.clone() for k, v in {**trained.params, **trained.buffers}.items()}  # type: ignore[union-attr]
    loop.round(1)  # whose mean has the other client's share in it
    sent = Broadcast(2, loop.server.params, loop.server.buffers, {})
    assert not torch.allclose(own["2.running_mean"], sent.buffers["2.running_mean"], atol=1e-3)

    one = started(training, sent, client_states.get(0))
    for name, weights in (("previous", own), ("global", {**sent.params, **sent.buffers})):
        told = one.tables[f"teacher/{name}/features"]
        torch.testing.assert_close(told, features(weights, one.client.x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", ["original", "fa"])
def test_a_client_without_a_past_has_the_initial_model_or_the_one_that_was_sent(
    variant: Literal["original", "fa"],
) -> None:
    training = prepared(Moon(variant=variant), FEDERATION, normed())
    loop, _ = rounds(training, 0)
    initial = {k: v.clone() for k, v in {**loop.server.params, **loop.server.buffers}.items()}
    loop.round(1)
    sent = Broadcast(2, loop.server.params, loop.server.buffers, {})
    one = started(training, sent, None)
    weights = {**sent.params, **sent.buffers} if variant == "fa" else initial
    told = one.tables["teacher/previous/features"]
    torch.testing.assert_close(told, features(weights, one.client.x), rtol=1e-12, atol=1e-12)
