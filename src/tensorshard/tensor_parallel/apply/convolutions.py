"""Convolutions that are split by their output channels, or by their input channels.

A convolution is linear in its channels. So it can be split by columns or by rows as a linear layer can (Shoeybi et al.
2019, section 3), along the dimension of the channels. The module's own forward runs on this rank's weights, and takes
care of strides, padding and dilation.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.tensor_parallel.table.channelwise import keep_own_channels
from tensorshard.torch_private.modules import own_parameters, set_parameter


def split_columns(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes a convolution compute this rank's output channels, from an input that is full on every rank."""
    wrap_forward(module, Role.SPLIT_LAYER, partial(_column_forward, group))


def gather_columns(module: nn.Module, outputs: int, group: dist.ProcessGroup) -> None:
    """Gathers the `outputs` channels of a convolution, of which each rank computes its own."""
    wrap_forward(module, Role.GATHERED_OUTPUT, partial(_gathering_forward, module, outputs, group))


def split_rows(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes a convolution take this rank's input channels. Its output is summed over the ranks, then its bias added."""
    wrap_forward(module, Role.SPLIT_LAYER, partial(_row_forward, module, group))


def split_channels(module: nn.Module, parts: int, group: dist.ProcessGroup) -> None:
    """Makes a module that computes channel by channel do so for this rank's channels.

    Args:
        parts: the number of equal parts that its channels consist of. Each part is split.
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
    """The dimension of the channels in input and output, counted from the end, since samples may be missing."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return 1 - weight.ndim
