"""Results that selective recomputation keeps as a whole, whatever they are made of."""

from abc import abstractmethod
from collections.abc import Callable

import torch

from tensorshard.torch_private.dispatch import TorchDispatchMode, dispatch_modes


class KeepsResults(TorchDispatchMode):
    """Surrounds a forward that is computed again in backward, or its repetition."""

    @abstractmethod
    def result_of(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As for :func:`kept_result`."""

    def has_saved(self) -> None:
        """As for :func:`function_has_saved`; does nothing."""


def kept_result(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `compute` returns. Selective recomputation keeps that, and nothing of what it is made of.

    So a sum over ranks is not sent again in backward, and what one rank adds to it is not kept (torchtitan's selective
    recomputation keeps what its reduce-scatters return for the same reason).

    Args:
        compute: called without gradients, in the forward of a custom autograd function, which returns the same tensor
            and does not save it. A repetition may leave it out.
    """
    mode = _innermost()
    return compute() if mode is None else mode.result_of(compute)


def function_has_saved() -> None:
    """Called once such a function has saved what it needs for backward. If nothing is saved after that, backward does
    not need the latest result, and it is not kept."""
    mode = _innermost()
    if mode is not None:
        mode.has_saved()


def _innermost() -> KeepsResults | None:
    return next((mode for mode in reversed(dispatch_modes()) if isinstance(mode, KeepsResults)), None)
