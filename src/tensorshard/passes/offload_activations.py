"""Offloads what blocks keep for backward."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.offload.activations import OffloadedActivations


def offload_activations(blocks: Iterable[nn.Module], activations: OffloadedActivations) -> None:
    """Makes `activations` move what each block keeps for backward; with recomputation, the block's inputs.

    Args:
        blocks: modules whose forward is replaced on the instance; names, parameters and hooks stay as they are.
    """
    for block in blocks:
        wrap_forward(block, Role.OFFLOADED_ACTIVATIONS, partial(_moved, activations, block))


def _moved(activations: OffloadedActivations, block: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return activations.forward(block, forward, *args, **kwargs)
