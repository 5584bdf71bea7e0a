"""The work of expert parallelism: a small mixture of experts, forward, backward and update, in fp32."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
"""Every contender's optimizer."""

_SEED = 0


@dataclass(frozen=True)
class MixtureWork:
    """A mixture of transformers and its batch.

    Args:
        experts: how many each layer has.
        choices: experts of a token.
        hidden: features inside of an expert.
        width: features of a token.
        layers: number of layers.
        samples, length: of the batch of all ranks.
        vocabulary: number of different tokens.
    """

    experts: int
    choices: int
    hidden: int
    width: int = 256
    layers: int = 2
    samples: int = 8
    length: int = 128
    vocabulary: int = 256

    def model(self) -> nn.Module:
        """The model, with initial weights that do not depend on the rank."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(_SEED)
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.width,
                intermediate_size=2 * self.width,
                moe_intermediate_size=self.hidden,
                num_experts=self.experts,
                num_experts_per_tok=self.choices,
                num_hidden_layers=self.layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=self.length,
                use_cache=False,
            )
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow, each ``[samples, length]``."""
        generator = torch.Generator().manual_seed(_SEED + 1)
        tokens = torch.randint(self.vocabulary, (self.samples, self.length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def exchanged_bytes(self, ranks: int) -> float:
        """Bytes of tokens and results that a rank receives from others in a step, if experts get equally many.

        Each choice of a token travels to its expert and back, in forward and in backward.
        """
        tokens = self.samples * self.length / ranks
        return 4 * 4 * self.layers * self.choices * self.width * tokens * (ranks - 1) / ranks


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
