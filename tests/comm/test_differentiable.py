"""The differentiable collectives, against what they mean, in forward and backward (fp64)."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck, gradgradcheck
from torch.distributed.tensor import Shard

import tensorshard as ts
import tensorshard.distributed as tsd
from rank_pool import RankError
from tensorshard.comm.sharding import distribute

WORLDS = [
    pytest.param(2, 2, id="2 ranks"),
    pytest.param(4, 4, id="4 ranks"),
    pytest.param(3, 3, id="3 ranks"),
    pytest.param(4, 2, id="2 groups of 2"),
]


def _start(group_size: int) -> tuple[int, int]:
    """Makes groups; different groups draw different numbers, the ranks of one draw the same."""
    tsd.init_process_group(group_size)
    torch.manual_seed(tsd.get_data_parallel_rank())
    return tsd.get_rank(), tsd.get_group_size()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _check_values(group_size: int) -> None:
    rank, size = _start(group_size)
    for rows in (4, 5, 3):  # even over 2 and 4; uneven; less than one per rank of 4
        whole = _random(rows, 6, 5).detach()
        for dim in (0, 2, -1):
            chunks = list(whole.chunk(size, dim))
            empty = whole.narrow(dim, 0, 0)
            mine = [*chunks, *[empty] * size][rank]
            part = tsd.scatter(whole, dim)
            torch.testing.assert_close(part, mine)
            torch.testing.assert_close(tsd.gather(part, dim), whole)
            torch.testing.assert_close(tsd.gather(part, dim, size=whole.size(dim)), whole)
            weighted = (rank + 1) * whole
            total = sum(range(1, size + 1)) * whole
            torch.testing.assert_close(tsd.reduce(weighted), total)
            torch.testing.assert_close(tsd.reduce_scatter(weighted, dim), tsd.scatter(total, dim))
            torch.testing.assert_close(tsd.all_to_all(part, 1, dim), tsd.scatter(whole, 1))
        torch.testing.assert_close(tsd.copy(whole), whole)
    assert tsd.get_group() in (dist.group.WORLD, tsd.get_mesh()["tp"].get_group())


@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_values(ranks, world_size, group_size):
    ranks(world_size, _check_values, group_size)


def _check_gradients(group_size: int) -> None:
    """Each composition is, on every rank, one function of a replicated `x`, as gradcheck needs."""
    rank, _ = _start(group_size)
    weight = float(rank + 1)
    compositions = {
        "scatter, gather": lambda x, dim: tsd.gather(tsd.scatter(x, dim) ** 2, dim),
        "copy, reduce": lambda x, dim: tsd.reduce(weight * tsd.copy(x) ** 2),
        "reduce_scatter": lambda x, dim: tsd.gather(tsd.reduce_scatter(weight * tsd.copy(x), dim) ** 2, dim),
        "all_to_all": lambda x, dim: tsd.gather(tsd.all_to_all(tsd.scatter(x, dim) ** 2, 1, dim), 1),
        "gather_for_sum": lambda x, dim: tsd.reduce(weight * tsd.gather_for_sum(tsd.scatter(x, dim), dim) ** 2),
    }
    for name, function in compositions.items():
        for dim in (0, -1):
            x = _random(3, 3, 1)
            assert gradcheck(lambda x, f=function, d=dim: f(x, d), x), name
    assert gradgradcheck(lambda x: compositions["reduce_scatter"](x, 0), _random(3, 2))


@pytest.mark.fast_cases("2 ranks")
@pytest.mark.parametrize(("world_size", "group_size"), WORLDS)
def test_gradients(ranks, world_size, group_size):
    ranks(world_size, _check_gradients, group_size)


_TYPES = (torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int16, torch.uint8, torch.bool)


def _check_types() -> None:
    _start(2)
    for dtype in _TYPES:
        whole = torch.arange(15).view(5, 3).to(dtype)
        for dim in (0, 1):
            assert torch.equal(tsd.gather(tsd.scatter(whole, dim), dim), whole)
            assert torch.equal(tsd.all_to_all(tsd.scatter(whole, 1 - dim), dim, 1 - dim), tsd.scatter(whole, dim))
            if dtype != torch.bool:
                assert torch.equal(tsd.reduce(whole), whole * 2)
                assert torch.equal(tsd.reduce_scatter(whole, dim), tsd.scatter(whole * 2, dim))
    empty = torch.ones(0, 3)
    assert tsd.gather(tsd.scatter(empty, 1), 1).shape == tsd.reduce(empty).shape == (0, 3)
    transposed = torch.randn(5, 300).t()
    assert torch.equal(tsd.gather(tsd.scatter(transposed, 1), 1), transposed)


def test_types_and_layouts(ranks):
    ranks(2, _check_types)


def _gather_what_ranks_happen_to_hold() -> None:
    rank, _ = _start(2)
    torch.manual_seed(0)
    whole = torch.arange(12.0).view(6, 2)
    part = whole[:5].clone() if rank == 0 else whole[5:].clone()
    part.requires_grad_()
    gathered = tsd.gather(part, 0)
    torch.testing.assert_close(gathered, whole)
    (gathered * whole).sum().backward()
    torch.testing.assert_close(part.grad, part.detach())
    targets = torch.tensor([7, 8]) if rank == 0 else torch.tensor([9])
    assert tsd.gather(targets, 0).tolist() == [7, 8, 9]
    tsd.gather(part, 0, grad_scale=4.0).sum().backward()
    torch.testing.assert_close(part.grad, part.detach() + 4)


def test_gather_of_whatever_is_held(ranks):
    ranks(2, _gather_what_ranks_happen_to_hold)


def _pass_groups_explicitly() -> None:
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    group = pairs[0] if dist.get_rank() in (0, 3) else pairs[1]
    value = torch.tensor([float(dist.get_rank())])
    assert tsd.reduce(value, group).item() == 3.0
    assert tsd.gather(value, 0, group).sum().item() == 3.0
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert tsd.reduce(value, mesh["dp"]).item() in (2.0, 4.0)
    assert not tsd.is_initialized()


def test_explicit_groups_and_meshes(ranks):
    ranks(4, _pass_groups_explicitly)


def _marks() -> list[object]:
    _start(2)
    whole = torch.ones(4, 6)
    part = tsd.scatter(whole, -1)
    return [
        part._tensorshard_mark.dim,
        part._tensorshard_mark.size,
        hasattr(whole, "_tensorshard_mark"),
        hasattr(tsd.gather(part), "_tensorshard_mark"),
        tsd.all_to_all(part, 0, 1)._tensorshard_mark.dim,
        tsd.reduce_scatter(whole, 0)._tensorshard_mark.dim,
    ]


def test_results_are_marked(ranks):
    assert ranks(2, _marks)[0] == [-1, 6, False, False, 0, 0]


def _alone() -> None:
    _start(1)
    x = _random(4, 3)
    for y in (
        tsd.copy(x),
        tsd.reduce(x),
        tsd.scatter(x),
        tsd.gather(x),
        tsd.reduce_scatter(x),
        tsd.all_to_all(x, 0, 1),
    ):
        torch.testing.assert_close(y, x)
    assert not hasattr(x, "_tensorshard_mark")


def test_groups_of_one_change_nothing(ranks):
    ranks(2, _alone)


def _gather_wrong_size() -> None:
    _start(2)
    dist.barrier()
    tsd.gather(torch.ones(2, 3), 1, size=8)


def _call(name: str, *args: object) -> None:
    _start(2)
    dist.barrier()
    getattr(tsd, name)(torch.ones(2, 3), *args)


def _call_with_a_dtensor(name: str, *args: object) -> None:
    _start(2)
    getattr(tsd, name)(distribute(torch.ones(4, 2), tsd.get_mesh()["tp"], [Shard(0)]), *args)


def _gather_a_number() -> None:
    _start(2)
    tsd.gather(torch.tensor(1.0))


def _differ(how: str) -> None:
    rank, _ = _start(2)
    x = torch.ones(3, 3)
    if how == "dimensions" or rank == 0:
        tsd.gather(x, rank)
    else:
        tsd.all_to_all(x, 0, 1)


def test_calls_that_differ_are_named(ranks):
    """Where the ranks tell each other what they hold, without any switch."""
    message = r"different calls: rank 0: gather along dimension 0 of \[3, 3\] float32; rank 1: {} along dimension 1"
    with pytest.raises(RankError, match=message.format("gather")):
        ranks(2, _differ, "dimensions")
    with pytest.raises(RankError, match=message.format("all_to_all")):
        ranks(2, _differ, "collectives")


def test_bad_input(ranks):
    with pytest.raises(RankError, match=r"size=8 along dimension 1 was given, of which rank 0 of 2 holds 4 elements"):
        ranks(2, _gather_wrong_size)
    with pytest.raises(RankError, match="dim=2 was given for a tensor of 2 dimensions: use one of -2 to 1"):
        ranks(2, _call, "scatter", 2)
    with pytest.raises(RankError, match="split and to concatenate along the same dimension, 1"):
        ranks(2, _call, "all_to_all", 1, -1)
    with pytest.raises(RankError, match="dim=-1 was given for a tensor without dimensions"):
        ranks(2, _gather_a_number)
    for name, args in {"reduce_scatter": (0,), "gather_for_sum": (0,), "all_to_all": (0, 1)}.items():
        with pytest.raises(RankError, match=rf"{name} was given a DTensor \[4, 2\]"):
            ranks(2, _call_with_a_dtensor, name, *args)


def _gather_what_does_not_fit(what: str) -> None:
    ts.init_process_group(2)
    rank = dist.get_rank()
    weight = distribute(torch.ones(6, 4), tsd.get_mesh()["tp"], [Shard(1)])
    tensors = {
        "shapes": torch.ones(3, 4 + rank),
        "dimensions": torch.ones(3) if rank else torch.ones(3, 1),
        "types": torch.ones(3, dtype=torch.float64 if rank else torch.int64),
        "another dimension": weight,
    }
    if what == "reduce":
        ts.distributed.reduce(weight)
    ts.distributed.gather(tensors[what], dim=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shapes", "equal but for their size along it; there are rank 0: [3, 4] float32; rank 1: [3, 5] float32"),
        ("dimensions", "there are rank 0: [3, 1] float32; rank 1: [3] float32"),
        ("types", "there are rank 0: [3] int64; rank 1: [3] float64"),
        ("another dimension", "gather along dimension 0 was given a DTensor [6, 4] with placements (Shard(dim=1),)"),
        ("reduce", "reduce was given a DTensor [6, 4]"),
    ],
)
def test_what_cannot_travel(ranks, what, message):
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(2, _gather_what_does_not_fit, what)
