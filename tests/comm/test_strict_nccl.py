"""On the path that NCCL takes, by a stand-in that keeps its rules, every plan trains as one process does."""

import threading
from contextlib import suppress
from graphlib import CycleError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import FP32

import parity
import strict_nccl
import tensorshard as ts
from rank_pool import RankError
from strict_nccl import BrokenRuleError, Logged, check_order
from tensorshard.comm.collectives import all_gather_into, all_reduce_, broadcast_, is_gloo, reduce_scatter_into
from tensorshard.comm.decisions import broadcast_first
from tensorshard.comm.primitives import exchange_among
from tensorshard.predict.hardware import communicators, find_hardware

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
    dist.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank, [rank + 1] * 2, [1, 2])
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


def _gives_memory_back() -> None:
    """And takes it again, so that a look at its size alone would see nothing."""
    output = torch.zeros(4)
    work = all_gather_into(output, torch.ones(2), dist.group.WORLD, async_op=True)
    output.untyped_storage().resize_(0)
    output.untyped_storage().resize_(16)
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

    def call() -> None:
        with suppress(RuntimeError):
            all_reduce_(torch.ones(2), dist.group.WORLD)

    threading.Thread(target=call, daemon=True).start()
    threading.Event().wait(0.5)
    all_reduce_(torch.ones(2), dist.group.WORLD)


def _sends_int16() -> None:
    all_reduce_(torch.ones(2, dtype=torch.int16), dist.group.WORLD)


def _sends_in_a_batch_what_is_received_outside() -> None:
    tensor = torch.ones(2)
    if dist.get_rank():
        dist.irecv(tensor, 0).wait()
    else:
        [work] = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
        work.wait()


def _receives_before_it_sends() -> None:
    peer = 1 - dist.get_rank()
    for work in [dist.irecv(torch.ones(2), peer), dist.isend(torch.ones(2), peer)]:
        work.wait()


def test_a_read_before_the_wait_sees_no_result(ranks):
    assert all(used.isnan().all() for used in ranks(2, _reads_before_wait, **NCCL))


FAULTS = {
    "an input that changes": (_changes_an_input, "an input of all_gather .* was changed before it was waited for"),
    "an output that is written": (_writes_an_output, "an output of all_gather .* was written before it was waited"),
    "memory that is given back": (_gives_memory_back, "memory of all_gather .* was given back before it was waited"),
    "columns": (_sends_columns, r"all_reduce by SUM was given a tensor \[4, 2\] that is not contiguous"),
    "a tensor on the cpu": (_sends_from_elsewhere, "given a tensor on cpu, and the group takes cuda's"),
    "two calls swapped": (_swaps_two_calls, r"different orders: rank 0: all_reduce .*8.*; rank 1: all_reduce .*2"),
    "two threads": (_uses_two_threads, "two threads make calls at once: all_reduce"),
    "a type that NCCL lacks": (_sends_int16, "torch.int16, which NCCL does not have"),
    "a batch at one end": (_sends_in_a_batch_what_is_received_outside, "nothing came for recv .*, outside of batches"),
    "two receives first": (_receives_before_it_sends, "nothing came for recv .*, outside of batches, from rank"),
}


@pytest.mark.fast_cases(
    "two receives first",
    "two threads",
    "a type that NCCL lacks",
    "an input that changes",
    "a tensor on the cpu",
    "an output that is written",
    "columns",
    "memory that is given back",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_rule_is_named(ranks, fault):
    function, words = FAULTS[fault]
    patience = dict(group_timeout=3) if "nothing came" in words else {}
    with pytest.raises(RankError, match=BrokenRuleError.__name__) as error:
        ranks(2, function, **(NCCL | patience))
    error.match(words)


# -- plans --

# The fields of plans on 2 or 4 ranks, beside those of the parity matrix.
SPLIT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp": ("gpt", 2, dict(tp=2)),
    "tp-sequence": ("gpt", 2, dict(tp=2, sequence_parallel=True, recompute="selective")),
    "tp-zero3": ("gpt", 4, dict(tp=2, zero=3, clip_grad_norm=1.1)),
    "tp-sequence-zero3": ("llama", 4, dict(tp=2, zero=3, sequence_parallel=True)),
    "tp-pp": ("gpt", 4, dict(tp=2, pp=2, micro_batches=2, clip_grad_norm=1.1)),
    "pp": ("gpt_tied", 2, dict(pp=2, micro_batches=4)),
    "pp-offload": ("gpt", 2, dict(pp=2, micro_batches=2, offload="cpu")),
    "pp-zero2": ("gpt", 4, dict(pp=2, zero=2, micro_batches=4)),
    "pp-zero3": ("gpt", 4, dict(pp=2, zero=3, micro_batches=2)),
    "zbv": ("gpt", 2, dict(pp=2, micro_batches=4, pp_schedule="zbv")),
    "pp4": ("gpt", 4, dict(pp=4, micro_batches=4)),
    "replicas-zero0": ("gpt", 4, dict(dp_replicate=2, dp_shard=2, zero=0)),
    "cp": ("gpt", 2, dict(cp=2)),
    "cp-zero3": ("llama", 4, dict(cp=2, zero=3)),
}
PLANS = {**SPLIT, **{name: case for name, case in FP32.items() if case[1] > 1}}


def _train(kind: str, fields: dict[str, Any], steps: int) -> tuple[dict[str, Any], list[Logged]]:
    return parity.train(kind, fields, steps), strict_nccl.log()


def _check(ranks: Any, case: str, steps: int, backend: str = strict_nccl.NAME) -> None:
    kind, world_size, fields = PLANS[case]
    found = ranks(world_size, _train, kind, fields, steps, **(NCCL | dict(backend=backend)))
    clip = fields.get("clip_grad_norm")
    cuts = (fields.get("micro_batches", 1), world_size) if kind == "resnet" else (1, 1)
    parity.assert_same(found[0][0], parity.reference(kind, clip, steps, *cuts), 1e-5)
    logs = [log for _, log in found]
    check_order(logs)
    assert communicators_used(logs) == communicators(ts.Plan(**fields).resolve(world_size), at_once=False), case


@pytest.mark.fast_cases("tp-sequence-strict_nccl")
@pytest.mark.parametrize("backend", strict_nccl.NAMES)
@pytest.mark.parametrize("case", ["gpt-2-zero2-micro4-clip", "tp-sequence"])
def test_first_steps_are_exact(ranks, case, backend):
    _check(ranks, case, 3, backend)


_ODD_TYPES = (torch.int16, torch.uint16, torch.uint32, torch.bool, torch.complex64)


def _moved(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rank, world = dist.get_rank(), dist.group.WORLD
    own = (torch.arange(6).view(2, 3) + 7 * rank).to(dtype)
    filled = own.clone()
    broadcast_(filled, world)
    everyone = own.new_empty(12)
    all_gather_into(everyone, own.view(-1), world)
    engine = parity.make_engine("gpt", dict(dp_replicate=2))
    return {
        "broadcast_": filled,
        "broadcast_first": broadcast_first(own, world),
        "all_gather_into": everyone.view(4, 3),
        "exchange_among": exchange_among(own, 2, world),
        "gather": engine.gather(own),
    }


@pytest.mark.parametrize("dtype", _ODD_TYPES)
@pytest.mark.parametrize("backend", ["gloo", strict_nccl.NAME])
def test_types_that_nccl_lacks_travel_as_bytes(ranks, backend, dtype):
    first, second = ((torch.arange(6).view(2, 3) + 7 * rank).to(dtype) for rank in range(2))
    both = torch.cat([first, second])
    expected = {"broadcast_": first, "broadcast_first": first, "all_gather_into": both, "gather": both}
    for rank, found in enumerate(ranks(2, _moved, dtype, backend=backend)):
        expected["exchange_among"] = torch.stack([first[rank], second[rank]])
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == dtype, name


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANS)
def test_training_is_exact(ranks, case):
    _check(ranks, case, parity.STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (2, dict(ep=2, zero=1)),
        (4, dict(ep=2, zero=2, micro_batches=2, clip_grad_norm=0.5)),
        (4, dict(ep=2, zero=3)),
        (4, dict(ep=2, tp=2, zero=1)),
        (4, dict(ep=2, cp=2, zero=1)),
        (4, dict(ep=2, pp=2, zero=1, micro_batches=2)),
        (4, dict(ep=2, dp_shard=2, dp_replicate=2, zero=1)),
        (8, dict(ep=2, dp_shard=4, dp_replicate=2, zero=3)),
        (8, dict(ep=2, dp_shard=4, dp_replicate=2, zero=0)),
        (8, dict(ep=2, cp=2, dp_shard=2, dp_replicate=2, zero=0)),
        (8, dict(ep=2, tp=2, dp_shard=2, dp_replicate=2, zero=0)),
    ],
)
def test_experts_over_data_ranks(ranks, world_size, fields):
    found = ranks(world_size, _train, "mixtral", fields, 3, **NCCL)
    parity.assert_same(found[0][0], parity.reference("mixtral", fields.get("clip_grad_norm"), 3), 1e-5)
    logs = [log for _, log in found]
    check_order(logs)
    assert communicators_used(logs) == communicators(ts.Plan(**fields).resolve(world_size), at_once=False)


def _groups_made(kind: str, fields: dict[str, Any]) -> int:
    parity.train(kind, fields, 1)
    return strict_nccl.made()


@pytest.mark.fast_cases("zero0")
@pytest.mark.parametrize(
    ("kind", "world_size", "fields"),
    [
        pytest.param("gpt", 4, dict(dp_replicate=2, dp_shard=2, zero=0), id="zero0"),
        pytest.param("gpt", 4, dict(tp=2, zero=3), id="tp"),
        pytest.param("gpt", 4, dict(pp=2, zero=2, micro_batches=4), id="pp"),
        pytest.param("llama", 4, dict(cp=2, zero=3), id="cp"),
        pytest.param("mixtral", 4, dict(ep=2, tp=2, zero=1), id="ep-tp"),
        pytest.param("mixtral", 8, dict(ep=2, dp_shard=4, dp_replicate=2, zero=0), id="ep-hybrid"),
        pytest.param("mixtral", 8, dict(ep=2, cp=2, dp_shard=2, dp_replicate=2, zero=0), id="ep-cp-hybrid"),
        pytest.param("mixtral", 4, dict(ep=2, zero=3), id="ep-zero3"),
    ],
)
def test_groups_that_open_at_once_are_counted(ranks, kind, world_size, fields):
    """As torch 2.15 opens them, but for the neighbours of a pipeline."""
    plan = ts.Plan(**fields).resolve(world_size)
    found = ranks(world_size, _groups_made, kind, fields, **NCCL)
    assert max(found) == communicators(plan, at_once=True) - min(plan.pp - 1, 2)


def test_a_pipeline_has_a_communicator_of_its_own_where_groups_open_at_once():
    plan = ts.Plan(pp=4, micro_batches=4).resolve(4)
    assert communicators(plan, at_once=True) == communicators(plan, at_once=False) + 1


def test_groups_of_experts_are_counted():
    for at_once in (False, True):
        assert communicators(ts.Plan(ep=4).resolve(4), at_once) == communicators(ts.Plan().resolve(4), at_once) == 1
        assert communicators(ts.Plan(ep=2).resolve(4), at_once) == 3
    gpu = find_hardware("h100")
    more = gpu.context_under(ts.Plan(ep=2).resolve(4)) - gpu.context_under(ts.Plan().resolve(4))
    assert more == 2 * 2**28


def _other_calls(fields: dict[str, Any], folder: str) -> tuple[bool, list[Logged]]:
    engine = parity.make_engine("gpt", fields)
    inputs, targets = parity.shard(engine, *parity.batch("gpt", 0))
    engine.step(inputs, targets)
    before = engine.evaluate(inputs, targets)
    engine.save(f"{folder}/saved")
    engine.save(f"{folder}/later", background=True)
    engine.step(inputs, targets)
    engine.wait_for_save()
    engine.load(f"{folder}/saved")
    engine.predict(inputs)
    engine.generate(inputs[:, :4], max_new_tokens=2)
    engine.save_pretrained(f"{folder}/weights")
    return bool(engine.evaluate(inputs, targets) == before), strict_nccl.log()


@pytest.mark.fast_cases("pp")
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        pytest.param(2, dict(zero=3), id="zero3"),
        pytest.param(4, dict(tp=2, zero=1), id="tp-zero1"),
        pytest.param(2, dict(pp=2, micro_batches=2), id="pp"),
        pytest.param(2, dict(zero=1, offload="cpu"), id="offload"),
    ],
)
def test_saves_loads_and_generation_keep_the_rules(ranks, tmp_path, size, fields):
    found = ranks(size, _other_calls, fields, str(tmp_path), **NCCL)
    assert all(same for same, _ in found)
    check_order([log for _, log in found])


def _before_a_step(schedule: str) -> tuple[list[Logged], list[Logged]]:
    """What a rank calls before it has trained: also, what it calls in all."""
    engine = parity.make_engine("gpt", dict(pp=4, micro_batches=4, pp_schedule=schedule))
    engine.full_state_dict()
    made = strict_nccl.log()
    engine.step(*parity.shard(engine, *parity.batch("gpt", 0)))
    return made, strict_nccl.log()


def test_the_connections_of_a_pipeline_are_there_before_its_first_step(ranks):
    for made, log in ranks(4, _before_a_step, "gpipe", **NCCL):
        first = next(call for call in made if call.name in ("all_reduce by SUM", "send", "recv"))
        assert first.name == "all_reduce by SUM"  # of all ranks, and not of a sender and a receiver
        assert _connections(log) == _connections(made)


def test_contradicting_orders_are_found():
    one, other = (Logged((0, 1), "all_reduce", (), None, False), Logged((0, 1, 2), "all_reduce", (), None, False))
    check_order([[one, other], [one, other]])
    with pytest.raises(CycleError):
        check_order([[one, other], [other, one]])


def communicators_used(logs: list[list[Logged]]) -> int:
    """The most communicators that NCCL makes for one rank: one for each group with more ranks, and one for each pair
    that sends outside of a batch."""
    return max(len(_connections(log)) for log in logs)


def _connections(log: list[Logged]) -> set[tuple[int, int | None]]:
    return {
        (c.group, c.shapes[-1] if c.name in ("send", "recv") and c.batch is None else None)
        for c in log
        if len(c.ranks) > 1 and not c.of_objects
    }
