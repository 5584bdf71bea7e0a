"""Convolutions of which each rank computes some output channels, or of which it has some input channels.

A convolution is linear in its channels, so that its columns and rows are those of a linear layer (Shoeybi et al. 2019,
section 3), along the dimension of the channels. The module's own forward runs, on this rank's weights: strides, padding
and dilation are its own affair.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.modules.forwards import Forward, Role, wrap_forward
from tensorshard.tensor_parallel.table.channelwise import keep_own_channels
from tensorshard.torch_private.modules import own_parameters, set_parameter


def split_columns(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Has a convolution compute this rank's output channels, of an input that is full on every rank."""
    wrap_forward(module, Role.SPLIT_LAYER, partial(_column_forward, group))


def gather_columns(module: nn.Module, outputs: int, group: dist.ProcessGroup) -> None:
    """Puts the `outputs` channels of a convolution together, of which each rank computes its own."""
    wrap_forward(module, Role.GATHERED_OUTPUT, partial(_gathering_forward, module, outputs, group))


def split_rows(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Has a convolution take this rank's input channels; its output is summed over the ranks, and its bias added."""
    wrap_forward(module, Role.SPLIT_LAYER, partial(_row_forward, module, group))


def split_channels(module: nn.Module, parts: int, group: dist.ProcessGroup) -> None:
    """Has a module that computes channel by channel do so for those of this rank.

    Args:
        parts: into how many equal parts its channels fall, each of which is split.
    """
    keep_own_channels(module, group.rank(), group.size(), parts)


def _column_forward(
    group: dist.ProcessGroup, forward: Forward, /, input: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return forward(collectives.copy(input, group), *args, **kwargs)


def _gathering_forward(
    module: nn.Module, outputs: int, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return collectives.gather(forward(*args, **kwargs), _channel_dim(module), group, size=outputs)


def _row_forward(
    module: nn.Module, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    bias = own_parameters(module).get("bias")
    if bias is None:
        return collectives.reduce(forward(*args, **kwargs), group)
    set_parameter(module, "bias", None)  # it is added once, to the sum
    try:
        part = forward(*args, **kwargs)
    finally:
        set_parameter(module, "bias", bias)
    shape = [1] * (-_channel_dim(module) - 1)
    return collectives.reduce(part, group) + bias.to(part.dtype).view(-1, *shape)


def _channel_dim(module: nn.Module) -> int:
    """The dimension of the channels in what goes in and comes out, counted from the end: samples may be missing."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return 1 - weight.ndim
