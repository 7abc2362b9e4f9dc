"""Records of the amax of images; that kernels record the right values is tested in tests/gpu."""

import torch

from holdfast.kernels.amax import record_amax, recorded_amax, recording_amax


def test_amax_is_found_for_the_same_memory_only():
    x, amax = torch.ones(2, 3, 4), torch.ones(2, 1)
    with recording_amax():
        record_amax(x, amax)
        assert recorded_amax(x) is amax
        assert recorded_amax(x.view(2, 3, 4)) is amax  # another tensor in the same memory
        assert recorded_amax(x[:1]) is None
        assert recorded_amax(x.transpose(1, 2)) is None
        assert recorded_amax(x.clone()) is None


def test_a_record_keeps_its_images_allocated():
    with recording_amax():
        record_amax(torch.ones(2, 3, 4), torch.ones(2, 1))
        assert all(recorded_amax(torch.empty(2, 3, 4)) is None for _ in range(10))


def test_only_the_latest_records_are_kept():
    images, amax = [torch.ones(2, 3) for _ in range(6)], torch.ones(2, 1)
    with recording_amax():
        for x in images:
            record_amax(x, amax)
        assert [recorded_amax(x) is amax for x in images] == [False] * 2 + [True] * 4


def test_nothing_is_recorded_outside_of_the_context():
    x, amax = torch.ones(2, 3), torch.ones(2, 1)
    record_amax(x, amax)
    assert recorded_amax(x) is None
    with recording_amax():
        record_amax(x, amax)
    assert recorded_amax(x) is None
    with recording_amax():
        assert recorded_amax(x) is None
