"""Modules that compute channel by channel, or by groups of channels, so that each rank can have some of them.

A batch normalization has statistics of each channel; a group normalization, of each group; a grouped convolution is as
many convolutions side by side. Of such a module each rank computes what is of its own channels, without communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.modules.forwards import runs_forward_of
from tensorshard.tensor_parallel.table.layer_kinds import is_convolution
from tensorshard.tensor_parallel.table.layouts import Layout
from tensorshard.torch_private.modules import BatchNormBase, NormBase, own_buffers, own_parameters

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class Channelwise:
    """What splitting has to know of such a module.

    Args:
        inputs, outputs: channels that go in and come out.
        groups: into how many groups of neighbours they fall, which are computed apart.
        counts: attributes that hold numbers of channels or of groups.
        surely: whether the class says so. Otherwise it is a guess, from the sizes of what it holds.
    """

    inputs: int
    outputs: int
    groups: int
    counts: tuple[str, ...]
    surely: bool


def as_channelwise(module: nn.Module) -> Channelwise | None:
    """How the channels of `module` could be split, or None if it does not look as if they could.

    Norms are known by their classes. Other modules look so if all that they hold is one number a channel, or several.
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
        return None  # others are inside of it
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
        name: what a model calls it, for messages.
        size: number of ranks.
        parts: into how many equal parts its channels fall, each of which is split.

    Raises:
        ValueError: it is no such module; its groups do not divide.
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
    """Has a channelwise `module` count the channels and groups that rank `rank` of `size` has. Its tensors are left."""
    found = as_channelwise(module)
    assert found is not None
    for key in found.counts:
        setattr(module, key, parts * shard_sizes(getattr(module, key) // parts, size)[rank])


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from own_parameters(module).items()
    yield from own_buffers(module).items()
