"""The world: joining its process group, whether it is real or simulated by one process, and how a process leaves it."""

import atexit
import logging
import os
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensorshard.torch_private.fake_tensors import active_fake_mode
from tensorshard.torch_private.process_groups import opens_at_once, simulates_gpu

logger = logging.getLogger("tensorshard")

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others in a collective, unless told otherwise."""

LONG_TIMEOUT = timedelta(minutes=30)
"""The same while one rank may work for long: until the first step is over, and while checkpoints are saved or read."""

STORE_FILE = "TENSORSHARD_STORE_FILE"
"""Environment variable: the file through which processes of one machine find each other, in place of a port."""


_LEAVE_SECONDS = 30.0
_PATIENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.005
_QUIET_PAUSES = 4  # in a row; a thread may sleep between two calculations
_TASKS = Path("/proc/self/task")
# Not held: a fork that joins a world of its own would free the groups of this one, and wait for threads it lacks.
_joined_here: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def as_timedelta(timeout: timedelta | float) -> timedelta:
    """A timeout given in seconds, or as a timedelta.

    Raises:
        TypeError, ValueError: it is neither, or not positive.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | int | float):
        raise TypeError(f"timeout={timeout!r} was given; it must be a number of seconds, or a datetime.timedelta")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < 86_400 * 365:
        raise ValueError(f"timeout={timeout!r} was given; it must be more than 0 seconds, and less than a year")
    return timedelta(seconds=seconds)


def longer(timeout: timedelta | None) -> timedelta | None:
    """`timeout`, or :data:`LONG_TIMEOUT` in place of the default one."""
    return LONG_TIMEOUT if timeout == DEFAULT_TIMEOUT else timeout


def default_device() -> torch.device:
    """This process's device: the CUDA device of its local rank where there is one, else the CPU.

    Where a batch system shows each process fewer devices than there are ranks here, often one, they are dealt out among
    those.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)


def join_world(device: torch.device, *, timeout: timedelta | None = None) -> None:
    """Makes sure that a default process group exists.

    An existing group is kept; under torchrun (``RANK`` and ``WORLD_SIZE`` are set) that world is joined; under plain
    ``python`` this process becomes a world of one. At its end the process waits a moment for Gloo's threads, and leaves
    NCCL's groups that were made here.

    Args:
        timeout: how long ranks wait for each other; until a mesh sets it, :func:`longer`. None for torch's own.
    """
    timeout = longer(timeout)
    end_after_threads()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    _warn_of_loopback()
    if device.type == "cuda":
        for name, value in flight_recorder().items():
            os.environ[name] = value
        leave_at_exit()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"timeout": timeout}
    if device.type == "cuda" and opens_at_once():
        options["device_id"] = device
    if under_torchrun() and STORE_FILE in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ[STORE_FILE], size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    elif under_torchrun():
        dist.init_process_group(backend, **options)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    if dist.group.WORLD is not None:
        _joined_here.add(dist.group.WORLD)


def flight_recorder() -> dict[str, str]:
    """The environment variables that make NCCL's watchdog write, before it ends a process whose collective did not end
    in time, which collectives the rank has made. Those that the user has set, by either of their names, are left out.

    They are read when a process makes its first group.
    """
    settings = {
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    return {names[0]: value for names, value in settings.items() if not any(name in os.environ for name in names)}


def _warn_of_loopback() -> None:
    """Says so where other machines could not reach Gloo, which listens at the address of this machine's name."""
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) == world_size()
    if not under_torchrun() or alone or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        address = str(error)
    if address.startswith("127.") or not address[:1].isdecimal():
        logger.warning(
            "the name of this machine, %s, leads to %s, where ranks on other machines cannot reach it over Gloo: set "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface that they share, such as eth0",
            socket.gethostname(),
            address,
        )


@cache
def leave_at_exit() -> None:
    """At the end of this process, ends the groups of a world that was made here: NCCL's may hang or warn otherwise.

    Not after an error, when ranks would wait for each other, and for at most 30 seconds. Once per process.
    """
    atexit.register(_leave)


def _leave() -> None:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or not was_joined_here(world) or getattr(sys, "last_value", None) is not None:
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)


def was_joined_here(group: dist.ProcessGroup) -> bool:
    """Whether `group` is the world, and :func:`join_world` has made it."""
    return group is dist.group.WORLD and group in _joined_here


def world_size() -> int:
    """Number of processes of the world that :func:`join_world` joins, or has joined."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def ranks_here() -> int:
    """How many ranks of the world run on this machine; all of them if the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def under_torchrun() -> bool:
    """Whether a launcher has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class World(Protocol):
    """What code that runs on a rank asks about its world. :func:`world` returns the present one."""

    is_simulated: bool
    """Whether one process stands for a rank of a world that is not there. Its tensors have shapes and no values, and
    nothing outside of them is changed."""

    def known(self, tensor: torch.Tensor, default: Any) -> Any:
        """The numbers in `tensor`, as ``tensor.tolist()``; `default` if nothing is computed."""

    def on_cpu(self, device: torch.device) -> bool:
        """Whether what is on `device` is computed by a CPU. The tensors of a simulated GPU say that they are on one."""


class _RealWorld:
    is_simulated = False

    def known(self, tensor: torch.Tensor, default: Any) -> Any:
        return tensor.tolist()

    def on_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu"


class _SimulatedWorld:
    is_simulated = True

    def known(self, tensor: torch.Tensor, default: Any) -> Any:
        return default

    def on_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" and not simulates_gpu()


_REAL, _SIMULATED = _RealWorld(), _SimulatedWorld()


def world() -> World:
    """The world that this process runs in: a simulated one under a ``FakeTensorMode``, as in an estimate."""
    return _REAL if active_fake_mode() is None else _SIMULATED


@cache
def end_after_threads() -> None:
    """Lets the threads of Gloo finish before the interpreter is finalized, for at most a second. Once per process.

    A thread of Gloo may hold the tensors of a collective for a moment after its caller has gone on. If it lets go of
    them while the interpreter is finalized, the process aborts ("terminate called without an active exception":
    torch's pull request 179291), and a run that was over counts as failed. ``destroy_process_group`` here would wait
    for ranks that have failed.
    """
    atexit.register(wait_for_threads)


def wait_for_threads(patience: float = _PATIENCE_SECONDS) -> None:
    """Waits until no other thread of this process computes, or wants to, for at most `patience` seconds."""
    deadline, quiet = time.monotonic() + patience, 0
    while quiet < _QUIET_PAUSES and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)  # without the interpreter's lock, which a thread needs to free a tensor
        quiet = 0 if _another_runs() else quiet + 1


def _another_runs() -> bool:
    """Whether another thread runs or waits for a core; False where the kernel does not say."""
    own = str(threading.get_native_id())
    try:
        tasks = [task for task in _TASKS.iterdir() if task.name != own]
    except OSError:
        return False
    return any(_state(task) == "R" for task in tasks)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][:1]  # after the name, which may hold anything
    except OSError:  # it has ended
        return ""
