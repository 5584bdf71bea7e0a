"""Work in forks of this process: something that may fail, hang or be killed without harm, or several things at once."""

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from tensorshard.common.words import first_line
from tensorshard.host.memory import cores_here
from tensorshard.torch_private.process_groups import forget_world, world_set_aside

_Result = TypeVar("_Result")

_PATIENCE = 30.0  # seconds that a fork may take beyond twice what this process takes for as many calls
_MOST_PROCESSES = 4  # each fork takes memory of its own
_cores_are_taken = ContextVar("_cores_are_taken", default=False)  # in a fork that is one of several


class ForkFailed(Exception):
    """Why there is no result, in a few words."""


class _NoAutogradError(ForkFailed):
    """Forks of this process cannot run a backward: its autograd has threads, as it has with a build for CUDA. Those
    threads may end the fork instead of raising, so any end before a first backward counts."""


def in_forked_process(work: Callable[[], _Result], seconds: float | None, *, shown: bool = False) -> _Result:
    """What `work` returns, run in a fork of this process, which has all imports. The fork has no process groups.

    Once CUDA is initialized, and where forks cannot run a backward, this process does the work itself, without its
    process groups meanwhile.

    Args:
        seconds: after which a fork is killed; None for never.
        shown: whether what a fork prints is shown.

    Raises:
        ForkFailed: it raised something, ended otherwise or took too long.
    """
    if not torch.cuda.is_initialized():
        fork = _Fork(work, shown=shown)
        try:
            return fork.result(seconds)
        except _NoAutogradError:
            pass
        finally:
            fork.end()
    try:
        with world_set_aside():
            return work()
    except Exception as error:
        raise ForkFailed(first_line(error)) from error


def run_at_once(calls: Sequence[Callable[[], _Result]]) -> Iterator[_Result]:
    """What `calls` return, in order, each of up to four cores taking its share: this process one, forks the others.

    This is for calls that compute little, and keep a core busy with Python alone. What a call changes in a fork stays
    there. If a call fails in a fork, this process runs it again. There are no forks outside of Linux, after CUDA was
    initialized, or within such a fork. There each call is made when its result is asked for.

    Args:
        calls: functions whose results can be pickled.

    Raises:
        Exception: what a call raises.
    """
    count = min(len(calls), _cores_for_forks())
    if count < 2:
        yield from (call() for call in calls)
        return
    shares = [calls[start::count] for start in range(count)]
    forks = [_Fork(_share_of(share)) for share in shares[1:]]
    try:
        begin = time.monotonic()
        results = [[call() for call in shares[0]]]
        patience = 2 * (time.monotonic() - begin) + _PATIENCE
        for fork, share in zip(forks, shares[1:], strict=True):
            try:
                results.append(fork.result(patience))
            except ForkFailed:
                results.append([call() for call in share])
    finally:
        for fork in forks:
            fork.end()
    yield from (results[place % count][place // count] for place in range(len(calls)))


def _cores_for_forks() -> int:
    if _cores_are_taken.get() or sys.platform != "linux" or torch.cuda.is_initialized():
        return 1
    return min(_MOST_PROCESSES, cores_here())


def _share_of(calls: Sequence[Callable[[], _Result]]) -> Callable[[], list[_Result]]:
    def work() -> list[_Result]:
        _cores_are_taken.set(True)
        return [call() for call in calls]

    return work


class _Fork(Generic[_Result]):
    """A fork of this process that runs `work`. It must be ended."""

    def __init__(self, work: Callable[[], _Result], *, shown: bool = False) -> None:
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the fork would write it again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
            # Not with multiprocessing: this process may be its daemon, which may not have any children.
            self._process = os.fork()
        if self._process == 0:
            _be_the_fork(work, sender, shown)
        sender.close()
        self._ended = False

    def result(self, seconds: float | None) -> _Result:
        """What the work returns.

        Raises:
            ForkFailed: it raised something, ended otherwise or takes more than `seconds`.
        """
        kind: type[ForkFailed] = _NoAutogradError
        try:
            self._receive(seconds)  # it can run a backward
            kind = ForkFailed
            succeeded, result = self._receive(seconds)
        except EOFError:
            code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
            self._ended = True
            raise kind(f"its process ended with code {code}") from None
        if not succeeded:
            raise ForkFailed(result)
        value: _Result = result
        return value

    def _receive(self, seconds: float | None) -> Any:
        if not self._receiver.poll(seconds):
            raise ForkFailed(f"it took more than {seconds:g} s")
        return self._receiver.recv()

    def end(self) -> None:
        """Ends the fork, whatever it is doing."""
        self._receiver.close()
        if not self._ended:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self._ended = True


def _be_the_fork(work: Callable[[], object], sender: Connection, shown: bool) -> NoReturn:
    """Runs `work` and exits without the interpreter's clean-up, which is the parent's to do."""
    groups: list[Any] = []
    code = 1
    try:
        if not shown:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        torch.set_num_threads(1)  # a fork has no copies of the threads that this process may have started
        if dist.is_initialized():
            groups += forget_world()
        if _runs_autograd():  # else it ends at once, and not after half of the work
            sender.send(None)
            _work_and_send(work, sender)
            sys.stdout.flush()
            code = 0
    finally:
        os._exit(code)  # before `groups` are freed: that would wait for their threads, which only the parent has


def _runs_autograd() -> bool:
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _work_and_send(work: Callable[[], object], sender: Connection) -> None:
    try:
        sender.send((True, work()))
    except Exception as error:
        sender.send((False, first_line(error)))
