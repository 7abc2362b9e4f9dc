"""What kernels of a step note for each other; that they note the right thing is tested in tests/gpu."""

import torch

from holdfast.kernels.amax import note_peaks, noted_peaks, noting


def test_peaks_are_found_again_for_the_same_images_alone():
    x, peaks = torch.ones(2, 3, 4), torch.ones(2, 1)
    with noting():
        note_peaks(x, peaks)
        assert noted_peaks(x) is peaks
        assert noted_peaks(x.view(2, 3, 4)) is peaks  # another tensor in the same memory
        assert noted_peaks(x[:1]) is None
        assert noted_peaks(x.transpose(1, 2)) is None
        assert noted_peaks(x.clone()) is None


def test_a_note_that_was_kept_is_of_memory_that_nobody_else_can_have():
    with noting():
        note_peaks(torch.ones(2, 3, 4), torch.ones(2, 1))
        assert all(noted_peaks(torch.empty(2, 3, 4)) is None for _ in range(10))


def test_only_the_latest_are_held():
    images, peaks = [torch.ones(2, 3) for _ in range(6)], torch.ones(2, 1)
    with noting():
        for x in images:
            note_peaks(x, peaks)
        assert [noted_peaks(x) is peaks for x in images] == [False] * 2 + [True] * 4


def test_nothing_is_noted_outside_of_a_step():
    x, peaks = torch.ones(2, 3), torch.ones(2, 1)
    note_peaks(x, peaks)
    assert noted_peaks(x) is None
    with noting():
        note_peaks(x, peaks)
    assert noted_peaks(x) is None
    with noting():
        assert noted_peaks(x) is None
