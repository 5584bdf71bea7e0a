"""On the path that NCCL takes, by a stand-in that keeps its rules, every plan trains as one process does."""

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parity
import strict_nccl
from rank_pool import RankError
from strict_nccl import BrokenRuleError
from tensorshard.comm.collectives import all_gather_into, all_reduce_, is_gloo, reduce_scatter_into

NCCL = dict(backend=strict_nccl.NAME, group_timeout=60)


def _results() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.group.WORLD
    found: dict[str, Any] = {"gloo": is_gloo(world, torch.device("cpu"))}
    tensor = torch.arange(4.0) * (rank + 1)
    work = all_reduce_(tensor, world, async_op=True)
    found["before"] = tensor.clone()
    work.wait()
    found["sum"] = tensor
    everyone = torch.empty(4)
    all_gather_into(everyone, torch.full((2,), float(rank)), world)
    found["gathered"] = everyone
    part = torch.empty(2)
    reduce_scatter_into(part, torch.arange(4.0), world, dist.ReduceOp.AVG)
    found["part"] = part
    received = torch.empty(3, dtype=torch.int32)
    sent = torch.full((3,), 7 + rank, dtype=torch.int32)
    ops = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["received"] = received
    exchanged = torch.empty(rank + 1 + rank + 1)
    splits = [1, 2] if rank == 0 else [1, 2]
    dist.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank, [rank + 1] * 2, splits)
    found["exchanged"] = exchanged
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    return found


def test_the_stand_in_computes_what_nccl_does(ranks):
    first, second = ranks(2, _results, **NCCL)
    assert not first["gloo"]
    assert first["before"].isnan().all()
    assert first["sum"].tolist() == [0, 3, 6, 9]
    assert first["gathered"].tolist() == [0, 0, 1, 1]
    assert second["part"].tolist() == [2, 3]
    assert (first["received"].tolist(), second["received"].tolist()) == ([8] * 3, [7] * 3)
    assert first["exchanged"].tolist() == [0, 10]
    assert second["exchanged"].tolist() == [1, 2, 11, 12]
    assert second["objects"] == [{"rank": 0}, {"rank": 1}]


def _reads_before_wait() -> torch.Tensor:
    output = torch.zeros(4)
    work = all_gather_into(output, torch.ones(2), dist.group.WORLD, async_op=True)
    used = output * 2
    work.wait()
    return used


def _changes_an_input() -> None:
    tensor = torch.ones(2)
    work = all_gather_into(torch.zeros(4), tensor, dist.group.WORLD, async_op=True)
    tensor.zero_()
    work.wait()


def _writes_an_output() -> None:
    output = torch.zeros(4)
    work = all_gather_into(output, torch.ones(2), dist.group.WORLD, async_op=True)
    output.zero_()
    work.wait()


def _sends_columns() -> None:
    all_reduce_(torch.ones(4, 4).t()[:, :2], dist.group.WORLD)


def _sends_from_elsewhere() -> None:
    dist.group.WORLD.device = "cuda"  # as a world of NCCL alone
    all_reduce_(torch.ones(4), dist.group.WORLD)


def _swaps_two_calls() -> None:
    small, large = torch.ones(2), torch.ones(8)
    for tensor in (small, large) if dist.get_rank() else (large, small):
        all_reduce_(tensor, dist.group.WORLD)


def _uses_two_threads() -> None:
    """Rank 1 is in a call, which rank 0 has not made, when another of its threads makes one."""
    if dist.get_rank() == 0:
        threading.Event().wait(1)
        return
    waits = threading.Thread(target=lambda: suppress(Exception).__enter__() or all_reduce_(torch.ones(2), dist.group.WORLD))
    waits.daemon = True
    waits.start()
    threading.Event().wait(0.5)
    all_reduce_(torch.ones(2), dist.group.WORLD)


def _sends_int16() -> None:
    all_reduce_(torch.ones(2, dtype=torch.int16), dist.group.WORLD)


def test_a_read_before_the_wait_sees_no_result(ranks):
    assert all(used.isnan().all() for used in ranks(2, _reads_before_wait, **NCCL))


FAULTS = {
    "an input that changes": (_changes_an_input, "an input of all_gather .* was changed before it was waited for"),
    "an output that is written": (_writes_an_output, "an output of all_gather .* was written before it was waited"),
    "columns": (_sends_columns, r"all_reduce was given a tensor \[4, 2\] that is not contiguous"),
    "a tensor on the cpu": (_sends_from_elsewhere, "given a tensor on cpu, and the group takes cuda's"),
    "two calls swapped": (_swaps_two_calls, r"different orders: rank 0: all_reduce .*8.*; rank 1: all_reduce .*2"),
    "two threads": (_uses_two_threads, "two threads make calls at once: all_reduce"),
    "a type that NCCL lacks": (_sends_int16, "torch.int16, which NCCL does not have"),
}


@pytest.mark.fast_cases(*FAULTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_rule_is_named(ranks, fault):
    function, words = FAULTS[fault]
    with pytest.raises(RankError, match=BrokenRuleError.__name__) as error:
        ranks(2, function, **NCCL)
    error.match(words)


