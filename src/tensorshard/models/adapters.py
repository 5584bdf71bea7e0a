"""A model of Hugging Face with the low-rank adapters of peft, by one call, which a config can make."""

from collections.abc import Sequence

from torch import nn

from tensorshard.common.words import install_extra


def with_lora(
    pretrained: str | None = None,
    *,
    config: str | None = None,
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

    In a config, ``model._target_: tensorshard.models.with_lora`` makes it, of ``model.pretrained``; in the shipped one
    ``hf``, ``adapters.rank=8`` does.

    Args:
        pretrained: a directory as Hugging Face writes it; None for new weights, of the sizes in `config`.
        config: a directory with a ``config.json``. Not read beside `pretrained`.
        r: the rank of the adapters, which are scaled by ``lora_alpha / r``, with `use_rslora` by its root.
        lora_alpha: see `r`. lora_dropout: on what the adapters are given.
        target_modules: names of the layers that get adapters; "all-linear" for all but the last layer.
        modules_to_save: names of modules that are trained as a whole beside them.
        use_dora: whether magnitudes of the weights are trained, too (Liu et al. 2024).
        use_rslora: see `r`.
        dtype: what the frozen base is held in: "bfloat16", "float16", "float32", or "auto" for that of its files.

    Raises:
        ImportError: transformers or peft is not installed.
        ValueError: neither `pretrained` nor `config` is given; the model has no layers of these names.
    """
    try:
        import peft
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"adapters need {error.name}, which is not installed: {install_extra('adapters')}") from error
    if pretrained is not None:
        base = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)
    elif config is not None:
        sizes = AutoConfig.from_pretrained(config, local_files_only=True)
        base = AutoModelForCausalLM.from_config(sizes, dtype=sizes.dtype if dtype == "auto" else dtype)
    else:
        raise ValueError("with_lora was given neither pretrained=DIR, whose weights it freezes, nor config=DIR")
    named = target_modules if isinstance(target_modules, str) else list(target_modules)
    lora = peft.LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=named,
        modules_to_save=list(modules_to_save) if modules_to_save else None,
        use_dora=use_dora,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, lora)
