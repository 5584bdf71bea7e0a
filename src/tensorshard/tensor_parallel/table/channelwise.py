"""Modules that compute channel by channel, or by groups of channels, so that each rank can have some of them.

A batch normalization has statistics for each channel, and a group normalization for each group. A grouped convolution
is many convolutions side by side. Each rank computes such a module's results for its own channels, without
communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.model.forwards import runs_forward_of
from tensorshard.tensor_parallel.table.layer_kinds import is_convolution
from tensorshard.tensor_parallel.table.layouts import Layout
from tensorshard.torch_private.modules import BatchNormBase, NormBase, own_buffers, own_parameters

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class Channelwise:
    """What splitting needs to know about such a module.

    Args:
        inputs, outputs: numbers of input and output channels.
        groups: number of groups of neighbouring channels that are computed apart.
        counts: names of attributes that hold numbers of channels or of groups.
        surely: whether the class decides this. If not, it is guessed from the sizes of parameters and buffers.
    """

    inputs: int
    outputs: int
    groups: int
    counts: tuple[str, ...]
    surely: bool


def as_channelwise(module: nn.Module) -> Channelwise | None:
    """How the channels of `module` could be split, or None if it does not look as if they could.

    Norms are known by their classes. Other modules count if all that they hold is one number per channel, or several.
    """
    if is_convolution(module):
        grouped = Channelwise(
            module.in_channels,  # type: ignore[arg-type]
            module.out_channels,  # type: ignore[arg-type]
            module.groups,  # type: ignore[arg-type]
            ("in_channels", "out_channels", "groups"),
            True,
        )
        return grouped if grouped.groups > 1 else None
    tensors = list(_own_tensors(module))
    if len(tensors) < sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers()):
        return None  # it contains other modules
    lengths = {tensor.shape for _, tensor in tensors if tensor.ndim > 0}
    if isinstance(module, nn.GroupNorm):
        size, groups = module.num_channels, module.num_groups
        surely = runs_forward_of(module, nn.GroupNorm)
        return Channelwise(size, size, groups, ("num_channels", "num_groups"), surely)
    if isinstance(module, NormBase):
        size = module.num_features
        surely = runs_forward_of(module, BatchNormBase, nn.SyncBatchNorm, *_INSTANCE_NORMS)
        return Channelwise(size, size, size, ("num_features",), surely)
    if len(lengths) != 1 or len(shape := next(iter(lengths))) != 1:
        return None
    counts = tuple(key for key, value in vars(module).items() if type(value) is int and value == shape[0])
    return Channelwise(shape[0], shape[0], shape[0], counts, False)


def channel_layouts(name: str, module: nn.Module, size: int, parts: int = 1) -> dict[str, Layout]:
    """Layouts of the parameters and buffers of a channelwise `module`, by their names in it.

    Args:
        name: the module's name in the model, for messages.
        size: number of ranks.
        parts: the number of equal parts that its channels consist of. Each part is split.

    Raises:
        ValueError: the module does not compute channel by channel, or its groups cannot be divided.
    """
    found = as_channelwise(module)
    if found is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, which cannot be 'channels': that is for batch, group and instance "
            f"norms, convolutions of several groups, and modules that hold one number a channel"
        )
    by_channel = found.groups == found.inputs == found.outputs
    if found.outputs % parts or found.inputs % parts or (found.groups % (parts * size) and not by_channel):
        packed = "" if parts == 1 else f" in {parts} parts"
        raise ValueError(
            f"{name} has {found.groups} groups of its {found.outputs} channels{packed}, which cannot be divided over "
            f"{size} ranks; lower tp, or leave it and the layers around it whole"
        )
    return {
        key: Layout(0, (tensor.shape[0] // parts,) * parts) for key, tensor in _own_tensors(module) if tensor.ndim > 0
    }


def keep_own_channels(module: nn.Module, rank: int, size: int, parts: int = 1) -> None:
    """Sets the channel and group counts of `module` to those of rank `rank` of `size`. Its tensors do not change."""
    found = as_channelwise(module)
    assert found is not None
    for key in found.counts:
        setattr(module, key, parts * shard_sizes(getattr(module, key) // parts, size)[rank])


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from own_parameters(module).items()
    yield from own_buffers(module).items()
