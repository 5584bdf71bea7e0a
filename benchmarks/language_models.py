"""Language models of transformers with real vocabularies, as plain modules from tokens to logits."""

from collections.abc import Iterable

from torch import Tensor, nn


class LanguageModel(nn.Module):
    """A causal model of transformers, of which :meth:`features` are what its last layer makes logits of.

    Args:
        model: with a ``lm_head``.
        blocks: its blocks, by which peers cut it into units.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.__dict__["blocks"] = list(blocks)  # past Module, which would name them twice

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits

    def features(self, tokens: Tensor) -> Tensor:
        """What the last layer is given: [samples, tokens, features]."""
        return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    @property
    def head(self) -> Tensor:
        """The last layer's weight, [classes, features]."""
        weight = self.model.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight


def gpt2(num_layers: int, num_heads: int, width: int, vocab_size: int, context_length: int) -> LanguageModel:
    """GPT-2 as transformers has it, its embedding and last layer tied, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_head=num_heads, n_embd=width, vocab_size=vocab_size, n_positions=context_length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    return LanguageModel(model, model.transformer.h)


def llama(num_layers: int, num_heads: int, width: int, vocab_size: int, context_length: int) -> LanguageModel:
    """A Llama as transformers has it, its last layer apart from its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=num_layers, num_attention_heads=num_heads, hidden_size=width, intermediate_size=3 * width,
        vocab_size=vocab_size, max_position_embeddings=context_length,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return LanguageModel(model, model.model.layers)


FAMILIES = {"gpt2": gpt2, "llama": llama}
