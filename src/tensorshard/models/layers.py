"""The parts that the reference models share: a Transformer's blocks, losses, and checks of arguments."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED_TARGET = -100


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017) on ``[batch, time, width]``."""

    def __init__(
        self, width: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True, causal: bool = False
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} does not divide into {num_heads} heads of equal size (num_heads).")
        self.head_size = width // num_heads
        self.dropout = dropout
        self.causal = causal
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix each position with those it may look at.

        Args:
            x: ``[batch, time, width]``.
            mask: bool, broadcastable to ``[batch, heads, time, time]``; True where a query may look at a key.
                A causal module takes it in place of its own.
        """
        # [batch, time, width] -> [batch, heads, time, head_size]
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, on the last dimension; four times as wide inside."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PreNormBlock(nn.Module):
    """A Transformer block that normalises the input of each branch (GPT-2, ViT)."""

    def __init__(
        self, width: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True, causal: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = SelfAttention(width, num_heads, dropout=dropout, bias=bias, causal=causal)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def next_token_loss(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that count, and how many those are.

    The sum and the count are returned separately because batches differ in how many targets count: the mean over
    several of them is the sum of sums over the sum of counts.

    Args:
        output: logits ``[..., vocab_size]``, or a model's output that has them as ``logits``; 16-bit ones are summed
            in fp32.
        targets: int64 ``[...]``; -100 where there is nothing to predict.

    Returns:
        The sum in nats and the count, each a tensor without dimensions, of the logits' type or fp32 if that
        is wider.
    """
    logits = _at_least_fp32(getattr(output, "logits", output))
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return total, (targets != IGNORED_TARGET).sum().to(logits.dtype)


# The data decide what is predicted, the next token or a masked one. The loss is the same.
masked_token_loss = next_token_loss


def classification_loss(output: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits ``[batch, num_classes]``, or of an output that has them as ``logits``, in nats;
    16-bit ones are averaged in fp32."""
    return F.cross_entropy(_at_least_fp32(getattr(output, "logits", output)), targets)


image_classification_loss = classification_loss


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError unless every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1.")


def check_dropout(dropout: float) -> None:
    """Raise a ValueError unless ``dropout`` is a probability below 1."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}; expected 0 or more and less than 1.")


def check_tokens(tokens: Tensor, context_length: int) -> None:
    """Raise a ValueError unless ``tokens`` is ``[batch, time]``, with at most ``context_length`` of time."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens have the shape {list(tokens.shape)}; expected [batch, time].")
    if tokens.shape[1] > context_length:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long; this model was built for a context_length of at most {context_length}."
        )
