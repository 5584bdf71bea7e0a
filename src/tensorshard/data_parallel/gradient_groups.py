"""The ranks over which a parameter's gradients are summed, and those over which its state is sharded."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tensorshard.plan.mesh import Mesh


@dataclass(frozen=True)
class Groups:
    """The groups over which gradients are averaged."""

    mesh: DeviceMesh | None  # over which shards are kept
    shard: dist.ProcessGroup | None  # each rank keeps a shard of the sum
    sum: dist.ProcessGroup | None  # each rank keeps all of it
    all: dist.ProcessGroup | None  # all ranks that hold the parameter; None for one alone
    ranks: int  # that have different samples

    @property
    def num_shards(self) -> int:
        return 1 if self.shard is None else self.shard.size()

    @property
    def communicate(self) -> bool:
        return self.ranks > 1


def shard_layout(mesh: Mesh, level: int) -> Groups:
    """The groups of the parameters that all data ranks hold."""
    ranks = mesh.gradient_ranks
    if level == 0 or mesh.shard_size == 1:
        everyone = mesh.gradient_group if ranks > 1 else None
        return Groups(None, None, everyone, everyone, ranks)
    return _sharded(mesh, ranks)


def expert_layout(mesh: Mesh, level: int) -> Groups:
    """The groups of the parameters of experts, which some of the data ranks hold.

    Each rank's gradient has the terms of the samples of all ranks that share the experts, so what is left to sum is
    over the others. At level 1 and 2 there is a shard even where one rank holds them alone, because the other
    parameters have one.
    """
    if level == 0:
        everyone = mesh.experts.gradient_group
        return Groups(None, None, everyone, everyone, mesh.gradient_ranks)
    return _sharded(mesh.experts, mesh.gradient_ranks)


def _sharded(mesh: Mesh, ranks: int) -> Groups:
    replicate = mesh.group("dp_replicate") if mesh.degrees["dp_replicate"] > 1 else None
    return Groups(mesh.shard_mesh, mesh.shard_group, replicate, mesh.gradient_group, ranks)
