"""Where torch repeats a forward in backward, and functions of torch's own that only hang something on autograd's graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

IDENTITIES = ("RegisterPostBackwardFunction", "RegisterPreBackwardFunction", "_DDPSink")
"""Names of the autograd functions of FSDP and DDP that return their arguments."""


def repeated_forwards() -> tuple[Any, str]:
    """Where ``torch.utils.checkpoint`` (with ``use_reentrant=False``) takes the function that it repeats in backward: the
    first argument of this attribute of a module.

    Why: a forward that is repeated in backward needs the context that it first ran in, whoever calls backward.

    Checked: torch 2.13.

    Public way: ``context_fn``, for who calls ``checkpoint`` oneself.
    """
    return checkpoint, "_checkpoint_without_reentrant_generator"


def is_reentrant_checkpoint(function: type[torch.autograd.Function]) -> bool:
    """Whether this is the autograd function of ``torch.utils.checkpoint`` with ``use_reentrant=True``. Its arguments are
    the function to repeat, whether random states are kept, and that function's arguments.

    Why: the function has to be given whole-looking tensors again in backward, where autograd kept their parts.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return function is CheckpointFunction


def apply_of_functions() -> Callable[..., Any]:
    """``torch.autograd.Function.apply`` as a plain function that takes the class first.

    Why: functions that know no tensor classes have to be given plain tensors, before autograd looks at them.

    Checked: torch 2.13 and 2.15.

    Public way: ``torch.autograd.Function.apply``, bound to a class.
    """
    return torch.autograd.Function.__dict__["apply"].__func__  # type: ignore[no-any-return]
