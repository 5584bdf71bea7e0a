"""torch's DistributedDataParallel (ZeRO 0), and with it ZeroRedundancyOptimizer (ZeRO 1)."""

from torch import Tensor
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn


def build(
    model: ModelFactory,
    rank: int,
    world_size: int,
    *,
    gradient_as_bucket_view: bool = False,
    shard_optimizer: bool = False,
    parameters_as_bucket_view: bool = False,
) -> Step:
    """Options: `gradient_as_bucket_view` spares DDP a copy of the gradients; `shard_optimizer` takes
    ZeroRedundancyOptimizer; `parameters_as_bucket_view` lets that broadcast whole buckets of parameters."""
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model(), gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = (
        ZeroRedundancyOptimizer(
            replica.parameters(),
            optimizer_class=AdamW,
            parameters_as_bucket_view=parameters_as_bucket_view,
            **OPTIMIZER.keywords,
        )
        if shard_optimizer
        else OPTIMIZER(replica.parameters())
    )

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = loss_fn(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
