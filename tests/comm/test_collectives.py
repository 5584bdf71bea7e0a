"""Our collectives against torch's own."""

import pytest
import torch
import torch.distributed as dist

from tensorshard.comm import collectives
from tensorshard.comm.collectives import all_gather_into, all_reduce_, reduce_scatter_into
from tensorshard.comm.primitives import gather_flat


def _gathered_in_debug_mode() -> list[float]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(list(range(dist.get_world_size())))
        return gather_flat(torch.full((2, 3), float(dist.get_rank())), group).flatten(1).amax(1).tolist()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_torch_compares_the_ranks_calls_of_tensors_of_any_shape(ranks):
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL, whose Gloo wants equal shapes."""
    assert ranks(2, _gathered_in_debug_mode) == [[0.0, 1.0]] * 2


def _compare(numel: int, dtype: torch.dtype, async_op: bool) -> None:
    group = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    whole = torch.randn(numel * size).to(dtype)
    part = torch.randn(numel).to(dtype)

    ours, theirs = torch.empty_like(whole), torch.empty_like(whole)
    _finish(all_gather_into(ours, part, group, async_op))
    dist.all_gather_into_tensor(theirs, part)
    assert torch.equal(ours, theirs)

    in_place = torch.zeros_like(whole)
    mine = in_place[rank * numel : (rank + 1) * numel].copy_(part)
    _finish(all_gather_into(in_place, mine, group, async_op))
    assert torch.equal(in_place, theirs)

    expected = whole.double()
    dist.all_reduce(expected)
    expected_part = expected[rank * numel : (rank + 1) * numel]
    tolerance = dict(rtol=1e-6, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=5e-2)
    for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1.0 / size)):
        out = torch.empty(numel, dtype=dtype)
        _finish(reduce_scatter_into(out, whole, group, op, async_op))
        torch.testing.assert_close(out.double(), expected_part * factor, **tolerance)
    total = whole.clone()
    _finish(all_reduce_(total, group, async_op=async_op))
    torch.testing.assert_close(total.double(), expected, **tolerance)
    _finish(all_reduce_(whole, group, dist.ReduceOp.AVG, async_op=async_op))
    torch.testing.assert_close(whole.double(), expected / size, **tolerance)


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("async_op", [False, True])
def test_agree_with_torch(ranks, world_size, dtype, async_op):
    ranks(world_size, _compare, 50_000, dtype, async_op)
    ranks(world_size, _compare, 3, dtype, async_op)


def _maximum() -> float:
    value = torch.tensor(float(dist.get_rank()))
    all_reduce_(value, dist.group.WORLD, dist.ReduceOp.MAX)
    return value.item()


def test_maximum(ranks):
    assert ranks(4, _maximum) == [3.0] * 4


def _of_every_length() -> None:
    """All-reduces around the lengths at which the number of hops changes, in the order of the ranks' sums."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    for limit in (collectives._SMALL_BYTES, collectives._SMALL_BYTES_OF_PAIR):
        for numel in (limit // 4 - 1, limit // 4, limit // 4 + 1):
            terms = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(size)]
            tensor, expected = terms[rank].clone(), terms[0].clone()
            for term in terms[1:]:
                expected += term
            all_reduce_(tensor, group)
            assert torch.equal(tensor, expected), f"{numel} elements on {size} ranks"


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_of_every_length_are_in_the_order_of_the_ranks(ranks, world_size):
    ranks(world_size, _of_every_length)


def test_other_operations_are_refused(ranks):
    with pytest.raises(AssertionError, match="it sums"):
        ranks(2, _product)


def _product() -> None:
    reduce_scatter_into(torch.ones(1), torch.ones(2), dist.group.WORLD, dist.ReduceOp.PRODUCT)
