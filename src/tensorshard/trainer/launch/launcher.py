"""Starts the workers of a run on this machine through torchrun's elastic agent, and ends when they end.

Also here: a rendezvous for the workers of one machine. They meet in a file, and connections stay on the loopback
interface.

torchrun's rendezvous serves a store to all networks of the machine, without a password, and unpickles what it finds
there. A single machine needs no rendezvous with others. So the agent keeps its store in its own memory, and the workers
have theirs in a file that only this user can open.
"""

import contextlib
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tensorshard.comm.world import STORE_FILE
from tensorshard.host.memory import cores_here
from tensorshard.host.process_settings import environment_for_training
from tensorshard.trainer.launch.launch_errors import LaunchError, LaunchInterrupted, WorkerFailedError, last_line
from tensorshard.trainer.launch.worker import INTERRUPTED, RUN_FILE, told, write_call

# Seconds that workers may take to save and leave after a signal, unless the environment sets another time.
_SHUTDOWN_SECONDS = "600"

_RECORDS = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
"""Environment variables that say where torch's flight recorder writes: an older name, which all versions read."""

_SCRATCH, _KEPT = "tensorshard-run-", "tensorshard-logs-"
"""Prefixes of folder names: of temporary files, and of logs that are kept because a worker failed."""
_RUN = "run"
BACKEND = "tensorshard-local"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """How many processes to start, and how they find each other. The constructor checks it.

    Args:
        nproc: the number of processes on this machine; with GPUs, each process uses one.
        nnodes: the number of machines. Each of them makes the same call.
        node_rank: this machine's position among them, 0 to nnodes - 1; None lets the machines agree on it.
        rdzv_endpoint: ``HOST:PORT`` of one of the machines, the same in every call; one machine needs none.
        min_nodes: with how many machines the run begins, and goes on if others are lost; None for all `nnodes`.
        max_restarts: how many times all workers are started again after one has failed.

    Raises:
        LaunchError: the numbers do not fit together, or there are more processes than visible GPUs.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    min_nodes: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise LaunchError(f"nproc is {self.nproc}; at least 1 process is needed")
        if self.nnodes < 1:
            raise LaunchError(f"nnodes is {self.nnodes}; at least 1 machine is needed")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.nnodes:
            raise LaunchError(
                f"nnodes is {self.min_nodes}:{self.nnodes}; it must be MIN:MAX, with MIN from 1 to MAX, such as 1:4"
            )
        if self.min_nodes is not None and self.node_rank is not None:
            raise LaunchError(
                f"node_rank is {self.node_rank}, and nnodes is {self.min_nodes}:{self.nnodes}: machines that may come "
                f"and go get their numbers when they meet; leave node_rank out"
            )
        if self.max_restarts < 0:
            raise LaunchError(f"max_restarts is {self.max_restarts}; it must be 0 or more")
        gpus = visible_gpus()
        if gpus and self.nproc > gpus:
            raise LaunchError(
                f"nproc is {self.nproc}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible and each "
                f"process takes one; ask for at most {gpus}, or set CUDA_VISIBLE_DEVICES= to run on CPUs"
            )
        self._check_rendezvous()

    def _check_rendezvous(self) -> None:
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise LaunchError(
                f"nnodes is {self.nnodes}, so the machines need a place to meet: give rdzv_endpoint the "
                f"HOST:PORT of one of them, the same on each"
            )
        if self.rdzv_endpoint is not None:
            host, _, port = self.rdzv_endpoint.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise LaunchError(
                    f"rdzv_endpoint is {self.rdzv_endpoint!r}; it must be HOST:PORT, for instance node0:29500"
                )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise LaunchError(
                f"node_rank is {self.node_rank}; with {self.nnodes} machine{'s' * (self.nnodes > 1)} it must "
                f"be between 0 and {self.nnodes - 1}"
            )

    @property
    def size(self) -> int:
        """Number of processes on all machines, if none is missing."""
        return self.nproc * self.nnodes

    @property
    def is_alone(self) -> bool:
        """Whether this is the only machine."""
        return self.rdzv_endpoint is None


def visible_gpus() -> int:
    """Number of GPUs that workers on this machine can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def launch(
    entrypoint: Callable[..., Any],
    args: Sequence[Any],
    world: World,
    *,
    log_dir: str | Path | None = None,
    worker_env: Mapping[str, str] | None = None,
    ending: Callable[[Path], str] | None = None,
) -> None:
    """Runs ``entrypoint(*args)`` in ``world.nproc`` processes on this machine; returns when all have ended.

    Rank 0 writes to this process's terminal. What other ranks write goes to ``rank1.stdout.log`` and so on.
    It must be called from the main thread, since signals arrive there. The first Ctrl-C is passed on to the workers,
    which may still save a checkpoint; the second ends them at once.

    Args:
        entrypoint: a function at the top level of a module. Each worker finds ``RANK``, ``LOCAL_RANK``,
            ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in its environment, as under torchrun.
        args: its arguments; they are pickled.
        world: how many processes, on how many machines.
        log_dir: where the output of the other ranks goes; None for a temporary directory, which is kept if a worker
            fails and anything was written.
        worker_env: further environment variables of the workers, set before they start (settings of the memory
            allocator need that). ``OMP_NUM_THREADS`` is the number of cores divided by `nproc`, unless it is set here
            or in this process's environment.
        ending: says how a run goes on that ended early and did not say so itself; it gets the folder that workers have
            noted as theirs.

    Raises:
        ValueError: `entrypoint` cannot be imported by name.
        LaunchError: the machines did not find each other.
        LaunchInterrupted: a signal ended the run.
        WorkerFailedError: a worker failed. The error has the traceback of the rank that failed first.
    """
    _check_meeting_place(world)
    _remove_leftovers()
    scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))
    logs = Path(log_dir) if log_dir is not None else scratch
    keep_scratch = False
    try:
        call = scratch / "call.pickle"
        write_call(call, entrypoint, args)
        logs.mkdir(parents=True, exist_ok=True)
        environment = worker_environment(world.nproc)
        if world.is_alone:
            environment |= local_environment(scratch)
        environment[RUN_FILE] = str(scratch / _RUN)
        if visible_gpus() and not any(name in os.environ for name in _RECORDS):
            environment[_RECORDS[0]] = str(logs / "nccl-rank")
        streams = _Streams(logs, {**environment, **(worker_env or {})}, world.max_restarts)
        with _signal_handling(scratch, ending), _quiet_agent():
            start = elastic_launch(_launch_config(world, streams), sys.executable)
            start("-u", "-m", "tensorshard.trainer.launch.worker", str(call))
    except SignalException as error:
        raise LaunchInterrupted(error.sigval, _ending(scratch, ending)) from None
    except RendezvousError as error:
        raise LaunchError(f"the {world.nnodes} machines did not meet at {world.rdzv_endpoint}: {error}") from error
    except ChildFailedError as error:
        said = _ending(scratch, ending)
        written = any(file.stat().st_size for name in ("rank*.log", "nccl-rank*") for file in logs.glob(name))
        if written and logs == scratch:
            keep_scratch = True
            (scratch / "store").unlink(missing_ok=True)
            scratch.rename(logs := scratch.with_name(scratch.name.replace(_SCRATCH, _KEPT, 1)))
        raise WorkerFailedError(error.failures, world.size, logs if written else None, said) from None
    finally:
        call.unlink(missing_ok=True)
        if not keep_scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _ending(scratch: Path, ending: Callable[[Path], str] | None) -> str:
    """What `ending` says of the run whose workers have written to the folder of temporary files."""
    noted = scratch / _RUN
    if ending is None or not noted.is_file() or told(noted).exists():
        return ""
    return ending(Path(noted.read_text()))


def _remove_leftovers() -> None:
    """Removes the temporary files of launchers that were killed and whose processes are all gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        try:
            if pid.isdecimal() and folder.stat().st_uid == os.getuid():
                os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another user's, or removed in the meantime


def _check_meeting_place(world: World) -> None:
    """Checks that the host where the machines meet has an address. Without one the agent would try for minutes."""
    if world.rdzv_endpoint is None:
        return
    host, _, port = world.rdzv_endpoint.rpartition(":")
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise LaunchError(
            f"rdzv_endpoint is {world.rdzv_endpoint}, but the host {host!r} is not known on this machine ({error})"
        ) from error


class _Streams(LogsSpecs):
    """Where each worker's output goes, and its environment variables in addition to the agent's.

    The agent asks for them before each start of the workers. So this is also where a restart is told.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], max_restarts: int) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._environment = environment
        self._max_restarts = max_restarts
        self._starts = 0

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank (`envs`: their environments); an empty name means the terminal."""
        streams = LogsDest()
        if self._starts:
            self._tell_restart([int(env["RANK"]) for env in envs.values()])
            if STORE_FILE in self._environment:
                Path(self._environment[STORE_FILE]).unlink(missing_ok=True)  # of the workers that are gone
        self._starts += 1
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            streams.stdouts[local_rank] = "" if rank == 0 else str(self._folder / f"rank{rank}.stdout.log")
            streams.stderrs[local_rank] = "" if rank == 0 else str(self._folder / f"rank{rank}.stderr.log")
            error_file = self._folder / f"rank{rank}.error.json"
            error_file.unlink(missing_ok=True)
            streams.error_files[local_rank] = str(error_file)
            env.update(self._environment)
            env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        return streams

    def _tell_restart(self, ranks: Sequence[int]) -> None:
        """Says why the workers are started again, as far as it is known here."""
        files = {rank: self._folder / f"rank{rank}.error.json" for rank in ranks}
        error_files = {rank: file for rank, file in files.items() if file.is_file()}
        first = min(error_files, key=lambda rank: error_files[rank].stat().st_mtime, default=None)
        cause = "" if first is None else last_line(error_files[first])
        silent = [rank for rank in ranks if rank not in error_files]
        if first is None or (cause.startswith("CollectiveMismatchError") and silent):
            cause = f"rank {', '.join(map(str, silent))} was killed, or ended without a message"
        else:
            cause = f"rank {first} failed: {cause}"
        print(
            f"tensorshard: {cause}; restart {self._starts} of at most {self._max_restarts}", file=sys.stderr, flush=True
        )


def worker_environment(nproc: int) -> dict[str, str]:
    """Environment variables for each of `nproc` workers of this machine, without those that the user has set.

    Each worker gets as many threads as its share of the cores. On machines without GPUs, glibc's allocator is set to
    keep freed memory for the next step (:mod:`tensorshard.host.process_settings`).
    """
    cores = cores_here()
    settings = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    if not torch.cuda.is_available():
        settings |= environment_for_training()
    return {name: value for name, value in settings.items() if name not in os.environ}


def _launch_config(world: World, streams: LogsSpecs) -> LaunchConfig:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)  # read by LaunchConfig
    alone = world.is_alone
    if not alone:  # else a machine that comes back is never told where the store of the new round is
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    meeting = "static" if world.node_rank is not None else "c10d"
    return LaunchConfig(
        min_nodes=world.nnodes if world.min_nodes is None else world.min_nodes,
        max_nodes=world.nnodes,
        nproc_per_node=world.nproc,
        logs_specs=streams,
        run_id=uuid.uuid4().hex if alone else "tensorshard",
        role="tensorshard",
        rdzv_endpoint="localhost:0" if alone else str(world.rdzv_endpoint),
        rdzv_backend=register() if alone else meeting,
        rdzv_configs={} if alone or world.node_rank is None else {"rank": world.node_rank},
        local_addr="localhost" if alone else None,
        max_restarts=world.max_restarts,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT,SIGUSR1",
    )


@contextmanager
def _signal_handling(scratch: Path, ending: Callable[[Path], str] | None) -> Iterator[None]:
    """Inside, the agent passes the first Ctrl-C on, and the second one ends everything at once. The former signal
    handlers are restored afterwards.

    Args:
        scratch: the folder of temporary files, which is removed before the process ends.
        ending: as for :func:`launch`.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end_at_once)
        raise SignalException("interrupted", signal.SIGINT)

    def end_at_once(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):  # it may come in the middle of anything
            os.write(sys.stderr.fileno(), f"{_ending(scratch, ending)}\n".encode())
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(INTERRUPTED)  # the kernel kills the workers with us, see tensorshard.trainer.launch.worker

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    previous = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Inside, the agent does not print its own report of a failure, unless ``LOGLEVEL`` asks for it."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    propagate = logger.propagate
    logger.addHandler(silence)
    logger.propagate = "LOGLEVEL" in os.environ
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silence)


class LocalRendezvous(RendezvousHandler):
    """A rendezvous with a single agent."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.HashStore()
        # Nothing listens at this port. Code that reads MASTER_PORT finds a port that was free.
        meeting_place = RendezvousStoreInfo(_LOOPBACK, free_port())
        return RendezvousInfo(store, 0, 1, meeting_place)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def register() -> str:
    """Makes the rendezvous known to torch's launcher; returns its name there."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def local_environment(scratch: Path) -> dict[str, str]:
    """Environment variables for the workers of a single machine: where they meet, and the network interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        STORE_FILE: str(scratch / "store"),
        "MASTER_ADDR": _LOOPBACK,
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def free_port() -> int:
    """A port where nothing listens. It lies below those that systems hand out by themselves, which could take it.

    Raises:
        OSError: none of 100 such ports can be used.
    """
    chance = random.SystemRandom()  # not the module's: a user's seed would make all runs of a machine ask for the same
    for port in chance.sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port
    raise OSError(f"none of 100 ports between 20000 and 32767 can be used at {_LOOPBACK}")
