"""Whether a module of a user's class computes channel by channel, by numbers, in training.

Blocks are compared in evaluation. A normalization does something else in training. So a subclass of one, or a module
that only looks like one, is also compared by itself.
"""

import torch
from torch import nn

from tensorshard.model.copies import copy_module
from tensorshard.model.fake_copies import copy_with, random_values
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.table.layer_kinds import as_channelwise, channel_layouts, keep_own_channels
from tensorshard.tensor_parallel.table.layouts import Layout, join_shards, local_shard
from tensorshard.torch_private.modules import own_buffers, own_parameters, set_buffer, set_parameter

_SAMPLES = 4
_SIZES: tuple[tuple[int, ...], ...] = ((5, 7), (5,), (), (5, 7, 3))  # the dimensions after samples and channels
_TOLERANCE = 1e-4


def computes_by_channel(module: nn.Module, size: int, parts: int = 1) -> bool:
    """Whether `module` computes the same on all channels as `size` ranks do that each have some of them.

    Args:
        module: left as it is.
        parts: the number of equal parts that its channels consist of. Each part is split.
    """
    found = as_channelwise(module)
    if found is None:
        return False
    if found.surely:
        return True
    for extra in _SIZES:
        try:
            return _agrees(module, (_SAMPLES, found.inputs, *extra), size, parts)
        except Exception:  # any error of the module on such inputs
            continue
    return False


@torch.no_grad()
def _agrees(module: nn.Module, shape: tuple[int, ...], size: int, parts: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    given = copy_with(module, random_values(generator))
    given.eval()
    given.training = True  # only of this module: dropout inside of it would draw random numbers
    input = torch.randn(shape, generator=generator)
    layouts = channel_layouts("", given, size, parts)
    of_input = Layout(1, (shape[1] // parts,) * parts)
    ranks = [_shard(given, layouts, rank, size, parts) for rank in range(size)]
    outputs = [shard(local_shard(input, of_input, rank, size).clone()) for rank, shard in enumerate(ranks)]
    expected = given(input.clone())
    if len(tensor_leaves(expected)) != 1 or not isinstance(expected, torch.Tensor):
        return False
    channels = Layout(1, (expected.shape[1] // parts,) * parts)
    pairs = [(join_shards(outputs, channels), expected)]
    for key, buffer in own_buffers(given).items():
        held = [own_buffers(shard)[key] for shard in ranks]
        pairs += [(join_shards(held, layouts.get(key, Layout())), buffer)]
    return all(
        found.shape == value.shape and torch.allclose(found, value, _TOLERANCE, _TOLERANCE) for found, value in pairs
    )


def _shard(module: nn.Module, layouts: dict[str, Layout], rank: int, size: int, parts: int) -> nn.Module:
    shard: nn.Module = copy_module(module, {})
    keep_own_channels(shard, rank, size, parts)
    for key, parameter in own_parameters(shard).items():
        local = local_shard(parameter.detach(), layouts.get(key, Layout()), rank, size)
        set_parameter(shard, key, nn.Parameter(local, requires_grad=False))
    for key, buffer in own_buffers(shard).items():
        set_buffer(shard, key, local_shard(buffer, layouts.get(key, Layout()), rank, size))
    return shard
