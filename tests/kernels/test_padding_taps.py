"""Filter taps that meet only padding; whole training steps with them are in tests/gpu."""

import pytest
import torch

from holdfast.kernels.padding_taps import (
    padding_tap_factors,
    prepare_gradient,
    recording_filter_gradients,
    update_padding_taps_,
)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_factors_are_those_of_step_by_step(momentum, mu):
    w, v, sent = 1.0, 0.0, 3.0
    for steps in range(1, 40):
        v = momentum * v + 0.2 * w + mu * (w - sent)
        w = w - 0.1 * v
        of_w, of_sent = padding_tap_factors(steps, 0.1, momentum, 0.2, mu)
        assert of_w * 1.0 + of_sent * sent == pytest.approx(w, rel=1e-12)


def test_padding_taps_are_updated_lane_by_lane():
    w, sent = torch.ones(3, 3, 4, 3, 3), torch.full((3, 4, 3, 3), 2.0)
    update_padding_taps_(w, range(1, 3), [(1.0, 0.0), (0.5, 0.0), (0.5, 0.25)], sent)
    assert torch.equal(w[0], torch.ones_like(w[0]))
    assert torch.equal(w[1], torch.tensor([[0.5, 0.5, 0.5], [0.5, 1, 1], [0.5, 1, 1]]).expand_as(w[1]))
    assert torch.equal(w[2], torch.ones_like(w[2]))  # 0.5 + 0.25 * 2
    update_padding_taps_(w, range(1, 3), [(1.0, 1.0)] * 3, sent)
    assert torch.equal(w[2, 0, 0], torch.tensor([[3.0, 3, 3], [3, 1, 1], [3, 1, 1]]))


@pytest.mark.parametrize("skip_zeros", [False, True])
def test_only_unmodified_gradients_have_padding_taps(skip_zeros):
    with recording_filter_gradients(skip_zeros) as recorded:
        gradients = {name: torch.ones(2, 3, 4, 3, 3) for name in ("kept", "added", "scaled", "part")}
        for gradient in gradients.values():
            prepare_gradient(gradient, range(1, 2))
    # They are set to zero if they may be read.
    assert all(bool(gradient.any()) == skip_zeros for gradient in gradients.values())
    got = {
        "kept": gradients["kept"],
        "added": gradients["added"] + 0,
        "scaled": gradients["scaled"] * 1,
        "part": gradients["part"][:1],
        "another": torch.ones(2, 3, 4, 3, 3),
    }
    assert recorded.used_taps(got) == {"kept": range(1, 2)}


def test_gradients_are_zeroed_outside_of_the_context():
    gradient = torch.ones(1, 2, 2, 3, 3)
    prepare_gradient(gradient, range(1, 2))
    assert not gradient.any()
