"""Refuses forwards that read a parameter as it was before a plan laid its model out, which nothing trains.

Places that the model's attributes lead to follow its parameters (:mod:`tensorshard.model.other_places`). A global
variable, an attribute of a class, or an iterator may hold one out of sight.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from tensorshard.model.watched_parameters import METADATA, Watch, watch
from tensorshard.parallelize.sharded_mark import is_laid_out
from tensorshard.torch_private.modules import MODULE_CALLS
from tensorshard.weights.files.export import own_class
from tensorshard.weights.initial import HeldTensors, TensorSource


def refuse_in_forwards(source: TensorSource) -> None:
    """From now on, forwards of laid-out models cannot read the trained parameters that were those of `source`."""
    if isinstance(source, HeldTensors):
        for name, tensor in source.held().items():
            if isinstance(tensor, nn.Parameter):
                watch(tensor, _Replaced(name))


class _Replaced(Watch):
    def __init__(self, name: str) -> None:
        self._name = name

    def before_use(self, parameter: nn.Parameter, function: Callable[..., Any]) -> None:
        if function in METADATA or not parameter.requires_grad:
            return
        reader = _laid_out_reader(sys._getframe(1))
        if reader is None:
            return
        module, line = reader
        raise RuntimeError(
            f"a forward of a {own_class(module).__name__} ({line}) reads parameter {self._name!r} as it was before "
            f"parallelize laid the model out, so that nothing would train it: it is held where no attribute of the "
            f"model leads to, such as a global variable or an attribute of a class. Read the registered parameter, or "
            f"keep it in an attribute of a module, in a list, dict, object or function there"
        )


def _laid_out_reader(frame: FrameType | None) -> tuple[nn.Module, str] | None:
    """The innermost laid-out module whose forward is running, and the line of the user's code that reads."""
    reader: FrameType | None = None
    while frame is not None:
        if frame.f_code in MODULE_CALLS and is_laid_out(frame.f_locals["self"]):
            line = "" if reader is None else f"{reader.f_code.co_filename}:{reader.f_lineno}"
            return frame.f_locals["self"], line
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if reader is None and package not in ("torch", "tensorshard"):
            reader = frame
        frame = frame.f_back
    return None
