"""Shared by the tests of the kernels. With TRITON_INTERPRET=1 they run on a CPU, where Triton uses NumPy."""

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()) or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


def relative(value, reference):
    """The relative error of a value in the 2-norm."""
    return float((value.double() - reference.detach()).norm() / reference.detach().norm())
