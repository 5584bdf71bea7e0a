"""torch's fully_shard (FSDP2): one unit a block, and one of what is left."""

from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn


def build(model: ModelFactory, rank: int, world_size: int, *, reshard_after_forward: bool | None = None) -> Step:
    """Options: `reshard_after_forward` is None for ZeRO 3, where torch reshards all units but the root's;
    False for ZeRO 2."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = model()
    for block in sharded.blocks:
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
