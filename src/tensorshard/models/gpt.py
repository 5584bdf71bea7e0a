"""A GPT-2 style language model."""

import math

import torch
from torch import Tensor, nn

from tensorshard.data.packing import document_mask
from tensorshard.models.layers import PreNormBlock, check_dropout, check_sizes, check_tokens


class GPT(nn.Module):
    """Decoder-only Transformer with learned positions.

    GPT-2's architecture: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

    Args:
        vocab_size: number of different tokens.
        context_length: most tokens the model can read at once.
        num_layers: number of blocks.
        num_heads: attention heads of a block; divides ``width``.
        width: features of a token between blocks.
        dropout: probability, on the embeddings, attention weights and each branch.
        bias: whether linear layers and norms have one.
        tie_embeddings: whether the head's weight is the embedding's.

    Raises:
        ValueError: a size below 1, a width that the heads do not divide, a dropout outside [0, 1).
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        num_layers: int,
        num_heads: int,
        width: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            vocab_size=vocab_size,
            context_length=context_length,
            num_layers=num_layers,
            num_heads=num_heads,
            width=width,
        )
        check_dropout(dropout)
        self.context_length = context_length
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PreNormBlock(width, num_heads, dropout=dropout, bias=bias, causal=True) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

        self.apply(_init_weights)
        # The residual stream is a sum of 2 * num_layers branches; GPT-2 scales the last layer of each so
        # that the sum's variance does not grow with depth.
        for name, weight in self.blocks.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * num_layers))

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Tokens ``[batch, time]`` (int64) to the next tokens' logits ``[batch, time, vocab_size]``.

        Args:
            position_ids: int64 ``[batch, time]`` of rows of several documents, in each of which they begin at 0, as of
                ``tensorshard.data.pack``; None for one document in each row.
        """
        check_tokens(tokens, self.context_length)
        mask = None if position_ids is None else document_mask(position_ids)
        positions = torch.arange(tokens.shape[1], device=tokens.device) if position_ids is None else position_ids
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def _init_weights(module: nn.Module) -> None:
    """GPT-2's: normal weights of standard deviation 0.02, no initial bias."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
