"""Several sequences in one row, which Hugging Face's models look for in the values of their positions.

On fake tensors, which have none, these models take it that there are some, and attend with a mask and repeated keys
that a run on values does without.
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
    """Inside, models of transformers take it that each row is one sequence, unless `inputs` say positions themselves.

    transformers may be imported only when a model is built: :meth:`building` is for that.
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
        """What does the same as a function `model` that builds a model; anything else as it is."""
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
