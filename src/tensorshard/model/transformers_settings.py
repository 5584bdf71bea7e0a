"""What tells transformers' models, and their switches: caches of keys and values, the search for packed sequences."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn

_SWITCH = "use_cache"
_CAPTURES = "transformers.utils.output_capturing"

_MODULE = "transformers.masking_utils"
_LOOKS = "find_packed_sequence_indices"
_POSITIONS = "position_ids"
_Model = TypeVar("_Model")


def is_of_transformers(module: nn.Module) -> bool:
    """Whether `module` is a model of Hugging Face's transformers, or derived from one."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def is_of_peft(module: nn.Module) -> bool:
    """Whether `module` is a ``PeftModel``, around a model with adapters."""
    return any(base.__name__ == "PeftModel" and base.__module__.startswith("peft.") for base in type(module).__mro__)


def captures_output(hook: Any) -> bool:
    """Whether a hook is one of those by which models of transformers collect what some of their modules return.

    Code of the model computes with what was collected, as that of a decoder with the hidden states of all stages.
    """
    return getattr(hook, "__module__", None) == _CAPTURES


class GenerationCache:
    """The switches of a model's caches of keys and values: those of its config, and of the configs of its parts.

    Generation needs the caches and training does not: they are off in training and tracing. Hugging Face's models fill
    one in every forward if ``config.use_cache`` says so, as stock configs do. It takes memory, recomputation would fill
    it a second time, and it is an output without a batch dimension.

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


class NotPacked:
    """Inside, models of transformers assume that each row is one sequence, unless `inputs` hold positions themselves.

    Otherwise they look for packed sequences in the values of their positions. Fake tensors have none: on these they
    assume packed sequences, and attend with a mask and repeated keys, which a run on real values does without.

    transformers may be imported only when a model is built. :meth:`building` is for that case.
    """

    def __init__(self, inputs: Any) -> None:
        self._is_known = not (isinstance(inputs, Mapping) and inputs.get(_POSITIONS) is not None)
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> "NotPacked":
        self._apply()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            setattr(sys.modules[_MODULE], _LOOKS, self._before)
            self._before = None

    def building(self, model: _Model) -> _Model:
        """A function that builds a model as the function `model` does; anything else is returned as it is."""
        if not isinstance(model, functools.partial | FunctionType | MethodType):
            return model

        def build() -> Any:
            built = model()
            self._apply()
            return built

        return cast(_Model, build)

    def _apply(self) -> None:
        module = sys.modules.get(_MODULE)
        if self._is_known and self._before is None and hasattr(module, _LOOKS):
            self._before = getattr(module, _LOOKS)
            setattr(module, _LOOKS, lambda position_ids: None)
