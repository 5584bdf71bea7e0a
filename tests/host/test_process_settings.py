"""What ranks on CPUs set for their process: the scheduler's policy, and what glibc does with freed memory."""

import ctypes
import os
import platform
import subprocess
import sys
import threading
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.host import process_settings
from tensorshard.host.memory import HeldMemory
from tensorshard.host.process_settings import (
    KEEP_MOST,
    KEEP_SMALL,
    HostHeap,
    schedule_as_batch,
    set_for_training,
)

MIB = 1 << 20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such settings")


# -- which processes --


_ENGINE = """
import os, sys
from functools import partial
from unittest import mock
import torch, tensorshard as ts
from torch import nn
from tensorshard.host import process_settings
{before}
with mock.patch.object(process_settings.ctypes, "CDLL") as library:
    engine = ts.parallelize(nn.Linear(4, 4), ts.Plan(), optimizer=partial(torch.optim.SGD, lr=0.1),
                            loss_fn=nn.functional.mse_loss, device="cpu")
    for _ in range(2):
        engine.step(torch.ones(2, 4), torch.ones(2, 4))
    process_settings.schedule_as_batch()
    options = library.return_value.mallopt.call_count
policies = {{os.sched_getscheduler(int(name)) for name in os.listdir("/proc/self/task")}}
print(bool(options), policies == {{os.SCHED_BATCH}}, engine.keeps_freed_memory)
"""


def _settings_of_a_process(variable: str | None, before: str = "") -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TENSORSHARD_PROCESS_SETTINGS"}
    if variable is not None:
        environment["TENSORSHARD_PROCESS_SETTINGS"] = variable
    script = _ENGINE.format(before=before)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return run.stdout.split()


_A_WORKER = "from tensorshard.trainer.launch.worker import run_worker; run_worker(print, [''], report=False)"


@pytest.mark.slow_cases("a worker")
@on_linux
@pytest.mark.parametrize(
    ("variable", "before", "expected"),
    [
        pytest.param(None, "", ["False", "False", "False"], marks=pytest.mark.slow),
        pytest.param("1", "", ["True", "True", "True"], marks=pytest.mark.slow),
        (None, _A_WORKER, ["True", "True", "True"]),
        pytest.param("0", _A_WORKER, ["False", "False", "False"], marks=pytest.mark.slow),
    ],
    ids=["the user's own process", "an option", "a worker", "a worker that may not"],
)
def test_settings_are_made_in_workers_alone(variable, before, expected):
    assert _settings_of_a_process(variable, before) == expected


# -- the scheduler --


def _policies() -> set[int]:
    return {os.sched_getscheduler(int(name)) for name in os.listdir("/proc/self/task")}


def _laid_out() -> tuple[set[int], int]:
    optimizer = torch.optim.SGD
    engine = ts.parallelize(nn.Linear(4, 4), ts.Plan(), optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    engine.step(torch.ones(2, 4), torch.ones(2, 4))
    return _policies(), engine.mesh.world_size


@on_linux
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
        of_thread = process_settings._Attributes()
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
@on_linux
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


@on_linux
def test_a_threads_own_policy_stands_and_new_threads_follow(ranks):
    assert ranks(1, _of_idle_and_new_threads) == [(os.SCHED_IDLE, os.SCHED_BATCH)]


def _calls_of_one_process() -> int:
    with mock.patch("tensorshard.parallelize.build.schedule_as_batch") as called:
        ts.parallelize(nn.Linear(4, 4), ts.Plan(), optimizer=torch.optim.SGD, loss_fn=nn.functional.mse_loss)
    return called.call_count


@on_linux
def test_one_process_alone_stays_as_it_is(ranks):
    assert ranks(1, _calls_of_one_process) == [0]


@on_linux
def test_where_the_system_forbids_it_nothing_changes(monkeypatch):
    def forbidden(*_: object) -> None:
        raise PermissionError("seccomp")

    before = _policies()
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    schedule_as_batch()
    assert _policies() == before


# -- the allocator --


# Large tensors with small ones between them: in a heap, these keep what was freed below them.
_FREED = """
import torch
from tensorshard.host import process_settings

if {mapped} is not None:
    process_settings.set_for_training({mapped})

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.ones(6 << 20)  # 24 MiB: from now on glibc would take such tensors from a heap
before, large, small = resident(), [], []
for _ in range(8):
    large.append(torch.ones(5 << 20))
    small.append(torch.ones(1 << 14))
held = resident()
large.clear()
print((held - resident()) / (held - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_tensors_leave_no_holes():
    shares = {}
    for name, mapped in {"glibc": None, "memory": KEEP_SMALL, "time": KEEP_MOST}.items():
        script = _FREED.format(mapped=mapped)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        shares[name] = float(run.stdout)
    assert shares["memory"] > 0.8
    assert shares["glibc"] < 0.5
    assert shares["time"] < 0.5  # the heap keeps them for the next step


def test_the_users_variables_stand(monkeypatch):
    for name in process_settings.environment_for_training():
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(process_settings, "_set") as set_option:
        assert set_for_training(KEEP_SMALL)
        assert set_option.call_args.args == (-3, 16 << 20)
        for name, value in process_settings.environment_for_training().items():
            monkeypatch.setenv(name, value)  # as the launcher does
        assert set_for_training(KEEP_MOST)
        assert set_option.call_args.args == (-3, 32 << 20)
        set_option.reset_mock()
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        assert not set_for_training(KEEP_MOST)
        assert not set_option.called


# -- freed memory --


class _Machine:
    """Stands for the machine: what a rank holds, what it may hold, and what glibc was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 100 * MIB
        self.room = 150 * MIB
        self.mapped: list[int] = []
        self.given_back = 0
        monkeypatch.setattr(process_settings, "held_memory", lambda: HeldMemory(80 * MIB, self.peak))
        monkeypatch.setattr(process_settings, "room_for_rank", lambda ranks: self.room)
        monkeypatch.setattr(process_settings, "map_tensors_from", self.mapped.append)
        monkeypatch.setattr(process_settings, "set_for_training", self._set)
        monkeypatch.setattr(process_settings, "give_back_free_memory", self._give_back)

    def _set(self, nbytes: int) -> bool:
        self.mapped.append(nbytes)
        return True

    def _give_back(self) -> None:
        self.given_back += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(monkeypatch)


@pytest.mark.parametrize(("fields", "kept"), [(dict(zero=0), 32 * MIB), (dict(zero=3), 16 * MIB)])
def test_freed_memory_is_kept_where_there_is_room(machine, fields, kept):
    heap = HostHeap(2, spares_memory=ts.Plan(**fields).spares_memory)
    machine.room = 10 * machine.peak
    for _ in range(20):
        heap.after_call()
    assert machine.mapped == [256 << 10, kept]
    assert not machine.given_back


def test_scarce_memory_is_given_back_and_said_once(machine, caplog):
    heap = HostHeap(2, say=True)
    with caplog.at_level("INFO", logger="tensorshard"):
        for _ in range(20):
            heap.after_call()
    assert machine.mapped == [256 << 10]
    [said] = [record.getMessage() for record in caplog.records]
    assert "held 100 MiB of the 150 MiB" in said


def test_a_rank_that_keeps_memory_gives_it_back_before_there_is_none(machine):
    heap = HostHeap(2)
    machine.room = 250 * MIB
    heap.after_call()
    assert heap.keeps
    machine.peak = 240 * MIB  # with holes in the heap
    heap.after_call()
    assert not heap.keeps
    assert machine.mapped == [256 << 10, 32 * MIB, 256 << 10]
    assert machine.given_back == 1
    for _ in range(20):
        heap.after_call()
    assert machine.mapped == [256 << 10, 32 * MIB, 256 << 10]  # the peak says that there is no room for twice as much


def test_offloaded_parameters_keep_nothing(machine):
    heap = HostHeap(1, keeps_nothing=True)
    machine.room = 100 * machine.peak
    heap.after_call()
    assert not heap.keeps


def _steps(plan: ts.Plan) -> list[bool]:
    """Whether freed memory is kept after each of some steps of a real Engine."""
    build = partial(torch.nn.Linear, 64, 64)
    loss = torch.nn.functional.mse_loss
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = ts.parallelize(build, plan, optimizer=optimizer, loss_fn=loss, device="cpu")
    kept = []
    for _ in range(2):
        engine.step(torch.ones(4, 64), torch.ones(4, 64))
        kept.append(engine._heap.keeps)
    output = engine.model(torch.ones(4, 64))  # a loop of one's own counts its steps, too
    engine.backward(loss(output, torch.ones(4, 64)))
    engine.optimizer.step()
    assert engine._heap._calls == 3
    engine.evaluate(torch.ones(4, 64), torch.ones(4, 64))
    engine.predict(torch.ones(4, 64))
    assert engine._heap._calls == 5
    return kept


def test_engines_look_at_the_memory(ranks):
    assert ranks(2, _steps, ts.Plan(zero=0)) == [[True, True]] * 2


# Activations of 1 MiB are freed in another order than gradients, so that a heap has holes.
_HOLES = """
import torch, tensorshard as ts
from functools import partial
from torch import nn
from tensorshard.host import process_settings
from tensorshard.host.memory import held_memory

process_settings._ROOM = {room}
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24)))
engine = ts.parallelize(model, ts.Plan(zero=0), optimizer=partial(torch.optim.AdamW, lr=1e-3),
                        loss_fn=nn.functional.mse_loss, device="cpu")
batch = torch.ones(512, 512)
for _ in range(4):
    engine.step(batch, batch)
print(held_memory().now >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and glibc's allocator")
def test_what_is_given_back_is_not_held_between_steps():
    """24 MiB of weights and 48 of states are held; activations and gradients are not, unless the heap keeps them."""
    held = {}
    for name, room in (("kept", 0.0), ("given back", 1e9)):
        script = _HOLES.format(room=room)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        held[name] = int(run.stdout)
    assert held["kept"] - held["given back"] > 30
