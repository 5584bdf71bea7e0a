"""How Linux schedules ranks on CPUs."""

import ctypes
import os
import platform
import sys
import threading
from unittest import mock

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.host import scheduler as host_scheduler
from tensorshard.host.scheduler import schedule_as_batch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")


def _policies() -> set[int]:
    return {os.sched_getscheduler(int(name)) for name in os.listdir("/proc/self/task")}


def _laid_out() -> tuple[set[int], int]:
    optimizer = torch.optim.SGD
    engine = ts.parallelize(nn.Linear(4, 4), ts.Plan(), optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    engine.step(torch.ones(2, 4), torch.ones(2, 4))
    return _policies(), engine.mesh.world_size


def test_ranks_on_cpus_are_batch_jobs_with_all_their_threads(ranks):
    assert ranks(2, _laid_out) == [({os.SCHED_BATCH}, 2)] * 2


def _slices() -> set[tuple[int, int]]:
    """Nanoseconds of the slices, and the niceness, of the threads of this process. One of them is nicer."""
    ready, done = threading.Event(), threading.Event()

    def nicer() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        ready.set()
        done.wait()

    thread = threading.Thread(target=nicer)
    thread.start()
    ready.wait()
    schedule_as_batch()
    found = set()
    for name in os.listdir("/proc/self/task"):
        of_thread = host_scheduler._Attributes()
        size = ctypes.sizeof(of_thread)
        assert ctypes.CDLL(None).syscall(315, int(name), ctypes.byref(of_thread), size, 0) == 0  # sched_getattr
        found.add((of_thread.runtime, of_thread.nice))
    done.set()
    thread.join()
    return found


@pytest.mark.skipif(
    platform.machine() != "x86_64" or tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="Linux has slices of its own before 6.12, and other numbers for this call elsewhere",
)
def test_ranks_compute_for_long_without_an_interruption(ranks):
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert ranks(1, _slices) == [{(30_000_000, nice), (30_000_000, 5)}]


def _of_idle_and_new_threads() -> tuple[int, int]:
    found, done = {}, threading.Event()

    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        ready.set()
        done.wait()
        found["idle"] = os.sched_getscheduler(0)

    ready = threading.Event()
    thread = threading.Thread(target=idle)
    thread.start()
    ready.wait()
    schedule_as_batch()
    done.set()
    thread.join()
    later = threading.Thread(target=lambda: found.update(later=os.sched_getscheduler(0)))
    later.start()
    later.join()
    return found["idle"], found["later"]


def test_a_threads_own_policy_stands_and_new_threads_follow(ranks):
    assert ranks(1, _of_idle_and_new_threads) == [(os.SCHED_IDLE, os.SCHED_BATCH)]


def _calls_of_one_process() -> int:
    with mock.patch("tensorshard.parallelize.build.schedule_as_batch") as called:
        ts.parallelize(nn.Linear(4, 4), ts.Plan(), optimizer=torch.optim.SGD, loss_fn=nn.functional.mse_loss)
    return called.call_count


def test_one_process_alone_stays_as_it_is(ranks):
    assert ranks(1, _calls_of_one_process) == [0]


def test_where_the_system_forbids_it_nothing_changes(monkeypatch):
    def forbidden(*_: object) -> None:
        raise PermissionError("seccomp")

    before = _policies()
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    schedule_as_batch()
    assert _policies() == before
