"""What tests of kernels share. With TRITON_INTERPRET=1 they run on a CPU, where Triton carries kernels out in NumPy."""

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
    """How far a value is from what it should be, as a share of that."""
    return float((value.double() - reference.detach()).norm() / reference.detach().norm())
