"""The work of context parallelism: a small language model on long sequences, forward, backward and update, in fp32."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SEED = 0


@dataclass(frozen=True)
class SequenceWork:
    """A model and its batch: one sequence, the same on every rank.

    Args:
        kind: "llama" or "mamba", both of transformers.
        length: tokens of the sequence.
        width: features of a token.
        layers: number of layers.
        heads: of queries, in a Llama.
        key_heads: of keys and values, in a Llama.
        vocabulary: number of different tokens.
    """

    kind: str
    length: int
    width: int = 256
    layers: int = 2
    heads: int = 8
    key_heads: int = 2
    vocabulary: int = 256

    def model(self) -> nn.Module:
        """The model, with initial weights that do not depend on the rank.

        Raises:
            ValueError: there is no such kind.
        """
        import transformers

        torch.manual_seed(_SEED)
        if self.kind == "llama":
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=self.vocabulary,
                    hidden_size=self.width,
                    intermediate_size=11 * self.width // 4,
                    num_hidden_layers=self.layers,
                    num_attention_heads=self.heads,
                    num_key_value_heads=self.key_heads,
                    max_position_embeddings=self.length,
                    use_cache=False,
                )
            )
        if self.kind == "mamba":
            return transformers.MambaForCausalLM(
                transformers.MambaConfig(
                    vocab_size=self.vocabulary, hidden_size=self.width, num_hidden_layers=self.layers, use_cache=False
                )
            )
        raise ValueError(f"there is no model {self.kind!r}; there are 'llama' and 'mamba'")

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow, each ``[1, length]``."""
        generator = torch.Generator().manual_seed(_SEED + 1)
        tokens = torch.randint(self.vocabulary, (1, self.length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def attention_bytes(self, ranks: int, order: str) -> float:
        """Bytes that a rank receives in a step for a Llama's attention where keys and values are gathered; the mean.

        They come in forward, again in backward, and then the gradients of this rank's own come back. Causal attention
        needs the keys up to a rank's last position. In contiguous order those are the parts of earlier ranks. In
        zig-zag order rank r has the r-th of 2 N parts and the r-th from the end, and lacks 2 N - 2 - r parts before it.

        Args:
            order: of positions, "contiguous" or "zigzag".
        """
        lacked = (ranks - 1) / 2 if order == "contiguous" else 3 * (ranks - 1) / 4  # times the positions of a rank
        elements = 2 * self.key_heads * (self.width // self.heads) * self.length / ranks
        return 3 * 4 * self.layers * elements * lacked
