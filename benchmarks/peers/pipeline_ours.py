"""tensorshard: a Plan with ``pp``."""

from typing import Any

import torch

import tensorshard as ts
from benchmarks.peers.pipelines import PipelineStep
from benchmarks.pipelines import OPTIMIZER, PipelineWork, loss_fn


def build(work: PipelineWork, rank: int, world_size: int, **plan: Any) -> PipelineStep:
    """Options: further fields of the Plan; ``pp`` is the number of ranks unless given."""
    fields = {"pp": world_size, "zero": 0, **plan}
    engine = ts.parallelize(
        work.module(),
        ts.Plan(micro_batches=work.micro_batches // _data_ranks(fields, world_size), **fields),
        optimizer=OPTIMIZER,
        loss_fn=loss_fn,
        device="cpu",
        sample_inputs=work.batch(0)[0][: work.tokens],
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        part = [tensor.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for tensor in (inputs, targets)]
        return engine.step(*part).item()

    return step


def _data_ranks(fields: dict[str, Any], world_size: int) -> int:
    return world_size // (fields["pp"] * fields.get("tp", 1))
