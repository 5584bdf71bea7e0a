"""Stopping from outside, at the same step on every rank."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from rank_pool import RankPool
from tensorshard.trainer import StopRequest, Trainer
from trainer_doubles import CountingEngine, regression_batches


class SignalAt(CountingEngine):
    """Sends this process a signal while it takes one of its steps."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        super().__init__()
        self.at = step
        self.number = number

    def step(self, inputs: Any, targets: Any) -> Any:
        if self.step_count + 1 == self.at:
            os.kill(os.getpid(), self.number)
        return super().step(inputs, targets)


def _train_until_stopped(number: signal.Signals) -> tuple[int, bool]:
    engine = SignalAt(3, number)
    with StopRequest() as stop:
        trainer = Trainer(engine, regression_batches(), max_steps=9, stop=stop)  # type: ignore[arg-type]
        trainer.fit()
    return trainer.step, trainer.interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_after_the_step(number: signal.Signals) -> None:
    before = signal.getsignal(number), signal.getsignal(signal.SIGINT)
    assert _train_until_stopped(number) == (3, True)
    assert (signal.getsignal(number), signal.getsignal(signal.SIGINT)) == before


def test_without_a_signal_training_runs_to_its_end() -> None:
    with StopRequest() as stop:
        trainer = Trainer(CountingEngine(), regression_batches(), max_steps=2, stop=stop)  # type: ignore[arg-type]
        trainer.fit()
    assert (trainer.step, trainer.interrupted) == (2, False)


def _stop_seen_by_one_rank() -> tuple[int, bool]:
    # In the pool a rank's main thread serves tests, so handlers work there as they do in a real run.
    engine = SignalAt(2 if dist.get_rank() == 1 else -1, signal.SIGINT)
    with StopRequest() as stop:
        trainer = Trainer(engine, regression_batches(), max_steps=50, stop=stop)  # type: ignore[arg-type]
        trainer.fit()
    return trainer.step, trainer.interrupted


def test_a_signal_that_reaches_one_rank_stops_all_at_the_same_step(ranks: RankPool) -> None:
    assert ranks(3, _stop_seen_by_one_rank) == [(2, True)] * 3


_STUBBORN = """
import signal, time
from tensorshard.trainer.trainer import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if stop.requested:
            print("asked", flush=True)
            time.sleep(60)
"""


@pytest.mark.slow
def test_the_second_ctrl_c_ends_the_process_at_once_and_a_repeated_sigterm_does_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", _STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT
