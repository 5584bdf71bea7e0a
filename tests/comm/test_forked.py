"""Calls that run at once, in forks of the process."""

import os
import signal
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tensorshard.comm import forked
from tensorshard.comm.forked import ForkFailed, in_forked_process, run_at_once


@pytest.fixture(autouse=True)
def three_cores(monkeypatch):
    monkeypatch.setattr(forked, "cores_here", lambda: 3)


def test_results_come_in_order_from_several_processes():
    def call(number: int) -> tuple[int, int, float]:
        x = torch.ones(4, requires_grad=True)
        (number * x).sum().backward()  # autograd works in forks
        return number, os.getpid(), float(x.grad.sum())

    found = list(run_at_once([partial(call, number) for number in range(7)]))
    assert [(number, total) for number, _, total in found] == [(number, 4.0 * number) for number in range(7)]
    processes = [process for _, process, _ in found]
    assert processes[0] == processes[3] == processes[6] == os.getpid()
    assert len(set(processes)) == 3 and processes[1] == processes[4]


def test_a_call_that_fails_in_a_fork_fails_here_with_its_own_error():
    def call(number: int) -> int:
        if number == 2:
            raise LookupError("no second one")
        return number

    with pytest.raises(LookupError, match="no second one"):
        list(run_at_once([partial(call, number) for number in range(4)]))


def test_a_fork_that_dies_is_replaced():
    here = os.getpid()

    def call(number: int) -> int:
        if number == 1 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return number * 10

    assert list(run_at_once([partial(call, number) for number in range(4)])) == [0, 10, 20, 30]


def test_what_cannot_be_sent_is_made_here():
    class Local:
        pass

    found = list(run_at_once([Local, Local]))
    assert [type(one) for one in found] == [Local, Local]


def test_there_are_no_forks_within_forks_and_none_after_cuda(monkeypatch):
    def inner() -> set[int]:
        return set(run_at_once([os.getpid, os.getpid, os.getpid]))

    here, there = run_at_once([os.getpid, inner])
    assert len(there) == 1 and here not in there
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert inner() == {os.getpid()}


def test_with_one_core_calls_wait_until_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(forked, "cores_here", lambda: 1)
    made = []
    results = run_at_once([partial(made.append, number) for number in range(3)])
    next(results)
    assert made == [0]


@pytest.mark.parametrize("runs", [lambda: False, lambda: signal.raise_signal(signal.SIGKILL)], ids=["raises", "dies"])
def test_where_forks_cannot_run_autograd_this_process_does_the_work(monkeypatch, runs):
    assert in_forked_process(os.getpid, 60) != os.getpid()
    monkeypatch.setattr(forked, "_runs_autograd", runs)  # a thread of autograd that cannot use its GPU ends it
    assert in_forked_process(os.getpid, 60) == os.getpid()
    assert set(run_at_once([os.getpid] * 3)) == {os.getpid()}

    def fail() -> None:
        raise LookupError("no such plan\nand more")

    with pytest.raises(ForkFailed, match=r"^no such plan$"):
        in_forked_process(fail, 60)


def test_work_that_kills_its_fork_is_not_done_again():
    with pytest.raises(ForkFailed, match=r"^its process ended with code -9$"):
        in_forked_process(lambda: os.kill(os.getpid(), signal.SIGKILL), 60)


def _in_a_world() -> tuple[bool, bool, int]:
    with mock.patch.object(torch.cuda, "is_initialized", lambda: True), mock.patch.object(os, "fork") as fork:
        return in_forked_process(dist.is_initialized, 60), fork.called, dist.get_world_size()


def test_a_process_that_has_initialized_cuda_is_not_forked(ranks):
    assert ranks(2, _in_a_world) == [(False, False, 2)] * 2
