"""torch.distributed.pipelining by hand: each rank makes its slice of the nn.Sequential a stage."""

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.peers.pipelines import PipelineStep
from benchmarks.pipelines import OPTIMIZER, PipelineWork, loss_fn

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def build(work: PipelineWork, rank: int, world_size: int, *, schedule: str = "1f1b") -> PipelineStep:
    """Options: `schedule`, "1f1b" or "gpipe"."""
    share = work.blocks // world_size
    module = work.module()[rank * share : (rank + 1) * share]
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    pipeline = _SCHEDULES[schedule](stage, n_microbatches=work.micro_batches, loss_fn=loss_fn)
    optimizer = OPTIMIZER(module.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            pipeline.step(inputs, return_outputs=False)
        elif rank == world_size - 1:
            pipeline.step(target=targets, losses=losses, return_outputs=False)
        else:
            pipeline.step()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None

    return step
