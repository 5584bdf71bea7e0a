"""What is extrapolated from a few of a model's equal blocks is what all of them take, or just below."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from tensorshard.predict.operation_ledger import SECTIONS
from tensorshard.predict.search import search, traces
from tensorshard.predict.search.model_facts import FewerBlocks, equal_blocks, with_all_blocks
from tensorshard.predict.search.problem import SearchProblem, make_problem
from tensorshard.predict.search.search import predict_from_few_blocks
from tensorshard.predict.search.traces import Trace, TraceKey, run_trace, search_table
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.styles import COLWISE
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable

TOKENS = torch.zeros(2, 16, dtype=torch.long)
MODEL = partial(GPT, 64, 16, 12, 4, 32)


def _problem(build: Callable[[], nn.Module] = MODEL) -> SearchProblem:
    if dist.is_initialized():
        dist.destroy_process_group()
    return make_problem(
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


@pytest.mark.slow_cases("key1")
@pytest.mark.parametrize(
    "key", [pytest.param(TraceKey(1, False, "none"), marks=pytest.mark.slow), TraceKey(2, True, "full")]
)
def test_a_trace_of_few_blocks_says_the_same(key):
    names = equal_blocks(MODEL())
    assert len(names) == 12
    problem = _problem()
    whole = run_trace(problem, key, 2)
    assert not problem.shortened
    short = run_trace(problem, key, 2, names)
    assert _sums(short) == _sums(whole)
    assert short.working == pytest.approx(whole.working, rel=0.05)  # of the moments that are kept of each step
    assert sorted(problem.shortened) == [3, 4]


def _first_block_is_wider() -> nn.Module:
    model = GPT(64, 16, 13, 4, 32)
    model.blocks[0].mlp.up, model.blocks[0].mlp.down = nn.Linear(32, 256), nn.Linear(256, 32)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "sequence_parallel"),
    [
        pytest.param(MODEL, False, marks=pytest.mark.slow),
        pytest.param(MODEL, True, marks=pytest.mark.slow),
        (_first_block_is_wider, True),
    ],
)
def test_the_table_is_found_with_a_few_blocks(build, sequence_parallel):
    problem, names = _problem(build), equal_blocks(build())
    search_table(problem, 2, 2, names, sequence_parallel=sequence_parallel)
    assert list(problem.shortened) == [3]
    found = problem.tables[2, sequence_parallel]
    whole = find_tensor_plan(build(), 2, inputs=TOKENS, sequence_parallel=sequence_parallel)
    assert found.plan.resolve(build()) == whole.plan.resolve(build())
    assert found.sequence == whole.sequence
    assert sorted(found.shared_inputs) == sorted(whole.shared_inputs)
    assert bool(found.sequence) == sequence_parallel


def test_a_table_of_blocks_that_were_split_differently_is_searched_again():
    names, styles = equal_blocks(MODEL()), {"blocks.0.mlp.up": COLWISE, "head": COLWISE}
    assert with_all_blocks(VerifiedTable(TensorTable(styles), {}, 0.5, 2, []), names, 3) is None


@pytest.mark.slow
def test_a_model_that_needs_all_of_its_blocks_has_its_table_searched_on_all():
    problem = _problem(NeedsAll)
    run_trace(problem, TraceKey(2, True, "none"), 2, equal_blocks(NeedsAll()))
    assert (2, True) in problem.tables


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


DEEP = partial(GPT, 64, 16, 14, 4, 32)
PLANS = [
    dict(zero=3),
    dict(zero=1, recompute="full", micro_batches=2),
    dict(zero=0, tp=2, sequence_parallel=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_what_is_extrapolated_is_just_below_the_estimate(fields):
    problem, names = _problem(DEEP), equal_blocks(DEEP())
    plan = problem.plan(**fields).resolve(4)
    estimate = problem.estimate(plan)
    prediction = predict_from_few_blocks(problem, plan, names)
    device = estimate.largest.peak_device
    assert 0.96 * device <= prediction.memory <= 1.001 * device
    assert 0.98 * estimate.step_time.seconds <= prediction.seconds <= 1.001 * estimate.step_time.seconds


def _found(**fields: Any) -> ts.PlanSearch:
    if dist.is_initialized():
        dist.destroy_process_group()
    fixed = {"precision": "bf16", "pp": 1, "tp": 1, "dp_shard": 4, "zero": 3, **fields}
    given: dict[str, Any] = {
        name: getattr(_problem(DEEP), name) for name in ("inputs", "targets", "optimizer", "loss_fn")
    }
    return ts.find_plans(DEEP, world_size=4, fixed=fixed, top=2, hardware="h100", global_batch=16, **given)


@pytest.mark.slow
def test_the_same_plans_are_found_with_and_without_extrapolation(monkeypatch):
    every = _found(micro_batches=1)
    monkeypatch.setattr(search, "_DEEP", 14)
    extrapolated = _found(micro_batches=1)
    assert [found.plan for found in extrapolated] == [found.plan for found in every]
    assert [found.seconds for found in extrapolated] == [found.seconds for found in every]
    assert extrapolated.estimated <= every.estimated


@pytest.mark.slow
def test_a_model_that_needs_all_of_its_blocks_is_estimated(monkeypatch):
    def broken(*_: Any) -> None:
        raise IndexError("block 13")

    monkeypatch.setattr(search, "_DEEP", 14)
    monkeypatch.setattr(search, "predict_from_few_blocks", broken)
    assert _found(recompute="none", micro_batches=1, offload=None).estimated == 1


@pytest.mark.slow
def test_an_error_of_the_search_itself_is_raised(monkeypatch):
    def broken(*_: Any) -> None:
        raise KeyError("a fault of this package")  # from a file of the package, as far as anyone can tell

    monkeypatch.setattr(search, "_DEEP", 14)
    monkeypatch.setattr(search, "predict_from_few_blocks", broken)
    monkeypatch.setattr(traces, "raised_by_model", lambda error: False)
    with pytest.raises(KeyError, match="a fault of this package"):
        _found(recompute="none", micro_batches=1)
