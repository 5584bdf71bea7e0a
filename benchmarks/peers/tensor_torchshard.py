"""TorchShard 0.1: its parallel linear layers in place of nn.Linear."""

import torchshard
from torch import nn

from benchmarks.layers import LayerWork


def build(work: LayerWork, rank: int, world_size: int) -> nn.Module:
    if not torchshard.distributed.is_initialized():
        torchshard.distributed.init_process_group(group_size=world_size)
    module = work.module()
    if work.kind == "block":
        _split(module.block.attention, ("query", "key", "value"), "output")
        _split(module.block.mlp, ("up",), "down")
    elif work.kind == "mlp":
        _split(module, ("up",), "down")
    else:
        raise ValueError(f"TorchShard is measured on 'block' and 'mlp', not on {work.kind!r}")
    return module


def _split(parent: nn.Module, columns: tuple[str, ...], row: str) -> None:
    convert = torchshard.nn.ParallelLinear.convert_parallel_linear
    for column in columns:
        setattr(parent, column, convert(getattr(parent, column), dim=1))
    # Its marks do not outlive the operations between the layers: this is its way to put one back.
    setattr(parent, row, nn.Sequential(torchshard.nn.RegisterParallelDim(-1), convert(getattr(parent, row), dim=0)))
