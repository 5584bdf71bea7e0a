"""Models split as the automatic tables say, on ranks, against one process: outputs and every gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from bounds import assert_within
from table_models import build, inputs
from tensorshard.comm import primitives
from tensorshard.model.batches import call_model
from tensorshard.model.blocks import find_blocks
from tensorshard.passes.recompute import apply_recompute
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.layouts import Layout, join_shards, local_shard
from tensorshard.tensor_parallel.table.table import TensorTable


def build_fp64(kind: str) -> nn.Module:
    """In fp32, rounding alone would be a fifth of what is allowed."""
    return build(kind).double()


def _as_fp64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def run(model: nn.Module, given: Any) -> torch.Tensor:
    """The logits, after a backward from a loss in which every one of them has another weight."""
    output = call_model(
        model, tree_map(lambda t: t.double() if torch.is_tensor(t) and t.is_floating_point() else t, given)
    )
    logits = output if isinstance(output, torch.Tensor) else output.logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * weights).sum().backward()
    return logits.detach()


def split(model: nn.Module, plan: TensorTable, shared_inputs: list[tuple[str, ...]]) -> dict[str, Layout]:
    """Applies `plan` over the world and gives every parameter its local part."""
    layouts = apply_tensor_parallel(model, plan, dist.group.WORLD, shared_inputs=shared_inputs)
    for name, parameter in model.named_parameters():
        parameter.data = local_shard(parameter.data, layouts[name], dist.get_rank(), dist.get_world_size())
    return layouts


def gathered(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    if layout.dim is None:
        for part in parts:
            torch.testing.assert_close(part, parts[0], rtol=1e-5, atol=1e-5)
    return join_shards(parts, layout)


def split_run(
    kind: str, table: dict[str, str], shared_inputs: list[tuple[str, ...]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build_fp64(kind)
    layouts = split(model, TensorTable.from_dict(table), shared_inputs)
    logits = run(model, inputs(kind))
    gradients = {n: gathered(p.grad, layouts[n]) for n, p in model.named_parameters() if p.grad is not None}
    return logits, gradients


def whole_run(kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build_fp64(kind)
    logits = run(model, inputs(kind))
    return logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any) -> None:
    """Within 1e-5 of the largest value of each tensor, or of 1% of the largest gradient: some are zero but
    for rounding."""
    logits, gradients = found
    expected_logits, expected_gradients = expected
    assert list(gradients) == list(expected_gradients)
    largest = max(g.abs().max() for g in expected_gradients.values())
    pairs = [("logits", logits, expected_logits, 0.0)]
    pairs += [(n, gradients[n], g, 1e-2 * largest) for n, g in expected_gradients.items()]
    for name, got, want, least in pairs:
        assert got.shape == want.shape, name
        error = (got - want).abs().max() / max(want.abs().max(), least)
        assert_within(error, 1e-5, name)


KINDS = [
    "gpt",
    "gpt_tied",
    "bert",
    "vit",
    "llama",
    "qwen3",
    "phi3",
    "gpt_neox",
    "gpt2",
    "t5",
    "hf_bert",
    "hf_vit",
]


@pytest.mark.fast_cases("gpt2")
@pytest.mark.parametrize("kind", KINDS)
def test_an_automatic_table_computes_what_one_process_does(ranks, kind):
    found = find_tensor_plan(build(kind), 2)
    assert found.split_share > 0.8
    for result in ranks(2, split_run, kind, found.plan.to_dict(), found.shared_inputs):
        assert_same(result, whole_run(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "gpt2", "t5"])
def test_four_ranks(ranks, kind):
    found = find_tensor_plan(build(kind), 4)
    for result in ranks(4, split_run, kind, found.plan.to_dict(), found.shared_inputs):
        assert_same(result, whole_run(kind))


def recomputed_run(kind: str, table: dict[str, str], shared_inputs: list[tuple[str, ...]]) -> Any:
    model = build_fp64(kind)
    layouts = split(model, TensorTable.from_dict(table), shared_inputs)
    apply_recompute(find_blocks(model).values(), "full")
    results = [run(model, inputs(kind)) for _ in range(2)]
    assert torch.equal(*results)
    return results[0], {n: gathered(p.grad / 2, layouts[n]) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_recomputation_repeats_what_was_computed(ranks, kind):
    found = find_tensor_plan(build(kind), 2)
    assert found.shared_inputs
    for result in ranks(2, recomputed_run, kind, found.plan.to_dict(), found.shared_inputs):
        assert_same(result, whole_run(kind))


def count_reductions(kind: str, table: dict[str, str], shared_inputs: list[tuple[str, ...]]) -> int:
    model = build_fp64(kind)
    split(model, TensorTable.from_dict(table), shared_inputs)
    calls = []
    all_reduce = primitives.all_reduce
    primitives.all_reduce = lambda *args, **kwargs: calls.append(1) or all_reduce(*args, **kwargs)
    try:
        run(model, inputs(kind))
    finally:
        primitives.all_reduce = all_reduce
    return len(calls)


def test_columns_of_one_input_communicate_once(ranks):
    found = find_tensor_plan(build("vit"), 2)
    attention = [tuple(f"blocks.{i}.attention.{part}" for part in ("query", "key", "value")) for i in range(2)]
    assert found.shared_inputs == attention
    # Each of 2 blocks: two row layers in forward, two inputs of column layers in backward; one has three readers.
    assert ranks(2, count_reductions, "vit", found.plan.to_dict(), found.shared_inputs) == [8, 8]
    assert ranks(2, count_reductions, "vit", found.plan.to_dict(), []) == [12, 12]


def test_uneven_parts(ranks):
    table = {
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "embedding": "vocab",
        "head": "colwise_gather",
    }
    for result in ranks(3, split_run, "gpt", table, []):
        assert_same(result, whole_run("gpt"))
