"""Measures what CPU ranks spend besides kernels: on messages, and on the Engine's own work around layers."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.collectives import all_gather_into
from tensorshard.comm.groups import world_group
from tensorshard.host.process_settings import schedule_as_batch
from tensorshard.models import GPT, next_token_loss
from tensorshard.parallelize.parallelize import parallelize
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import HostCosts, Rates
from tensorshard.predict.operation_ledger import OperationLedger
from tensorshard.predict.operations import FORWARD, Operations
from tensorshard.predict.step_time import host_time, kernel_time, sending_time

_SMALL = 1 << 12  # bytes that each rank sends
_LARGE = 8 << 20  # bytes that all ranks together have; the heap keeps tensors of this size
_AT_ONCE = 8  # messages that are under way together
_WINDOWS = 40  # timings of _CALLS messages each
_CALLS = 5
_STEPS = 30
_MANY = 8  # micro-batches
_LAYERS = 4
_TOKENS = 8
_NONE = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def with_host_costs(rates: Rates) -> Rates:
    """`rates` with those of the host, and with a time for a kernel's launch that includes Python, views and autograd.

    A collective of CPU ranks, at least two. More micro-batches of a small Engine mean more kernels: the time that each
    of these adds is that of a launch.
    """
    schedule_as_batch()  # as an Engine does
    free = replace(rates, launch=0.0)
    (found, seconds, _), (more, longer, _) = _steps(Plan(zero=0)), _steps(Plan(zero=0, micro_batches=_MANY))
    launches = (longer - _work(more, free)) - (seconds - _work(found, free))
    launch = _mean(launches) / _mean(sum(more.kernels.values()) - sum(found.kernels.values()))
    rates = replace(rates, launch=max(launch, rates.launch))
    return replace(rates, host=host_costs(rates))


def host_costs(rates: Rates) -> HostCosts:
    """What the ranks of this world compute besides kernels. A collective of CPU ranks, at least two.

    Small Engines take steps, whose kernels and messages are counted. The rest of a step's time is divided over the
    step's other work.
    """
    schedule_as_batch()
    host = _message_costs()
    found, seconds, _ = _steps(Plan(zero=0))
    host = replace(host, step=max(0.0, _mean(seconds - _work(found, rates) - _messages(found, host))))
    for name, fields in (
        ("unit", {"zero": 3}),
        ("split", {"tp": 2, "zero": 0}),
        ("action", {"pp": 2, "zero": 0, "micro_batches": 4}),
    ):
        found, seconds, plan = _steps(Plan(**fields))  # type: ignore[arg-type]
        left = seconds - _work(found, rates) - _messages(found, host) - host_time(found, plan, host)
        actions = host_time(found, plan, replace(_NONE, **{name: 1.0}))
        host = replace(host, **{name: max(0.0, _mean(left) / _mean(actions))})
    return host


def _message_costs() -> HostCosts:
    """Processor seconds for a message, and for each of its bytes, of sender and receiver together."""
    group = world_group()
    messages = group.size() - 1  # that each rank sends, and receives

    def gather(nbytes: int, count: int, *, at_once: bool) -> None:
        pending = []
        for number in range(count):
            output = torch.empty(nbytes // 4 * group.size())  # new memory, as the Engine's collectives use it
            mine = output.chunk(group.size())[group.rank()].zero_()
            work = all_gather_into(output, mine, group, async_op=at_once, what=str(number))
            pending += [work] if work is not None else []
        for work in pending:
            work.wait()

    def seconds(nbytes: int, count: int, *, at_once: bool) -> float:
        found = _processor_seconds(lambda: gather(nbytes, count, at_once=at_once), _CALLS, _WINDOWS)
        return _mean(found) / (_CALLS * count * messages)

    waited, queued = seconds(_SMALL, 1, at_once=False), seconds(_SMALL, _AT_ONCE, at_once=True)
    large = _LARGE // group.size()
    byte = max(0.0, seconds(large, 1, at_once=True) - waited) / (large - _SMALL)
    return replace(_NONE, message=waited, queued=queued, byte=byte)


def _work(found: Operations, rates: Rates) -> float:
    return sum(kernel_time(kernel, rates) * count for kernel, count in found.kernels.items())


def _messages(found: Operations, host: HostCosts) -> float:
    return sum(sending_time(transfer, host) * count for transfer, count in found.transfers.items())


def _steps(plan: Plan) -> tuple[Operations, float, Plan]:
    """What a rank does in a step of a small Engine, the processor seconds that it takes, and the plan."""
    engine = parallelize(
        _model,
        plan,
        optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
        loss_fn=next_token_loss,
        device="cpu",
        sample_inputs=_batch(plan),
    )
    tokens = _batch(engine.plan)
    seconds = _processor_seconds(lambda: engine.step(tokens, tokens), 1, _STEPS)
    with OperationLedger() as ledger:
        ledger.begin_step(lambda: FORWARD)
        engine.step(tokens, tokens)
        ledger.end_step()
    return ledger.operations(engine.mesh, engine.plan), seconds, engine.plan


def _model() -> nn.Module:
    return GPT(vocab_size=64, context_length=_TOKENS, num_layers=_LAYERS, num_heads=2, width=16)


def _batch(plan: Plan) -> torch.Tensor:
    return torch.zeros(plan.micro_batches, _TOKENS, dtype=torch.long)


def _processor_seconds(run: Callable[[], Any], calls: int, repeats: int) -> float:
    """Processor seconds of this process and its threads for `calls` calls of `run`: the median of `repeats`
    measurements.

    The fewest would be those of a call that no other rank disturbed, which is rare where ranks share cores.
    """
    found = []
    run()
    for _ in range(repeats):
        dist.barrier()
        begin = time.process_time()
        for _ in range(calls):
            run()
        found.append(time.process_time() - begin)
    return median(found)


def _mean(value: float) -> float:
    """The mean of `value` over all ranks."""
    mean = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
