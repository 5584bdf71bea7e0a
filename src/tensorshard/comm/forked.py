"""Something that is tried in a process of its own, which may fail, hang or be killed without harm to this one."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class TriedInVain(Exception):
    """Why there is no result, in a few words."""


def in_forked_process(work: Callable[[], _Result], seconds: float | None, *, shown: bool = False) -> _Result:
    """What `work` returns, run in a fork of this process, which has all imports. The fork is in no world of ranks.

    Args:
        seconds: after which it is ended; None for never.
        shown: whether what it prints is shown.

    Raises:
        TriedInVain: it raised something, ended otherwise or took too long.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_and_send, args=(work, sender, shown), daemon=True)
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


def _work_and_send(work: Callable[[], object], sender: Connection, shown: bool) -> None:
    import torch
    import torch.distributed as dist

    if not shown:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    torch.set_num_threads(1)  # a fork has no copies of the threads that this process may have started
    groups = _forgotten() if dist.is_initialized() else []
    try:
        sender.send((True, work()))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        sender.send((False, lines[0]))
    if groups:
        sender.close()
        os._exit(0)  # while they live: their threads, which destroying them waits for, are in the other process


def _forgotten() -> list[Any]:
    from tensorshard.torch_private.process_groups import forget_world

    return forget_world()
