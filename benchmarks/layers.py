"""The work that tensor-parallel contenders share: one layer of a model, forward and backward, in fp32."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensorshard.models.layers import MLP, PreNormBlock

_SEED = 0
LLAMA_LAYERS = 2  # of one, nothing is repeated, and so nothing would tell that it is a block


@dataclass(frozen=True)
class LayerWork:
    """A layer and its batch.

    Args:
        name: of the layer and its size.
        kind: "block": a causal pre-norm Transformer block; "mlp": two linear layers, four times as wide inside;
            "llama": Transformers' Llama of two layers, without its embedding of tokens.
        width: features of a token.
        num_heads: attention heads, where there are any.
        batch_size: sequences, the same on every rank.
        sequence: tokens of each.
    """

    name: str
    kind: str
    width: int
    num_heads: int
    batch_size: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch_size * self.sequence

    def module(self) -> nn.Module:
        """The layer, ``[batch, sequence, width]`` to the same, with initial weights that do not depend on the rank."""
        torch.manual_seed(_SEED)
        if self.kind == "block":
            return Block(self.width, self.num_heads)
        if self.kind == "mlp":
            return MLP(self.width)
        if self.kind == "llama":
            return LlamaLayers(self.width, self.num_heads, self.sequence)
        raise ValueError(f"there is no layer {self.kind!r}; there are 'block', 'mlp' and 'llama'")

    def batch(self) -> tuple[Tensor, Tensor]:
        """The input, whose gradient is wanted as within a model, and the gradient of the output."""
        generator = torch.Generator().manual_seed(_SEED + 1)
        shape = (self.batch_size, self.sequence, self.width)
        inputs, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        return inputs.requires_grad_(), gradient


class Block(nn.Module):
    """A causal block on ``[batch, sequence, width]``, and on nothing of other dimensions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.block = PreNormBlock(width, num_heads, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        _batch, _sequence, _width = x.shape
        return self.block(x)


class LlamaLayers(nn.Module):
    """Transformers' Llama between its embedding and its head.

    Args:
        model: one made elsewhere, such as in parallel, in place of a new one.
    """

    def __init__(self, width: int, num_heads: int, sequence: int, model: nn.Module | None = None) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = model or LlamaModel(
            LlamaConfig(
                vocab_size=num_heads,  # unused, and as small as tensor parallelism over the heads allows
                hidden_size=width,
                intermediate_size=11 * width // 4,
                num_hidden_layers=LLAMA_LAYERS,
                num_attention_heads=num_heads,
                num_key_value_heads=num_heads,
                max_position_embeddings=sequence,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state
