"""The transforms in their order: tensor -> recompute -> compile -> precision -> shard."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.materialize import TensorSource
from tensorshard.mesh import Mesh
from tensorshard.plan import Plan
from tensorshard.transforms.assign import assign_buffers
from tensorshard.transforms.batch_norm import synchronize_batch_norm
from tensorshard.transforms.precision import DTYPES, keep_norms_fp32
from tensorshard.transforms.recompute import apply_recompute
from tensorshard.transforms.shard import ShardedModel, shard_units
from tensorshard.transforms.tensor_split import choose_tensor_split, split_over_tensor_ranks
from tensorshard.transforms.units import find_blocks


def apply_plan(source: TensorSource, plan: Plan, mesh: Mesh, device: torch.device, *, broadcast: bool) -> ShardedModel:
    """The source's model, laid out over `mesh` as `plan` says, its values on `device`.

    Args:
        broadcast: whether the values of the mesh's first rank count, because the ranks' own may differ.
    """
    model = source.module
    names = [name for name, _ in model.named_parameters()]
    found = choose_tensor_split(model, plan, mesh)
    blocks = find_blocks(model)
    units = shard_units(model, plan.shard_units)
    if plan.precision != "fp32":
        keep_norms_fp32(model)
    if mesh.dp_size > 1:
        synchronize_batch_norm(model, mesh.dp_group)
    split = split_over_tensor_ranks(model, found, plan, mesh)
    repeated = list(blocks.values()) or [model]  # a model without blocks is one
    apply_recompute(repeated, plan.recompute)
    if plan.compile:
        compile_blocks(repeated)
    reduce_dtype = DTYPES[plan.reduce_dtype or "fp32"]

    def value_of(name: str) -> torch.Tensor:
        value = source.tensor(name).to(device)
        if broadcast:
            value = value.contiguous()
            dist.broadcast(value, group=mesh.world_group, group_src=0)
        return split.local(name, value)

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, value_of(name)

    assign_buffers(model, value_of, device)
    if plan.zero == 3 and mesh.degrees["dp_shard"] > 1:
        from tensorshard.transforms.fully_sharded import FullyShardedModel

        return FullyShardedModel(
            model, value_of, units, mesh, split, precision=plan.precision, reduce_dtype=reduce_dtype
        )
    from tensorshard.transforms.replicated import ReplicatedModel

    return ReplicatedModel(
        model, values(), units, mesh, split, level=int(plan.zero), precision=plan.precision, reduce_dtype=reduce_dtype
    )


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compiles each block's forward. Hooks stay outside of what is compiled."""
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
