"""How Linux schedules ranks on CPUs."""

import os
import sys
import threading
from unittest import mock

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.host_scheduler import schedule_as_batch

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
    with mock.patch("tensorshard.lay_out_engine.schedule_as_batch") as called:
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
