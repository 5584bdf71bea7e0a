"""A rank of :func:`tensorshard.notebook_launch`: a fork of the notebook's process, from its first line to its last."""

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

from tensorshard.launch.worker import die_with_parent
from tensorshard.torch_private import pytree
from tensorshard.torch_private.process_groups import forget_world

OUTPUT, RESULT, ERROR = "output", "result", "error"
"""The kinds of a rank's messages: (stream, text); the pickled result; (seconds since the epoch, what went wrong)."""

USED_GPU = (
    "this process has used a GPU, and its forks cannot; restart the kernel, and call notebook_launch before anything "
    "uses a GPU, torch.cuda.is_available() included"
)
RETURNABLE = "return numbers, text, tensors, or lists and dicts of them"

_CUDA_IN_FORKS = ("forked subprocess", "CUDA error: initialization error")


class _Voice(io.TextIOBase):
    """Text that a rank writes, sent in whole lines to the process that shows it."""

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
        """Sends the last line, too, where it has no end."""
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
    """The life of a fork. It ends without what an interpreter does at its end: that is the other process's."""
    sender = pipes[rank][1]
    kept: list[Any] = []
    try:
        die_with_parent()
        for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(ending, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the other process's, which ends this one
        for number, (receiver, other) in enumerate(pipes):
            receiver.close()
            if number != rank:
                other.close()
        stack = stack_file(folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        lock = threading.Lock()
        sys.stdout, sys.stderr = voices = _Voice(sender, lock, "stdout"), _Voice(sender, lock, "stderr")
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        torch.set_num_threads(1)
        if dist.is_initialized():
            kept += forget_world()
        message = _work(function, args)
        for voice in voices:
            voice.end()
        sender.send(message)
        if message[0] == RESULT and dist.is_initialized():
            dist.destroy_process_group()  # ranks that still wait for this one learn that it has left
    finally:
        os._exit(0)  # while `kept` lives: its threads, which destroying it waits for, are in the other process


def _work(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """What this rank has to say in the end."""
    try:
        result = function(*args)
    except BaseException as error:  # SystemExit, too: it would end this rank without a word
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
