"""The block of transformers, and transformers for images (Dosovitskiy et al., ICLR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount


class Block(nn.Module):
    """Attention (``causal``: to earlier positions) and a feed-forward layer, each with a norm before and a residual."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        by_head = self.attention(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        query, key, value = by_head.transpose(-2, -3)  # [B, heads, T, width / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.output(attended.transpose(-2, -3).flatten(-2))
        added: Tensor = self.narrow(F.gelu(self.widen(self.forward_norm(x))))
        return x + added


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, blocks, a norm and a classifier of the token: ``[B, C, H, W]`` to logits."""

    def __init__(
        self, channels: int, patches: int, num_classes: int, patch: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, patches + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(-2).transpose(-1, -2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        logits: Tensor = self.classifier(self.norm(self.blocks(x))[:, 0])
        return logits


def vit(
    shape: tuple[int, ...],
    num_classes: int,
    *,
    patch: PositiveCount = 4,
    width: PositiveCount = 192,
    depth: PositiveCount = 6,
    heads: PositiveCount = 3,
) -> nn.Module:
    """A vision transformer, as small as suits small images by default, without dropout."""
    if len(shape) != 3 or shape[1] % patch or shape[2] % patch:
        raise HoldfastError(
            f"model 'vit' takes images whose sides are multiples of patch, {patch} pixels, but a sample has shape "
            f"{'x'.join(map(str, shape))}"
        )
    check_heads("vit", width, heads)
    patches = (shape[1] // patch) * (shape[2] // patch)
    return VisionTransformer(shape[0], patches, num_classes, patch, width, depth, heads)


def check_heads(model: str, width: int, heads: int) -> None:
    """The error if the width cannot be divided among the heads."""
    if width % heads:
        raise HoldfastError(f"{model}: width is {width}; it must be a multiple of heads, {heads}")
