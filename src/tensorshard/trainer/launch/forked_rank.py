"""A rank of :func:`tensorshard.notebook_launch`: all that a fork of the notebook's process runs."""

import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tensorshard.host.process_settings import allow_process_settings
from tensorshard.torch_private import pytree
from tensorshard.torch_private.process_groups import forget_world
from tensorshard.trainer.launch.worker import die_with_parent

OUTPUT, RESULT, ERROR = "output", "result", "error"
"""The kinds of a rank's messages: (stream, text); the pickled result; (seconds since the epoch, what went wrong)."""

USED_GPU = (
    "this process has used a GPU, and its forks cannot; restart the kernel, and call notebook_launch before anything "
    "uses a GPU, torch.cuda.is_available() included"
)
RETURNABLE = "return numbers, text, tensors, or lists and dicts of them"

_CUDA_IN_FORKS = ("forked subprocess", "CUDA error: initialization error")


class _Voice(io.TextIOBase):
    """A text stream of a rank. It sends whole lines to the process that shows them."""

    def __init__(self, sender: Connection, lock: threading.Lock, name: str) -> None:
        self._sender = sender
        self._lock = lock
        self._name = name
        self._begun = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._sender.send((OUTPUT, (self._name, lines + newline)))
        return len(text)

    def end(self) -> None:
        """Sends the last line, too, if it does not end with a newline."""
        if self._begun:
            self.write("\n")


def be_a_rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipes: list[tuple[Connection, Connection]],
    environment: dict[str, str],
    folder: Path,
) -> NoReturn:
    """Runs one rank in a fork, and ends the fork. It skips the interpreter's cleanup, which belongs to the parent."""
    sender = pipes[rank][1]
    kept: list[Any] = []
    try:
        die_with_parent()
        for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(ending, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt, and ends this process
        for number, (receiver, other) in enumerate(pipes):
            receiver.close()
            if number != rank:
                other.close()
        stack = stack_file(folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        lock = threading.Lock()
        sys.stdout, sys.stderr = voices = _Voice(sender, lock, "stdout"), _Voice(sender, lock, "stderr")
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        allow_process_settings()
        torch.set_num_threads(1)
        if dist.is_initialized():
            kept += forget_world()
        message = _work(function, args)
        for voice in voices:
            voice.end()
        sender.send(message)
        if message[0] == RESULT and dist.is_initialized():
            dist.destroy_process_group()  # ranks that wait for this one then get an error
    finally:
        os._exit(0)  # before `kept` is destroyed, which would wait for threads that exist only in the parent


def _work(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """Calls the function, and returns this rank's last message: its result or its error."""
    try:
        result = function(*args)
    except BaseException as error:  # SystemExit, too, which would end this rank without a message
        said = "".join(traceback.format_exception(error.with_traceback(_below(error)))).rstrip()
        if any(words in said for words in _CUDA_IN_FORKS):
            said += f"\n\n{USED_GPU}"
        return ERROR, (time.time(), f"failed:\n\n{said}")
    try:
        return RESULT, pickle.dumps(pytree.tree_map(_on_cpu, result))
    except Exception as error:
        said = f"returned a {type(result).__name__}, which cannot be sent back ({error}); {RETURNABLE}"
        return ERROR, (time.time(), said)


def _below(error: BaseException) -> Any:
    """The traceback of `error` without this module's own line."""
    return None if error.__traceback__ is None else error.__traceback__.tb_next


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) and value.is_cuda else value


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"
