"""A model of Hugging Face with the low-rank adapters of peft, by one call, which a config can make."""

from collections.abc import Sequence

from torch import nn


def with_lora(
    pretrained: str,
    *,
    r: int = 8,
    lora_alpha: int = 8,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    modules_to_save: Sequence[str] | None = None,
    use_dora: bool = False,
    use_rslora: bool = False,
    dtype: str = "auto",
) -> nn.Module:
    """The causal language model in the directory `pretrained`, frozen, with adapters that are trained (Hu et al. 2021).

    In a config, ``model._target_: tensorshard.models.with_lora`` makes it, of ``model.pretrained``.

    Args:
        pretrained: a directory as Hugging Face writes it.
        r: the rank of the adapters, which are scaled by ``lora_alpha / r``, with `use_rslora` by its root.
        lora_alpha: see `r`. lora_dropout: on what the adapters are given.
        target_modules: names of the layers that get adapters; "all-linear" for all but the last layer.
        modules_to_save: names of modules that are trained as a whole beside them.
        use_dora: whether magnitudes of the weights are trained, too (Liu et al. 2024).
        use_rslora: see `r`.
        dtype: what the frozen base is held in: "bfloat16", "float16", "float32", or "auto" for that of its files.

    Raises:
        ImportError: transformers or peft is not installed.
        ValueError: the model has no layers of these names.
    """
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)
    named = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = peft.LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=named,
        modules_to_save=list(modules_to_save) if modules_to_save else None,
        use_dora=use_dora,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, config)
