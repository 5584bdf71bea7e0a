"""Caches of keys and values, which generation needs and training does not: they are off in training and tracing.

Hugging Face's models fill one in every forward if ``config.use_cache`` says so, as stock configs do. It takes memory,
recomputation would fill it a second time, and it is an output without a batch dimension.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

_SWITCH = "use_cache"


class GenerationCache:
    """The switches of a model's caches: those of its config, and of the configs of its parts.

    Args:
        models: their modules have the switches, as ``transformers.PreTrainedModel`` documents: an attribute ``config``
            with an attribute ``use_cache``. Nothing is changed yet.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._configs = _configs_of(models)

    def is_on(self) -> bool:
        """Whether a forward would fill a cache."""
        return any(getattr(config, _SWITCH) is True for config in self._configs)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, no cache is filled, unless a forward is given ``use_cache=True``. Then the switches are reset."""
        switched = [config for config in self._configs if getattr(config, _SWITCH) is True]
        for config in switched:
            setattr(config, _SWITCH, False)
        try:
            yield
        finally:
            for config in switched:
                setattr(config, _SWITCH, True)

    def off_in_training(self, model: nn.Module) -> AbstractContextManager[None]:
        """:meth:`off`, if a forward of `model` would keep its graph for a backward."""
        return self.off() if model.training and torch.is_grad_enabled() else nullcontext()


def _configs_of(models: tuple[nn.Module, ...]) -> list[Any]:
    configs: dict[int, Any] = {}
    for model in models:
        for module in model.modules():
            config = vars(module).get("config")
            if config is not None and hasattr(config, _SWITCH):
                configs[id(config)] = config
    return list(configs.values())
