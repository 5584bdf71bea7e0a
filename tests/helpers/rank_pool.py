"""A pool of processes that stays up for the whole test session, so that a distributed test starts in milliseconds."""

import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from bounds import record_comparisons

_TIMEOUT_SECONDS = 300.0  # for machines that are busy with other things, too
# What a worker takes seconds to import. One process imports it, and the workers are forked from that one, so that it
# costs its time and memory once. None of these starts a thread, which a fork would lose.
_IMPORTED_ONCE = [
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "torch.testing",
    "tensorshard.parallelize.build",
    "transformers.modeling_utils",
]


class RankError(AssertionError):
    """A rank raised; carries that rank's traceback."""


def _serve(connection: Connection, variables: dict[str, str]) -> None:
    """A worker's life: join a fresh process group, run a function, report, repeat."""
    os.environ.clear()  # they are those of the test that happened to start the first worker
    os.environ.update(variables)
    import torch
    import torch.distributed as dist

    import strict_nccl
    from tensorshard.torch_private.process_groups import forget_meshes

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    record_comparisons()
    gc.freeze()  # what was imported stays, and need not be searched for garbage
    while True:
        try:
            task = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        rank, world_size, store_path, environment, group_timeout, backend, function, args, kwargs = task
        os.environ.update(environment)
        rules = ExitStack()
        try:
            if backend in strict_nccl.NAMES:
                strict_nccl.register()
                rules.enter_context(strict_nccl.strict_calls())
            dist.init_process_group(
                backend,
                store=dist.FileStore(store_path, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=group_timeout),
            )
            dist.barrier()  # a rank that raises at once must not leave while another is still joining
            torch.manual_seed(0)
            outcome = (True, function(*args, **kwargs))
            with suppress(Exception):  # where a test ended the world, or another rank failed, which says so itself
                dist.barrier()  # a rank that leaves takes with it what others have yet to receive
        except BaseException:  # whatever a test raises is reported, never lost
            outcome = (False, traceback.format_exc())
        finally:
            rules.close()
            os.environ.clear()
            os.environ.update(variables)
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()
            gc.collect()  # engines that hold themselves would keep their groups' threads
        try:
            connection.send(outcome)
        except Exception:
            connection.send((False, f"the result of rank {rank} could not be sent:\n{traceback.format_exc()}"))


class RankPool:
    """Runs functions on ranks of process groups of any size, on processes that are started once."""

    def __init__(self) -> None:
        self.note_environment()
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED_ONCE)
        self._workers: list[tuple[Any, Connection]] = []

    def note_environment(self) -> None:
        """From now on, workers that start have the present environment."""
        self._variables = dict(os.environ)

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
        timeout: float = _TIMEOUT_SECONDS,
        group_timeout: float = _TIMEOUT_SECONDS - 60,
        backend: str = "gloo",
        **kwargs: Any,
    ) -> list[Any]:
        """What `function(*args, **kwargs)` returned on each of `world_size` ranks, in their order.

        Args:
            timeout: seconds for all of it. group_timeout: seconds that a rank waits for others in a collective.
            backend: of the world: Gloo, or the stand-in for NCCL of ``strict_nccl.py``.
        """
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank in range(world_size):
                env = {**(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                env["WORLD_SIZE"] = str(world_size)
                env["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
                self._workers[rank][1].send(
                    (rank, world_size, store, env, group_timeout, backend, function, args, kwargs)
                )
            return self._collect(world_size, timeout)

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                late = sorted(pending.values())
                raise RankError(f"ranks {late} did not finish within {timeout:.0f} s" + _join(failures))
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[index]
                try:
                    succeeded, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, "the process died"
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + 5.0)
        if failures:
            if any(value == "the process died" for value in failures.values()):
                self.close()
            raise RankError(_join(failures))
        return [results[rank] for rank in range(world_size)]

    def _grow(self, size: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._variables), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """Ends every process; the next call starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()


def _join(failures: dict[int, str]) -> str:
    return "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
