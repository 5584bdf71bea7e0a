"""What torch's recomputation compares between a forward and its repetition."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint


@contextmanager
def comparing_saved_tensors(describe: Callable[[torch.Tensor], Any]) -> Iterator[str]:
    """Gives the value of ``determinism_check`` with which ``torch.utils.checkpoint.checkpoint`` compares what `describe`
    returns for each tensor that forward saves, and for each that is recomputed in its place (by ``!=``).

    Why: by default, torch compares shapes and types only, so a forward that computes other values the second time
    gives wrong gradients without a word.

    Checked: torch 2.13.

    Public way: none; ``determinism_check`` takes the names of two checks that torch has.
    """
    checks: dict[str, Callable[[torch.Tensor], Any]] = checkpoint._allowed_determinism_checks_to_fns
    name = f"tensorshard-{id(describe)}"
    checks[name] = describe
    try:
        yield name
    finally:
        del checks[name]


def stops_early() -> bool:
    """Whether a repeated forward ends as soon as it has saved as many tensors as the first one did.

    Why: one that runs to its end has saved fewer, and torch's error does not name the block.

    Checked: torch 2.13.

    Public way: none; ``set_checkpoint_early_stop`` sets it.
    """
    return checkpoint._enable_checkpoint_early_stop is not False
