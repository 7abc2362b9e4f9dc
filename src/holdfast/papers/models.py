"""Models with the initial weights of the papers' code, for short runs whose results depend on them."""

import torch
from torch import nn


def flamby_linear(shape: tuple[int, ...], seed: int) -> nn.Module:
    """A linear layer with one output and the weights that ``torch.manual_seed(seed)`` gives it, as in FLamby."""
    torch.default_generator.manual_seed(seed)  # the caller restores the generator
    return nn.Linear(shape[0], 1)
