"""The errors of a launch: they find the worker that failed first, and describe it. This file imports nothing heavy."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_TAIL_LINES = 20
_CHARACTERS = 300


class LaunchError(ValueError):
    """Workers cannot be started as asked; nothing was started."""


class LaunchInterrupted(Exception):
    """A signal ended the run; all workers are gone.

    Attributes:
        signal: the signal that arrived.
        ending: how the run goes on; "" if it has said so itself.
    """

    def __init__(self, number: signal.Signals, ending: str = "") -> None:
        super().__init__(f"ended by {number.name}")
        self.signal = number
        self.ending = ending


class WorkerFailedError(RuntimeError):
    """A worker failed, and the others were ended. The message holds the first failing rank's traceback, once.

    Args:
        failures: what the elastic agent knows about the workers that failed, by global rank.
        world_size: number of processes of the run.
        logs: the directory with the output of the ranks other than 0; None if they wrote nothing.
        ending: how the run goes on; "" if it has said so itself.

    Attributes:
        rank: the global rank that failed first.
        mistake: a sentence, if the cause was a mistake in the config or the arguments; else None.
    """

    def __init__(
        self, failures: "Mapping[int, ProcessFailure]", world_size: int, logs: Path | None, ending: str = ""
    ) -> None:
        self.ending = ending
        self.rank = min(failures, key=lambda rank: _moment(failures[rank]))
        self.mistake = _mistake(failures[self.rank])
        text = f"rank {self.rank} of {world_size} {_describe(failures[self.rank])}"
        if logs is not None:
            tail = _tail(logs / f"rank{self.rank}.stderr.log")
            text += f"\n\n{tail}(what ranks other than 0 wrote is in {logs})"
        super().__init__(text)


class RankFailedError(RuntimeError):
    """A rank of :func:`tensorshard.notebook_launch` failed, and the others were ended.

    Args:
        rank: the one that failed first. world_size: number of ranks.
        how: how it failed, with its traceback if it raised an exception.
    """

    def __init__(self, rank: int, world_size: int, how: str) -> None:
        super().__init__(f"rank {rank} of {world_size} {how}")
        self.rank = rank


def _moment(failure: "ProcessFailure") -> float:
    """When a worker failed, in seconds since the epoch, as far as it is known.

    A worker that raises an exception writes its error file at that moment. The agent notices one that dies without an
    error file later, in whole seconds. Its peers' errors about a lost connection may look older by up to a second. So
    one second is subtracted. After an abort one second is added, since native code aborts when it loses a peer. A
    worker with SIGTERM comes last, since the agent ends the remaining workers with it.
    """
    if os.path.isfile(failure.error_file):
        return os.stat(failure.error_file).st_mtime
    if failure.exitcode == -signal.SIGTERM:
        return float("inf")
    return failure.timestamp + (1.0 if failure.exitcode == -signal.SIGABRT else -1.0)


def _mistake(failure: "ProcessFailure") -> str | None:
    """What :func:`tensorshard.trainer.launch.worker.hand_on_mistake` wrote, if it did."""
    message = failure.error_file_data["message"]
    return message if os.path.isfile(failure.error_file) and isinstance(message, str) else None


def _describe(failure: "ProcessFailure") -> str:
    message = failure.error_file_data["message"]
    if isinstance(message, dict):
        return f"failed:\n\n{message['extraInfo']['py_callstack'].rstrip()}"
    mistake = _mistake(failure)
    if mistake is not None:
        return f"found a mistake: {mistake}"
    return how_it_ended(failure.exitcode)


def last_line(error_file: Path) -> str:
    """The last line of what a worker wrote to its error file, which names the error."""
    try:
        message = json.loads(error_file.read_text())["message"]
    except (OSError, ValueError, KeyError):
        return "it left no message"
    text = message["message"] if isinstance(message, dict) else str(message)
    last = text.strip().splitlines()[-1] if text.strip() else "it left no message"
    return last if len(last) <= _CHARACTERS else f"{last[:_CHARACTERS]} ..."


def how_it_ended(exitcode: int) -> str:
    """How a process ended that left no message."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode} and no Python exception"
    text = f"was killed by {signal.Signals(-exitcode).name}"
    if exitcode == -signal.SIGKILL:
        text += ", most often the kernel's answer to a machine out of memory"
    if exitcode == -signal.SIGABRT:
        text += (
            ", as a C++ library ends a process. On GPUs it is most often NCCL's watchdog, after a collective that did "
            "not end within the timeout: another rank has failed, or made other calls. It says so in what the rank "
            "wrote, and torch's flight recorder has written which collectives each rank has made"
        )
    return text


def _tail(path: Path) -> str:
    """The last lines of a file, if it exists. Native code writes there why it failed."""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if path.is_file() else []
    return "".join(f"{line}\n" for line in lines)
