"""Weights that rest at the rim of a convolution's kernel; whole steps of them are in tests/gpu."""

import pytest
import torch

from holdfast.kernels.padding_taps import begin_gradient, move_rims_, moved_by, written


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_many_steps_at_once(momentum, pull):
    w, moving, sent = 1.0, 0.0, 3.0
    for steps in range(1, 40):
        moving = momentum * moving + 0.2 * w + pull * (w - sent)
        w = w - 0.1 * moving
        own, drawn = moved_by(steps, 0.1, momentum, 0.2, pull)
        assert own * 1.0 + drawn * sent == pytest.approx(w, rel=1e-12)


def test_rims_are_moved_lane_by_lane():
    w, sent = torch.ones(3, 3, 4, 3, 3), torch.full((3, 4, 3, 3), 2.0)
    move_rims_(w, range(1, 3), [(1.0, 0.0), (0.5, 0.0), (0.5, 0.25)], sent)
    assert torch.equal(w[0], torch.ones_like(w[0]))
    assert torch.equal(w[1], torch.tensor([[0.5, 0.5, 0.5], [0.5, 1, 1], [0.5, 1, 1]]).expand_as(w[1]))
    assert torch.equal(w[2], torch.ones_like(w[2]))  # 0.5 + 0.25 * 2
    move_rims_(w, range(1, 3), [(1.0, 1.0)] * 3, sent)
    assert torch.equal(w[2, 0, 0], torch.tensor([[3.0, 3, 3], [3, 1, 1], [3, 1, 1]]))


@pytest.mark.parametrize("unread", [False, True])
def test_gradients_to_which_something_was_added_have_no_rim(unread):
    with written(unread) as seen:
        gradients = {name: torch.ones(2, 3, 4, 3, 3) for name in ("kept", "added", "scaled", "part")}
        for gradient in gradients.values():
            begin_gradient(gradient, range(1, 2))
    assert all(
        bool(gradient.any()) == unread for gradient in gradients.values()
    )  # cleared where they are read
    got = {
        "kept": gradients["kept"],
        "added": gradients["added"] + 0,
        "scaled": gradients["scaled"] * 1,
        "part": gradients["part"][:1],
        "another": torch.ones(2, 3, 4, 3, 3),
    }
    assert seen.untouched(got) == {"kept": range(1, 2)}


def test_outside_of_a_step_rims_are_cleared():
    gradient = torch.ones(1, 2, 2, 3, 3)
    begin_gradient(gradient, range(1, 2))
    assert not gradient.any()
