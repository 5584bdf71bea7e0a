"""Something that is tried in a process of its own, which may fail, hang or be killed without harm to this one."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

_Result = TypeVar("_Result")


class TriedInVain(Exception):
    """Why there is no result, in a few words."""


def in_forked_process(work: Callable[[], _Result], seconds: float) -> _Result:
    """What `work` returns, run in a fork of this process, which has all imports. What it prints is not shown.

    Args:
        seconds: after which it is ended.

    Raises:
        TriedInVain: it raised something, ended otherwise or took too long.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_and_send, args=(work, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TriedInVain(f"it took more than {seconds:g} s")
        succeeded, result = receiver.recv()
    except EOFError:
        process.join()
        raise TriedInVain(f"its process ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not succeeded:
        raise TriedInVain(result)
    return result


def _work_and_send(work: Callable[[], object], sender: Connection) -> None:
    import torch

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)  # a fork has no copies of the threads that this process may have started
    try:
        sender.send((True, work()))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        sender.send((False, lines[0]))
