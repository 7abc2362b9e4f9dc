"""Networks that predict the next token at each position of a sequence of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount
from holdfast.models.transformer import Block, check_heads


class NextTokenLSTM(nn.Module):
    """An embedding, layers of LSTM and a classifier: from tokens ``[B, T]`` to logits ``[B, T, tokens]``."""

    def __init__(self, tokens: int, embedding: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.classifier = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.lstm(self.embedding(x.long()))[0])
        return logits


class NextTokenTransformer(nn.Module):
    """Embeddings of tokens and positions, causal blocks, a norm and a classifier: ``[B, T]`` to ``[B, T, tokens]``."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.long()) + self.positions.weight[: x.shape[-1]]
        logits: Tensor = self.classifier(self.norm(self.blocks(x)))
        return logits


def char_lstm(
    shape: tuple[int, ...],
    num_classes: int,
    *,
    embedding: PositiveCount = 8,
    width: PositiveCount = 256,
    layers: PositiveCount = 2,
) -> nn.Module:
    """LEAF's network for Shakespeare's next character, with a prediction at each position."""
    _length("char-lstm", shape)
    return NextTokenLSTM(num_classes, embedding, width, layers)


def char_transformer(
    shape: tuple[int, ...],
    num_classes: int,
    *,
    width: PositiveCount = 128,
    heads: PositiveCount = 4,
    layers: PositiveCount = 2,
) -> nn.Module:
    """A small decoder as GPT-2's, with learned positions and without dropout."""
    length = _length("char-transformer", shape)
    check_heads("char-transformer", width, heads)
    return NextTokenTransformer(num_classes, length, width, heads, layers)


def _length(model: str, shape: tuple[int, ...]) -> int:
    if len(shape) != 1:
        raise HoldfastError(
            f"model '{model}' takes sequences of tokens, shape [length], but a sample has shape {list(shape)}"
        )
    return shape[0]
