"""Stopping a run from outside, at the same step on every rank."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import on_group_device
from tensorshard.comm.groups import world_group

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BATCH_SYSTEMS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Environment variables of workers whose batch system may announce the end with SIGUSR1, as Slurm's --signal does."""


class StopRequest:
    """While open, Ctrl-C (SIGINT) and SIGTERM ask for an end after the current step. A context manager.

    Under torchrun and Slurm SIGUSR1 does, too.

    Signals reach the ranks at different moments, perhaps a step apart, or reach only one rank. So after each step
    the ranks ask each other whether one was asked to stop (:meth:`agreed`), and all stop together.

    The second SIGINT ends the process at once, by the system's own handler: it works even while the
    interpreter waits inside a collective. Further SIGTERMs are the same request again, as launchers repeat
    them.

    The ranks' answers are sent from the CPU, so that asking does not wait for a GPU. That takes a backend for the CPU,
    which ``join_world`` gives the default process group; in a world without one, they are sent from the GPU.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.requested = False

    def __enter__(self) -> "StopRequest":
        # Python allows signal handlers only in the main thread. In another thread, the program's own handlers stay.
        if threading.current_thread() is threading.main_thread():
            announced = (signal.SIGUSR1,) if any(name in os.environ for name in _BATCH_SYSTEMS) else ()
            for number in (*_STOP_SIGNALS, *announced):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective: every rank calls it after the same step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.requested
        flag = torch.tensor(int(self.requested), dtype=torch.int32)
        with on_group_device(flag, world_group()) as sent:
            dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def ignore_stop_signals(worker_id: int) -> None:
    """A ``worker_init_fn`` for ``DataLoader``: its processes get Ctrl-C too, but are needed until the end."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
