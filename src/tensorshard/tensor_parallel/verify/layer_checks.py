"""Whether layers of a user's class compute the same on parts of their weights, by numbers, in training.

Blocks are compared in evaluation. A normalization does something else in training, and a linear layer with its own
forward may. So subclasses of these, and modules that only look like them, are also compared by themselves. Torch's own
layers need no check.
"""

import torch
from torch import nn

from tensorshard.comm.sharding import shard_range
from tensorshard.model.copies import copy_module
from tensorshard.model.fake_copies import copy_with, random_values
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.table.layer_kinds import (
    as_channelwise,
    as_splittable,
    channel_layouts,
    keep_own_channels,
)
from tensorshard.tensor_parallel.table.layouts import Layout, join_shards, local_shard
from tensorshard.torch_private.modules import own_buffers, own_parameters, set_buffer, set_parameter

_TOLERANCE = 1e-4
# Of a module that computes by channel.
_SAMPLES = 4
_SIZES: tuple[tuple[int, ...], ...] = ((5, 7), (5,), (), (5, 7, 3))  # the dimensions after samples and channels
# If an output layer has more classes, only this many are compared.
_MOST_OUTPUTS = 512


def computes_by_channel(module: nn.Module, size: int, parts: int = 1) -> bool:
    """Whether `module` computes the same on all channels as `size` ranks do that each have some of them.

    Args:
        module: left as it is.
        parts: the number of equal parts that its channels consist of. Each part is split.
    """
    channelwise = as_channelwise(module)
    if channelwise is None:
        return False
    if channelwise.surely:
        return True
    for extra in _SIZES:
        try:
            return _agrees(module, (_SAMPLES, channelwise.inputs, *extra), size, parts)
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
    return all(_is_close(joined, full) for joined, full in pairs)


def _shard(module: nn.Module, layouts: dict[str, Layout], rank: int, size: int, parts: int) -> nn.Module:
    shard: nn.Module = copy_module(module, {})
    keep_own_channels(shard, rank, size, parts)
    for key, parameter in own_parameters(shard).items():
        local = local_shard(parameter.detach(), layouts.get(key, Layout()), rank, size)
        set_parameter(shard, key, nn.Parameter(local, requires_grad=False))
    for key, buffer in own_buffers(shard).items():
        set_buffer(shard, key, local_shard(buffer, layouts.get(key, Layout()), rank, size))
    return shard


@torch.no_grad()
def computes_as_linear(module: nn.Module, splits_inputs: bool, size: int) -> bool:
    """Whether `size` ranks that each have a part of the weight compute what `module` does.

    Args:
        module: has its own forward; left as it is.
        splits_inputs: whether each rank has some of the inputs. Else each has some of the outputs.
    """
    layer = as_splittable(module)
    assert layer is not None
    outputs = min(layer.outputs, _MOST_OUTPUTS * size)
    generator = torch.Generator().manual_seed(0)
    values = random_values(generator)
    given = copy_with(module, lambda name, t: values(name, t[:outputs] if t.shape[:1] == (layer.outputs,) else t))
    given.train()
    input = torch.randn((2, 3, layer.inputs), generator=generator)
    own = {key: parameter.detach() for key, parameter in own_parameters(given).items()}
    weight, bias = own["weight"], own.get("bias")

    def with_parameters(weight: torch.Tensor, bias: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor:
        set_parameter(given, "weight", weight)
        set_parameter(given, "bias", bias)
        torch.manual_seed(0)
        return given(input)

    try:
        with torch.random.fork_rng(devices=[]):
            expected = with_parameters(weight, bias, input)
            results = []
            for rank in range(size):
                start, length = shard_range(layer.inputs if splits_inputs else outputs, size, rank)
                part = slice(start, start + length)
                if splits_inputs:
                    results.append(with_parameters(weight[:, part], None, input[..., part]))
                else:
                    results.append(with_parameters(weight[part], None if bias is None else bias[part], input))
    except Exception:  # any error of the forward on a part of the weight, or on a random input
        return False
    total = torch.stack(results).sum(0) if splits_inputs else torch.cat(results, -1)
    if splits_inputs and bias is not None:
        total = total + bias
    return _is_close(total, expected)


def _is_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return value.shape == expected.shape and torch.allclose(value, expected, _TOLERANCE, _TOLERANCE)
