"""Timelines of a step: what follows from the order of kernels, messages and waits."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.harness.overlap import MAIN, Launched, Record, Timeline, Waits, durations, play, record_steps

from tensorshard.data_parallel.gradient_reducer import GradientReducer
from tensorshard.models import GPT, next_token_loss
from tensorshard.parallelize.build import build_engine
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import find_hardware
from tensorshard.predict.operation_ledger import Kernel, Transfer

_LAYERS, _WORLD = 6, 8
_KERNEL = Kernel("", "aten.mm", "float32", 10, 0)


def _seconds(work: Any) -> float:
    return float(work.flops if isinstance(work, Kernel) else work[0].nbytes)


def _message(seconds: int, stream: str = MAIN, group: str = "0") -> Launched:
    return Launched(stream, (Transfer("", "", "all_reduce", seconds, 2), group))


def _played(*step: Any) -> Timeline:
    """A step after one like it. Places of waits are those in the step."""
    record: Record = []
    for _ in range(2):
        first = len(record)
        record += [Waits(e.stream, e.after + first) if isinstance(e, Waits) else e for e in step]
        record.append(None)
    return play(record, _seconds)


def test_a_message_runs_beside_what_follows_until_it_is_waited_for():
    kernel = Launched(MAIN, _KERNEL)
    hidden = _played(kernel, _message(8), kernel, Waits(MAIN, 1), kernel)
    assert (hidden.seconds, hidden.waiting, hidden.hidden, hidden.at_once) == (30, 0, 1, 0)
    longer = _played(kernel, _message(25), kernel, Waits(MAIN, 1), kernel)
    assert (longer.seconds, longer.waiting, longer.hidden) == (45, 15, 0.4)
    at_once = _played(kernel, _message(8), Waits(MAIN, 1), kernel)
    assert (at_once.seconds, at_once.waiting, at_once.hidden, at_once.at_once) == (28, 8, 0, 1)
    queued = _played(kernel, _message(8), _message(8), Waits(MAIN, 2), kernel)
    assert queued.waiting == 16  # a group's messages come one after another
    apart = _played(kernel, _message(8), _message(8, group="1"), Waits(MAIN, 2), kernel)
    assert apart.waiting == 8


def test_streams_beside_the_model_wait_and_are_waited_for():
    kernel, copy = Launched(MAIN, _KERNEL), Launched("side 1", _KERNEL)
    found = _played(kernel, Waits("side 1", 0), copy, _message(8, "side 1"), Waits("side 1", 3), kernel, Waits(MAIN, 4))
    assert (found.seconds, found.waiting) == (28, 8)  # the copy runs beside the second kernel, the message after it


def _recorded(fields: dict[str, Any]) -> tuple[Record, Timeline]:
    plan = Plan(**fields).resolve(_WORLD)
    batch = torch.zeros(2 * plan.micro_batches, 64, dtype=torch.long)

    def engine() -> Any:
        model = partial(GPT, vocab_size=512, context_length=64, num_layers=_LAYERS, num_heads=4, width=512)
        adamw = partial(torch.optim.AdamW, lr=1e-3)
        return build_engine(model, plan, optimizer=adamw, loss_fn=next_token_loss, sample_inputs=batch, off_device=True)

    record, axes = record_steps(engine, lambda: (batch.clone(), batch.clone()), _WORLD)
    hardware = find_hardware("h100")
    assert hardware is not None and hardware.rates is not None
    return record, play(record, durations(plan, _WORLD, hardware.rates, axes))


def _last_steps(record: Record) -> tuple[int, int, int]:
    ends = [place for place, entry in enumerate(record) if entry is None]
    return ends[-3], ends[-2], ends[-1]


def _gathers(record: Record, first: int, last: int) -> list[int]:
    return [
        place
        for place in range(first, last)
        if isinstance(entry := record[place], Launched)
        and not isinstance(entry.work, Kernel)
        and entry.work[0].collective == "all_gather"
    ]


@pytest.mark.slow
def test_a_forward_begins_before_the_weights_of_all_blocks_are_there():
    record, _ = _recorded(dict(zero=1))
    before, begin, end = _last_steps(record)
    gathers = _gathers(record, before, begin)
    product = next(p for p in range(begin, end) if isinstance(e := record[p], Launched) and "mm" in str(e.work))
    waited = {e.after for e in record[begin:product] if isinstance(e, Waits)}
    needed = [place for place, gather in enumerate(gathers) if gather in waited]
    assert len(gathers) > _LAYERS and max(needed) <= 3, needed  # what is in no block, and the first one
    assert all(any(isinstance(e, Waits) and e.after == gather for e in record[product:end]) for gather in gathers[4:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [dict(zero=0), dict(zero=1), dict(zero=1, dp_replicate=2), dict(zero=1, micro_batches=2)], ids=str
)
def test_reductions_at_the_end_show(fields):
    _, overlapped = _recorded(fields)
    with mock.patch.object(GradientReducer, "_may_reduce", lambda self: False):
        _, at_the_end = _recorded(fields)
    assert at_the_end.count == overlapped.count
    assert at_the_end.waiting > 1.3 * overlapped.waiting


@pytest.mark.slow
def test_gathers_of_zero_3_run_beside_the_model():
    _, found = _recorded(dict(zero=3))
    assert found.hidden > 0.2 and found.at_once < found.count / 2


@pytest.mark.slow
def test_the_forward_of_tensor_parallelism_waits_at_once_and_its_backward_does_not():
    _, found = _recorded(dict(zero=1, tp=2))
    assert 2 * _LAYERS <= found.at_once <= 2 * _LAYERS + 8 < found.count
