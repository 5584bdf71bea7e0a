"""torch's fully_shard (FSDP2): one unit a block, and one of what is left."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn

_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective checkpointing does not compute again."""


def build(
    model: ModelFactory,
    rank: int,
    world_size: int,
    *,
    reshard_after_forward: bool | None = None,
    recompute: str = "none",
) -> Step:
    """Options: `reshard_after_forward` is None for ZeRO 3, where torch reshards all units but the root's;
    False for ZeRO 2. `recompute` is "selective" for torch's selective activation checkpointing of each block."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = model()
    if recompute == "selective":
        wrap = partial(checkpoint_wrapper, context_fn=partial(create_selective_checkpoint_contexts, _keep_products))
        kind = type(sharded.blocks[0])
        apply_activation_checkpointing(sharded, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, kind))
        blocks = [module for module in sharded.modules() if isinstance(module, CheckpointWrapper)]
    else:
        blocks = sharded.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard_after_forward)
    optimizer = OPTIMIZER(sharded.parameters())

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = loss_fn(sharded(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
