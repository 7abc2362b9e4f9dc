import pytest
import torch


@pytest.fixture(autouse=True)
def full_floats():
    """Each test begins without TF32, whatever precision a run before it has chosen for the whole process."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
