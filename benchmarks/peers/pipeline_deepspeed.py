"""DeepSpeed's PipelineModule, with torch's own AdamW passed in."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from benchmarks.peers.pipelines import PipelineStep
from benchmarks.pipelines import OPTIMIZER, PipelineWork, loss_fn


def build(work: PipelineWork, rank: int, world_size: int) -> PipelineStep:
    deepspeed.init_distributed("gloo", dist_init_required=False)
    module = PipelineModule(list(work.module()), num_stages=world_size, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=OPTIMIZER([p for p in module.parameters() if p.requires_grad]),
        config={
            "train_micro_batch_size_per_gpu": work.tokens,
            "gradient_accumulation_steps": work.micro_batches,
            "gradient_clipping": 0.0,  # clips to a norm of 1 unless told not to
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        parts = zip(inputs.chunk(work.micro_batches), targets.chunk(work.micro_batches), strict=True)
        return float(engine.train_batch(data_iter=iter(parts)))

    return step
