"""The parts of a Transformer that the reference models share."""

from torch import Tensor, nn
from torch.nn import functional as F


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
                Not for a causal module, which has its own.
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
            is_causal=self.causal,
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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))
