"""Ranks that fail, end or make another call: the others hear of it, and of what it was, long before the timeout."""

import logging
import re
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorshard.comm.call_watch import CallWatch, _DeviceWatch, noted_cause
from tensorshard.comm.collectives import all_reduce_
from tensorshard.torch_private.process_groups import place_of_wait

CPU = torch.device("cpu")
PAUSE = 0.05


def _watch() -> CallWatch:
    return CallWatch([dist.group.WORLD], CPU, pause=PAUSE)


def _call(watch: CallWatch, name: str) -> None:
    with watch.calling(name):
        all_reduce_(torch.ones(1), dist.group.WORLD, what=name)


def _different_calls() -> tuple[str, str | None, float]:
    watch, started = _watch(), time.monotonic()
    for _ in range(3):
        _call(watch, "step")
    name = ("save", "step")[dist.get_rank()]
    with pytest.raises(RuntimeError) as raised:
        _call(watch, name)
    return str(raised.value), watch.explain(name), time.monotonic() - started


def test_different_calls(ranks):
    for message, cause, seconds in ranks(2, _different_calls):
        assert "could not finish the all_reduce" in message
        # In the words of the rank that saw it first.
        assert cause is not None and re.match(r"rank 0 called save while rank 1 called step|rank 1 called step", cause)
        assert seconds < 30  # the world's timeout is longer


def _outside_of_calls() -> list[str]:
    watch, rank = _watch(), dist.get_rank()
    _call(watch, "step")
    with pytest.raises(RuntimeError) as raised:  # say, one backward more than the other rank
        all_reduce_(torch.ones(1 + rank), dist.group.WORLD, what=("gradients", "a unit")[rank])
    assert not watch.is_in_call
    return [str(raised.value), noted_cause(raised.value) or ""]


def test_different_collectives_outside_of_all_calls(ranks):
    for rank, (message, cause) in enumerate(ranks(2, _outside_of_calls)):
        assert f"rank {rank} could not finish the all_reduce of {('gradients', 'a unit')[rank]}" in message
        assert cause.startswith("a forward, backward or read of your own could not end: the ranks [0, 1]")
        assert "in all_reduce of a unit (8 bytes)" in cause
        assert "in all_reduce of gradients (4 bytes)" in cause


_KEPT: list[CallWatch] = []


def _kept() -> None:
    _KEPT.append(_watch())
    assert _KEPT[-1].is_of_this_world


def _after_the_world_of_a_watch() -> list[str]:
    assert not _KEPT[-1].is_of_this_world
    try:
        return _outside_of_calls()
    finally:
        _KEPT.clear()


def test_a_watch_of_an_earlier_world_is_not_asked(ranks):
    """The file of its store is gone; torch waits five minutes for it."""
    ranks(2, _kept)
    for _, cause in ranks(2, _after_the_world_of_a_watch, timeout=60.0):
        assert "in all_reduce of a unit (8 bytes)" in cause


def test_as_many_backwards_are_asked_for(ranks):
    for cause in ranks(2, _one_backward_more):
        assert cause is not None and cause.endswith("with fewer micro-batches, one more on a loss times 0")


def _one_backward_more() -> str | None:
    watch, rank = _watch(), dist.get_rank()
    name = ("engine.backward", "engine.optimizer.step")[rank]
    with pytest.raises(RuntimeError):
        _call(watch, name)
    return watch.explain(name)


def _one_fails() -> Any:
    watch = _watch()
    if dist.get_rank() == 1:
        with pytest.raises(ZeroDivisionError), watch.calling("step"):
            raise ZeroDivisionError("made by the test")
        _wait_for(lambda: watch.look() or _is_broken())
        return None
    with pytest.raises(RuntimeError):
        _call(watch, "step")
    return watch.explain("step")


def _one_fails_and_goes_on() -> str:
    watch = _watch()
    _call(watch, "step")
    if dist.get_rank() == 1:
        with pytest.raises(ZeroDivisionError), watch.calling("step"):
            raise ZeroDivisionError("made by the test")
    with pytest.raises(RuntimeError) as raised:  # it would meet what the other one sends in its own step
        _call(watch, "step")
    return str(raised.value) if dist.get_rank() == 1 else str(watch.explain("step"))


def test_a_rank_that_fails_and_goes_on_alone(ranks):
    for said in ranks(2, _one_fails_and_goes_on):
        assert "rank 1 failed in step: ZeroDivisionError: made by the test" in said


def _is_broken() -> bool:
    try:
        dist.barrier()
    except RuntimeError:
        return True
    return False


def _wait_for(happens: Any) -> None:
    while not happens():
        time.sleep(PAUSE)


def test_a_rank_that_fails_and_lives_on(ranks):
    assert ranks(2, _one_fails)[0] == "rank 1 failed in step: ZeroDivisionError: made by the test"


def _all_fail() -> float:
    watch = _watch()
    time.sleep(10 * PAUSE * dist.get_rank())  # rank 1 computes, and does not wait
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), watch.calling("step"):
            raise ZeroDivisionError
        time.sleep(10 * PAUSE * dist.get_rank())  # and takes its time until it tries again
    _call(watch, "step")
    return 1.0 if watch.verdict is None else 0.0


def test_a_failure_of_all_ranks_breaks_nothing(ranks):
    assert ranks(2, _all_fail) == [1.0, 1.0]


def _one_is_late() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensorshard").addHandler(handler)
    try:
        watch = _watch()
        _call(watch, "step")
        time.sleep(40 * PAUSE * dist.get_rank())
        _call(watch, "save")
    finally:
        logging.getLogger("tensorshard").removeHandler(handler)
    return said


def test_a_rank_that_is_late_is_waited_for_and_named_once(ranks):
    assert ranks(2, _one_is_late) == [
        ["rank 0 waits in save for rank 1, which has not called it; every rank calls it"],
        [],
    ]


# -- where a thread waits --


_READS = [
    "value.item()", "float(value)", "bool(value)", "1 if value else 0", "value.backward()", "value.synchronize()",
    "[value.tolist()][0]",
]  # fmt: skip


@pytest.mark.parametrize("read", _READS)
@pytest.mark.parametrize("busy", [True, False])
def test_on_nccl_a_rank_waits_where_it_reads_from_a_gpu_that_does_not_end(busy, read):
    held = threading.Lock()
    held.acquire()
    stops = dict.fromkeys(["item", "tolist", "backward", "synchronize"], lambda _: held.acquire())  # in C, as a read
    dunder = {"__float__": lambda _: float(held.acquire()), "__bool__": lambda _: held.acquire()}
    value = type("Value", (), stops | dunder)()
    thread = threading.Thread(target=lambda: eval(read, {"value": value}), daemon=True)
    thread.start()
    time.sleep(0.1)
    place = place_of_wait(thread.ident, busy)
    assert (place is not None) == busy
    assert place == place_of_wait(thread.ident, busy)
    held.release()
    thread.join()


def test_a_gpu_is_busy_that_has_not_ended_what_it_had_at_the_look_before(monkeypatch):
    ended = iter([True, False, False, True])
    made = []

    class Event:
        def record(self, stream: str) -> None:
            made.append(stream)

        def query(self) -> bool:
            return next(ended)

    for name, value in dict(
        is_initialized=lambda: True, Event=Event, device=lambda _: nullcontext(), default_stream=str
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    watch, found = _DeviceWatch(torch.device("cuda", 0)), []
    for _ in range(5):
        watch.look()
        found.append(watch.waits)
    assert found == [False, False, True, True, False]
    assert made == ["cuda:0"] * 3  # none while it is busy, or what is new would hide what is old
    idle = _DeviceWatch(CPU)
    idle.look()
    assert not idle.waits and len(made) == 3
