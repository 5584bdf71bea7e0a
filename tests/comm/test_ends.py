"""How a process of a world ends: after Gloo's threads, and not much later."""

import subprocess
import sys
import threading
import time

import pytest
import torch

from tensorshard.comm.world import wait_for_threads

_ENDS = """
import sys, time
import torch, torch.distributed as dist
from tensorshard.comm import world
world.wait = lambda: (print("waited", flush=True), time.sleep(1))
world.wait_for_threads.__code__ = (lambda patience=1.0: wait()).__code__
for _ in range(2):
    world.join_world(torch.device("cpu"))
dist.all_reduce(torch.ones(1 << 16), async_op=True)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_waits_once_and_keeps_its_exit_code() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (3, "waited\n"), ended.stderr


def test_a_thread_that_computes_is_waited_for() -> None:
    matrix, finished = torch.randn(400, 400), []

    def compute() -> None:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            matrix @ matrix
        finished.append(True)

    thread = threading.Thread(target=compute)
    thread.start()
    wait_for_threads(patience=20.0)
    assert finished
    thread.join()


def test_threads_that_sleep_or_never_end_do_not_hold_it_up() -> None:
    stop = threading.Event()
    asleep = threading.Thread(target=stop.wait)
    asleep.start()
    started = time.monotonic()
    wait_for_threads(patience=20.0)
    assert time.monotonic() - started < 10.0
    busy = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    busy.start()
    started = time.monotonic()
    wait_for_threads(patience=0.2)
    assert time.monotonic() - started < 10.0
    stop.set()
    asleep.join()
    busy.join()
