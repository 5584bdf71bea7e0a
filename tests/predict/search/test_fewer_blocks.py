"""A trace of a model with a few of its equal blocks says what one of all blocks says."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.operations import SECTIONS
from tensorshard.predict.search.fewer_blocks import FewerBlocks, equal_blocks, with_all_blocks
from tensorshard.predict.search.question import Question, ask
from tensorshard.predict.search.traces import Trace, run_trace, search_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.styles import COLWISE
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable

TOKENS = torch.zeros(2, 16, dtype=torch.long)
MODEL = partial(GPT, 64, 16, 12, 4, 32)


def _question(build: Callable[[], nn.Module] = MODEL) -> Question:
    if dist.is_initialized():
        dist.destroy_process_group()
    return ask(
        build,
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


def _first_block_is_wider() -> nn.Module:
    model = GPT(64, 16, 13, 4, 32)
    model.blocks[0].mlp.up, model.blocks[0].mlp.down = nn.Linear(32, 256), nn.Linear(256, 32)
    return model


@pytest.mark.parametrize(("build", "sequence_parallel"), [(MODEL, False), (MODEL, True), (_first_block_is_wider, True)])
def test_the_table_is_found_with_a_few_blocks(build, sequence_parallel):
    question, names = _question(build), equal_blocks(build())
    search_table(question, 2, 2, names, sequence_parallel=sequence_parallel)
    assert list(question.shortened) == [3]
    found = question.tables[2, sequence_parallel]
    whole = find_tensor_plan(build(), 2, inputs=TOKENS, sequence_parallel=sequence_parallel)
    assert found.plan.resolve(build()) == whole.plan.resolve(build())
    assert (found.sequence, found.not_random) == (whole.sequence, whole.not_random)
    assert sorted(found.shared_inputs) == sorted(whole.shared_inputs)
    assert bool(found.sequence) == sequence_parallel


def test_a_table_of_blocks_that_were_split_differently_is_searched_again():
    names, styles = equal_blocks(MODEL()), {"blocks.0.mlp.up": COLWISE, "head": COLWISE}
    assert with_all_blocks(VerifiedTable(TensorTable(styles), {}, 0.5, 2, []), names, 3) is None


def test_a_model_that_needs_all_of_its_blocks_has_its_table_searched_on_all():
    question = _question(NeedsAll)
    run_trace(question, (2, True, "none"), 2, equal_blocks(NeedsAll()))
    assert (2, True) in question.tables


class NeedsAll(GPT):
    """A GPT that looks for its last block."""

    def __init__(self) -> None:
        super().__init__(*MODEL.args)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.blocks[11] is not None
        return super().forward(tokens)


def test_blocks_that_differ_stay():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(14)))
    assert len(equal_blocks(model)) == 14
    model[3] = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    names = equal_blocks(model)
    assert len(names) == 13 and "3" not in names
    short = FewerBlocks(lambda: model, names[3:])()
    assert list(dict(short.named_children())) == ["0", "1", "2", "3"]
    assert not equal_blocks(short)
