"""A trace of a model with a few of its equal blocks says what one of all blocks says."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorshard.estimate.operations import SECTIONS
from tensorshard.models import GPT, next_token_loss
from tensorshard.planner.fewer_blocks import FewerBlocks, equal_blocks
from tensorshard.planner.question import Question, ask
from tensorshard.planner.traces import Trace, run_trace

TOKENS = torch.zeros(2, 16, dtype=torch.long)
MODEL = partial(GPT, 64, 16, 12, 4, 32)


def _question() -> Question:
    if dist.is_initialized():
        dist.destroy_process_group()
    return ask(
        MODEL,
        world_size=4,
        inputs=TOKENS,
        targets=TOKENS,
        optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
        loss_fn=next_token_loss,
        hardware="h100",
        memory=None,
        global_batch=8,
        fixed={"precision": "bf16"},
    )


def _sums(trace: Trace) -> list[int]:
    kernels = [(k, count) for section in SECTIONS for k, count in trace.kernels[section]]
    sums = [sum(k.flops * count for k, count in kernels), sum(k.nbytes * count for k, count in kernels)]
    sums += [sum(t.nbytes * count for t, count in trace.transfers), sum(count for _, count in trace.transfers)]
    return [*sums, trace.parameters, trace.gradients, trace.optimizer, trace.activations]


@pytest.mark.parametrize("family", [(1, False, "none"), (2, True, "full")])
def test_a_trace_of_few_blocks_says_the_same(family):
    names = equal_blocks(MODEL())
    assert len(names) == 12
    question = _question()
    whole = run_trace(question, family, 2)
    assert not question.shortened
    short = run_trace(question, family, 2, names)
    assert _sums(short) == _sums(whole)
    assert short.working == pytest.approx(whole.working, rel=0.05)  # of the moments that are kept of each step
    assert sorted(question.shortened) == [3, 4]


def test_a_table_has_to_be_found_for_the_whole_model():
    question = _question()
    run_trace(question, (2, True, "none"), 2, equal_blocks(MODEL()))
    assert (2, True) in question.tables and not question.shortened


def test_blocks_that_differ_stay():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(14)))
    assert len(equal_blocks(model)) == 14
    model[3] = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    names = equal_blocks(model)
    assert len(names) == 13 and "3" not in names
    short = FewerBlocks(lambda: model, names[3:])()
    assert list(dict(short.named_children())) == ["0", "1", "2", "3"]
    assert not equal_blocks(short)
