"""`notebook_launch`: runs a function on several ranks, from a notebook or any running interpreter."""

import faulthandler
import inspect
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing

from tensorshard.common.words import kind_of
from tensorshard.host.process_settings import allow_process_settings
from tensorshard.torch_private import pytree
from tensorshard.torch_private.process_groups import forget_meshes, forget_world
from tensorshard.trainer.launch.launch_errors import LaunchError, RankFailedError, how_it_ended
from tensorshard.trainer.launch.launcher import free_port, local_environment, visible_gpus
from tensorshard.trainer.launch.worker import die_with_parent

_LAST_WORDS = 0.5  # after the first rank has failed, seconds in which others may report their errors
_GRACE = 5.0  # seconds that a rank has to leave before it is killed


def notebook_launch(
    function: Callable[..., Any], *, ranks: int = 2, args: Sequence[Any] = (), timeout: float | None = None
) -> list[Any]:
    """Runs ``function(*args)`` on `ranks` processes of this machine, and returns what each of them returned.

    Each finds ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` in its environment, as under torchrun, so that
    :func:`tensorshard.parallelize` or ``torch.distributed.init_process_group`` joins their world. What rank 0 prints
    is shown as it comes; lines of other ranks begin with ``rank 1:`` and so on. The call ends with its processes: an
    interrupt, an error or the end of this interpreter leaves none behind.

    The processes are forks of this one, started by ``torch.multiprocessing``. They see every name of the notebook as it
    is now, and nothing is pickled on the way in. Fresh processes could not import a function that is defined in a cell.
    Forks have two limits. Nothing in this process may have used a GPU before. And a rank computes on one CPU thread,
    since a fork has no copies of this process's threads. What a rank changes is not changed here: return it, or save it
    to a file.

    Args:
        function: what each rank runs. It may be defined in a cell, be nested, or be a lambda.
        ranks: how many processes; with GPUs, each process uses one.
        args: the function's arguments.
        timeout: seconds that the call may take; None for no limit. When they are over, the error shows what each rank
            was doing. Ranks that wait for each other in a collective end by themselves, see `timeout` of
            :func:`tensorshard.parallelize`.

    Returns:
        What each rank returned, by rank. It is pickled on the way out, and tensors come back on the CPU.

    Raises:
        TypeError, ValueError: an argument makes no sense, or there are more ranks than GPUs.
        RuntimeError: this process has used a GPU, or is a rank itself.
        RankFailedError: a rank failed; the message has the traceback of the first one. The others were ended.
        TimeoutError: it took longer than `timeout`.

    Examples:
        >>> def train():
        ...     engine = ts.parallelize(model, ts.Plan(zero=3), optimizer=optimizer, loss_fn=loss_fn)
        ...     return float(engine.step(inputs, targets))
        >>> losses = ts.notebook_launch(train, ranks=2)  # doctest: +SKIP
    """
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args is {args!r}; it must be the function's arguments, such as ({args!r},)")
    args = tuple(args)
    _check(function, ranks, args, timeout)
    _import_what_ranks_use()
    with _scratch() as folder:
        return _Ranks(function, args, ranks, folder).results(timeout)


def _import_what_ranks_use() -> None:
    """Imports, once here rather than once in each rank, what takes seconds."""
    import_module("tensorshard.parallelize.build")
    torch.optim.SGD([torch.zeros(())], lr=0.0)  # the first optimizer imports torch's compiler


def _check(function: Any, ranks: Any, args: tuple[Any, ...], timeout: Any) -> None:
    if not callable(function):
        raise TypeError(f"function is {kind_of(function)}; it must be a function that each rank is to run")
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks is {ranks!r}; it must be a number of processes, such as 2")
    if ranks < 1:
        raise LaunchError(f"ranks is {ranks}; at least 1 process is needed")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds above 0, or None for no limit")
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise TypeError(
            f"{_name(function)} takes {inspect.signature(function)}, and is called with args={args!r} ({error}); give "
            f"as many args, or a lambda that takes none"
        ) from None
    except ValueError:  # a function written in C may have no signature
        pass
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(f"notebook_launch forks this process, which {sys.platform} cannot; use Linux, or torchrun")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise RuntimeError(
            f"notebook_launch was called in rank {os.environ['RANK']} of a world that a launcher started; call "
            f"{_name(function)} there directly"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(USED_GPU)
    gpus = _gpus()
    if gpus and ranks > gpus:
        raise LaunchError(
            f"ranks is {ranks}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible and each rank takes one; ask "
            f"for at most {gpus}, or set os.environ['CUDA_VISIBLE_DEVICES'] = '' to run on CPUs"
        )


def _gpus() -> int:
    """Number of GPUs. The driver is asked in a way after which forks can still use them."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return visible_gpus()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the file in which the ranks meet, and for their stacks when their time is up."""
    folder = Path(tempfile.mkdtemp(prefix="tensorshard-notebook-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


class _Ranks:
    """The processes, and the messages that they have sent so far."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], count: int, folder: Path) -> None:
        self._count = count
        self._folder = folder
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(count)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the forks would write it again
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            self._processes = torch.multiprocessing.start_processes(
                run_rank,
                (function, args, pipes, _environment(count, folder), folder),
                nprocs=count,
                join=False,
                daemon=False,  # a daemon may not start processes, such as those that load data
                start_method="fork",
            ).processes
        for _, sender in pipes:
            sender.close()
        self._receivers: dict[Any, int] = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, tuple[float, str]] = {}  # when, and how

    def results(self, timeout: float | None) -> list[Any]:
        """What each rank returned, once all of them have."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while len(self._results) < self._count and not self._failures:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the ranks took more than timeout={timeout:g} seconds.{self._whereabouts()}")
                self._listen(left)
            if self._failures:
                end = time.monotonic() + _LAST_WORDS
                while self._receivers and (left := end - time.monotonic()) > 0:
                    self._listen(left)
                rank = min(self._failures, key=lambda rank: self._failures[rank][0])
                raise RankFailedError(rank, self._count, self._failures[rank][1])
        finally:
            self._end()
        return [_unpickled(self._results[rank], rank, self._count) for rank in range(self._count)]

    def _listen(self, seconds: float | None) -> None:
        """Waits for the next messages of ranks, at most `seconds`, and takes them."""
        ready: list[Any] = wait(list(self._receivers), seconds)
        for receiver in ready:
            rank = self._receivers[receiver]
            try:
                kind, content = receiver.recv()
            except EOFError:
                self._has_left(rank)
                receiver.close()
                del self._receivers[receiver]
                continue
            if kind == OUTPUT:
                _show(rank, *content)
            elif kind == RESULT:
                self._results[rank] = content
            else:
                self._failures[rank] = content

    def _has_left(self, rank: int) -> None:
        """Called when a rank has ended. If it sent neither a result nor an error, this is noted as its failure."""
        if rank in self._results or rank in self._failures:
            return
        process = self._processes[rank]
        process.join(_GRACE)
        # It counts as failed before the ranks that report its loss. After an abort it counts as failed last, since
        # native code aborts when it loses a peer.
        moment = float("inf") if process.exitcode == -signal.SIGABRT else 0.0
        self._failures[rank] = (moment, how_it_ended(process.exitcode or 0))

    def _whereabouts(self) -> str:
        """What each rank is doing."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_LAST_WORDS)
        reports = []
        for rank in range(self._count):
            stack = stack_file(self._folder, rank)
            text = stack.read_text(errors="replace").strip() if stack.is_file() else ""
            doing = "has returned" if rank in self._results else f"was here:\n{text}" if text else "was still starting"
            reports.append(f"rank {rank} {doing}")
        return "\n\n" + "\n\n".join(reports)

    def _end(self) -> None:
        """Ends the processes that are still there."""
        leaving = time.monotonic() + (_LAST_WORDS if len(self._results) == self._count else 0)
        for process in self._processes:
            process.join(max(0.0, leaving - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        end = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for receiver in self._receivers:
            receiver.close()


def _environment(count: int, folder: Path) -> dict[str, str]:
    """Environment variables that are the same for all ranks."""
    size = str(count)
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**local_environment(folder), **sizes, "MASTER_PORT": str(free_port())}


def _show(rank: int, name: str, text: str) -> None:
    stream = sys.stderr if name == "stderr" else sys.stdout
    stream.write("".join(f"rank {rank}: {line}" for line in text.splitlines(keepends=True)) if rank else text)
    stream.flush()


def _unpickled(content: bytes, rank: int, count: int) -> Any:
    try:
        return pickle.loads(content)
    except Exception as error:
        raise RankFailedError(rank, count, f"returned what cannot be received ({error}); {RETURNABLE}") from error


OUTPUT, RESULT, ERROR = "output", "result", "error"
"""The kinds of a rank's messages: (stream, text); the pickled result; (seconds since the epoch, what went wrong)."""

USED_GPU = (
    "this process has used a GPU, and its forks cannot; restart the kernel, and call notebook_launch before anything "
    "uses a GPU, torch.cuda.is_available() included"
)
RETURNABLE = "return numbers, text, tensors, or lists and dicts of them"

_CUDA_IN_FORKS = ("forked subprocess", "CUDA error: initialization error")


class _LineForwarder(io.TextIOBase):
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


def run_rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    pipes: list[tuple[Connection, Connection]],
    environment: dict[str, str],
    folder: Path,
) -> NoReturn:
    """Runs one rank in a fork, and ends the fork. It skips the interpreter's cleanup, which belongs to the parent."""
    sender = pipes[rank][1]
    old_groups: list[Any] = []
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
        sys.stdout, sys.stderr = voices = _LineForwarder(sender, lock, "stdout"), _LineForwarder(sender, lock, "stderr")
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        allow_process_settings()
        torch.set_num_threads(1)
        if dist.is_initialized():
            old_groups += forget_world()
        forget_meshes()
        message = _work(function, args)
        for voice in voices:
            voice.end()
        sender.send(message)
        if message[0] == RESULT and dist.is_initialized():
            dist.destroy_process_group()  # ranks that wait for this one then get an error
    finally:
        os._exit(0)  # before `old_groups` are destroyed, which would wait for threads that exist only in the parent


def _work(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """Calls the function, and returns this rank's last message: its result or its error."""
    try:
        result = function(*args)
    except BaseException as error:  # SystemExit, too, which would end this rank without a message
        text = "".join(traceback.format_exception(error.with_traceback(_below(error)))).rstrip()
        if any(words in text for words in _CUDA_IN_FORKS):
            text += f"\n\n{USED_GPU}"
        return ERROR, (time.time(), f"failed:\n\n{text}")
    try:
        return RESULT, pickle.dumps(pytree.tree_map(_on_cpu, result))
    except Exception as error:
        text = f"returned {kind_of(result)}, which cannot be sent back ({error}); {RETURNABLE}"
        return ERROR, (time.time(), text)


def _below(error: BaseException) -> Any:
    """The traceback of `error` without this module's own line."""
    return None if error.__traceback__ is None else error.__traceback__.tb_next


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) and value.is_cuda else value


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stack"
