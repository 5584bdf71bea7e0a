"""Something that is tried in a process of its own, which may fail, hang or be killed without harm to this one."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

from tensorshard.torch_private.process_groups import forget_world

_Result = TypeVar("_Result")


class TriedInVain(Exception):
    """Why there is no result, in a few words."""


def in_forked_process(work: Callable[[], _Result], seconds: float | None, *, shown: bool = False) -> _Result:
    """What `work` returns, run in a fork of this process, which has all imports. The fork has no process groups.

    Args:
        seconds: after which it is killed; None for never.
        shown: whether what it prints is shown.

    Raises:
        TriedInVain: it raised something, ended otherwise or took too long.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the fork would write it again
    process = os.fork()  # also where this process is itself a daemon of multiprocessing, which may not have any
    if process == 0:
        _be_the_fork(work, sender, shown)
    sender.close()
    ended = False
    try:
        if not receiver.poll(seconds):
            raise TriedInVain(f"it took more than {seconds:g} s")
        succeeded, result = receiver.recv()
    except EOFError:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        ended = True
        raise TriedInVain(f"its process ended with code {code}") from None
    finally:
        receiver.close()
        if not ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    if not succeeded:
        raise TriedInVain(result)
    return result


def _be_the_fork(work: Callable[[], object], sender: Connection, shown: bool) -> NoReturn:
    """Runs `work` and exits without the interpreter's clean-up, which is the parent's to do."""
    groups: list[Any] = []
    code = 1
    try:
        import torch
        import torch.distributed as dist

        if not shown:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        torch.set_num_threads(1)  # a fork has no copies of the threads that this process may have started
        if dist.is_initialized():
            groups += forget_world()
        _work_and_send(work, sender)
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)  # before `groups` are freed: that would wait for their threads, which only the parent has


def _work_and_send(work: Callable[[], object], sender: Connection) -> None:
    try:
        sender.send((True, work()))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        sender.send((False, lines[0]))
