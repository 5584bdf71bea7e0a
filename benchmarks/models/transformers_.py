"""Cases of transformers: a configuration with small sizes, and otherwise as it comes."""

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.models.batches import CLASSES, VOCABULARY, Batches, token_loss, tokens
from benchmarks.models.case import Case, Loss, dropped

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GROUPED = {"num_key_value_heads": 2}


def text_case(
    name: str,
    model: str,
    settings: dict[str, Any],
    batch: Batches | None = None,
    loss: Loss = token_loss,
    *,
    config: str | None = None,
    group: str = "text decoders",
) -> Case:
    """A model of tokens."""
    batches = batch or tokens("input_ids")
    return Case(name, "transformers", builder(model, settings, config), batches, loss, group, is_sequence=True)


def builder(model: str, settings: dict[str, Any], config: str | None = None) -> Callable[[], nn.Module]:
    """Makes the class `model` of transformers from its configuration's class with `settings`.

    What is called dropout in it, and in the configurations inside of it, drops a tenth where it would drop nothing; or
    nothing, see :meth:`Case.built`. Masks that numpy draws are left out.

    Args:
        config: the configuration's class; by default that of `model`.
    """

    def build() -> nn.Module:
        import transformers

        chosen = getattr(transformers, model)
        kind = getattr(transformers, config) if config is not None else chosen.config_class
        made = kind(**settings)
        _drop(made, dropped())
        return chosen(made)

    return build


def _drop(config: Any, share: float) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _drop(value, share)
        elif isinstance(value, float) and "drop" in name and (share == 0.0 or (value == 0.0 and "dropout" in name)):
            setattr(config, name, share)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False


CLASSIFIES = {"num_labels": CLASSES}
