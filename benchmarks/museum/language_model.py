"""The small language models of the museum, their batches, and their training steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, Callable[[int], Any]]
"""A model, and its training step by the step's number."""

VOCABULARY = 16
WIDTH = 8
ROWS = 8
LENGTH = 8


def batch(step: int, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """The tokens of a training step and, for each, the next one: two of shape ``[rows, length]``."""
    generator = torch.Generator().manual_seed(1000 + step)
    sequence = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return sequence[:, :-1], sequence[:, 1:]


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean", smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction, label_smoothing=smoothing)


class FeedForwardModel(nn.Module):
    """Embedding, one feed-forward block, norm, head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.dropout(self.down(torch.relu(self.up(hidden))))
        return self.head(self.norm(hidden))


def rotate(vectors: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of ``[batch, heads, length, size]`` by positions ``[length]``."""
    size = vectors.shape[-1]
    angles = positions[:, None] * 10.0 ** -torch.arange(0, size // 2, dtype=vectors.dtype)
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def causal(length: int) -> Tensor:
    return torch.ones(length, length).tril().bool()


class Attention(nn.Module):
    """Two heads, whose queries, keys and values come from one linear layer."""

    heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def split(self, tensor: Tensor) -> Tensor:
        """From ``[batch, length, width]`` to ``[batch, heads, length, size]``."""
        return tensor.unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        query, key, value = (self.split(part) for part in self.qkv(hidden).chunk(3, -1))
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


class AttentionModel(nn.Module):
    """Embedding, one block of attention, norm, head."""

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden, mask=mask, positions=positions)
        return self.head(self.norm(hidden))


def build(constructor: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same initial weights on every rank, in fp64."""
    torch.manual_seed(0)
    return constructor().double()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def trained(
    model: nn.Module, loss: Callable[[int], Tensor], *, after_backward: Callable[[], None] = lambda: None
) -> Built:
    """`model` and the step that trains it: backward of ``loss(i)``, `after_backward`, update."""
    optimizer = adamw(model.parameters())

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        after_backward()
        optimizer.step()
        return value.detach()

    return model, step


def feed_forward_reference(smoothing: float = 0.0) -> Built:
    model = build(FeedForwardModel)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens), labels, smoothing=smoothing)

    return trained(model, loss)


def attention_reference(mask: Tensor, positions: Tensor | None = None) -> Built:
    model = build(AttentionModel)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens, mask, positions), labels)

    return trained(model, loss)
