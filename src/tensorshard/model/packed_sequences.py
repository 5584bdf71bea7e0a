"""Several sequences packed in one row. Hugging Face's models look for them in the values of their positions.

Fake tensors have no values. On these, the models assume packed sequences, and attend with a mask and repeated keys,
which a run on real values does without.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

_MODULE = "transformers.masking_utils"
_LOOKS = "find_packed_sequence_indices"
_POSITIONS = "position_ids"

_Model = TypeVar("_Model")


class NotPacked:
    """Inside, models of transformers assume that each row is one sequence, unless `inputs` hold positions themselves.

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
