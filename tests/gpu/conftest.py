import pytest
import torch


@pytest.fixture(autouse=True)
def no_tf32():
    """Start each test without TF32, whatever precision an earlier run has set for the process."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
