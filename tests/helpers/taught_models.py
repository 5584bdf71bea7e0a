"""Attention as people learn it: widths come from the input, heads by reshaping, the mask from a buffer."""

import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, TOKENS, VOCABULARY = 32, 4, 16, 61


class FusedAttention(nn.Module):
    """One layer for queries, keys and values, split by the width (as in nanoGPT)."""

    def __init__(self, *, flash: bool = True, by_input: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout
        self.flash, self.by_input = flash, by_input
        self.register_buffer("bias", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C if self.by_input else self.n_embd, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        if self.flash:
            dropped = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            y = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class SeparateAttention(nn.Module):
    """A layer each for queries, keys and values (as in minGPT's first versions)."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.n_head = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(torch.ones(T, T, device=x.device).tril() == 0, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(B, T, C))


class PackedHeads(nn.Module):
    """Queries, keys and values of all heads by one reshape (as in timm's first vision transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class TaughtBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TaughtGPT(nn.Module):
    """A GPT, its embedding and its output layer tied."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, WIDTH),
                wpe=nn.Embedding(TOKENS, WIDTH),
                h=nn.ModuleList([TaughtBlock(ATTENTIONS[attention]()) for _ in range(2)]),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


ATTENTIONS = {
    "fused": FusedAttention,
    "fused, plain": lambda: FusedAttention(flash=False),
    "fused, split by the input's width": lambda: FusedAttention(by_input=True),
    "separate": SeparateAttention,
    "packed heads": PackedHeads,
}
