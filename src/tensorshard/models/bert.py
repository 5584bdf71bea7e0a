"""BERT with its masked-language-model head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensorshard.models.layers import MLP, SelfAttention, check_dropout, check_sizes, check_tokens


class Bert(nn.Module):
    """Bidirectional encoder (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019).

    The decoder of the masked-language-model head shares its weight with the token embedding and has a bias
    of its own.

    Args:
        vocab_size: number of different tokens, the mask token included.
        context_length: most tokens the model can read at once.
        num_layers: number of blocks.
        num_heads: attention heads of a block; divides ``width``.
        width: features of a token between blocks.
        num_token_types: number of different segments ("sentence A", "sentence B").
        padding_token: where a batch comes without an attention mask, this token is not attended to; None
            for no such token.
        dropout: probability, on the embeddings, attention weights and each branch.

    Raises:
        ValueError: a size below 1, a width that the heads do not divide, a dropout outside [0, 1), a
            padding token outside the vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        num_layers: int,
        num_heads: int,
        width: int,
        *,
        num_token_types: int = 2,
        padding_token: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_sizes(
            vocab_size=vocab_size,
            context_length=context_length,
            num_layers=num_layers,
            num_heads=num_heads,
            width=width,
            num_token_types=num_token_types,
        )
        check_dropout(dropout)
        if padding_token is not None and not 0 <= padding_token < vocab_size:
            raise ValueError(f"padding_token is {padding_token}; expected 0 to {vocab_size - 1}, or None.")
        self.context_length = context_length
        self.padding_token = padding_token
        self.embeddings = BertEmbeddings(vocab_size, context_length, width, num_token_types, dropout)
        self.blocks = nn.ModuleList(PostNormBlock(width, num_heads, dropout) for _ in range(num_layers))
        self.head = MaskedTokenHead(vocab_size, width)
        self.head.decoder.weight = self.embeddings.tokens.weight
        self.apply(_init_weights)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Logits ``[batch, time, vocab_size]`` of the token at each position.

        Args:
            tokens: int64 ``[batch, time]``.
            attention_mask: ``[batch, time]``, bool or 0/1; 0 at the padding.
            token_types: int64 ``[batch, time]``; all 0 if not given.
        """
        check_tokens(tokens, self.context_length)
        if attention_mask is None and self.padding_token is not None:
            attention_mask = tokens != self.padding_token
        if attention_mask is not None:
            _check_same_shape(tokens, attention_mask=attention_mask)
            attention_mask = attention_mask.bool()[:, None, None, :]
        if token_types is None:
            token_types = torch.zeros_like(tokens)
        _check_same_shape(tokens, token_types=token_types)

        x = self.embeddings(tokens, token_types)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(x)


class BertEmbeddings(nn.Module):
    """Sums and normalises the embeddings of tokens, positions and segments."""

    def __init__(self, vocab_size: int, context_length: int, width: int, num_token_types: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context_length, width)
        self.token_types = nn.Embedding(num_token_types, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, token_types: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions) + self.token_types(token_types)
        return self.dropout(self.norm(x))


class PostNormBlock(nn.Module):
    """A Transformer block that normalises after each branch is added, as in the original Transformer."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class MaskedTokenHead(nn.Module):
    """Features to logits over the vocabulary."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(F.gelu(self.dense(x))))


def _init_weights(module: nn.Module) -> None:
    """Normal weights of standard deviation 0.02, no initial bias.

    BERT's own code cuts the normal distribution at two deviations. torch does that by drawing again until all values
    fit. This depends on values, and so cannot run on fake tensors.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _check_same_shape(tokens: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.shape != tokens.shape:
            raise ValueError(
                f"{name} has the shape {list(other.shape)}; expected that of the tokens, {list(tokens.shape)}."
            )
