"""What a stage has sent is not kept until its backward, nor until the step ends."""

from functools import partial

import pytest
import torch

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.pipeline.run.draw_schedule import kept_by_ranks

SAMPLES, LENGTH, WIDTH, LAYERS, RANKS = 16, 512, 128, 8, 4
UNDER_WAY = 4  # messages of a stage at once


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_a_stage_keeps_the_inputs_of_its_blocks_and_a_few_messages(schedule, stages):
    plan = ts.Plan(
        pp=RANKS, pp_schedule=schedule, pp_stages_per_rank=stages, micro_batches=16, recompute="full"
    ).resolve(RANKS)
    tokens = torch.zeros(plan.micro_batches * SAMPLES, LENGTH, dtype=torch.long)
    estimate = ts.estimate(
        partial(GPT, vocab_size=64, context_length=LENGTH, num_layers=LAYERS, num_heads=4, width=WIDTH),
        plan,
        world_size=RANKS,
        inputs=tokens,
        targets=tokens,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss_fn=next_token_loss,
    )
    one_output = SAMPLES * LENGTH * WIDTH * 4
    kept = kept_by_ranks(schedule, ranks=RANKS, stages_per_rank=stages, micro_batches=16)[1]
    blocks = LAYERS // RANKS // stages
    few = kept * blocks + UNDER_WAY * stages + 0.1  # small tensors beside them
    assert estimate.ranks[1].by_category["activations"] <= few * one_output
