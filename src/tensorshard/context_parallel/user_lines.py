"""Which line of a user's code an operation comes from."""

import os
import sys
from types import FrameType

import torch

_OURS = os.path.dirname(__file__)
_PRIVATE = os.path.join(os.path.dirname(_OURS), "torch_private")
_TORCH = os.path.dirname(torch.__file__)


def line_of_caller() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, _PRIVATE, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
