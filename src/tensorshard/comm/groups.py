"""The model-parallel groups of the process, and the data-parallel groups across them.

Consecutive ranks form a model-parallel group; the ranks at the same place of each of them form a
data-parallel group. With 4 processes and groups of 2: model-parallel {0, 1} and {2, 3}, data-parallel {0, 2}
and {1, 3}.

Also here: the check, before each collective, that all ranks of a group are about to call the same one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tensorshard.comm.world import default_device, join_world

_MESSAGE_BYTES = 256
Group = dist.ProcessGroup | DeviceMesh
"""What is taken as ``group``: a process group, or a one-dimensional mesh such as ``mesh["tp"]``."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group called different collectives, or one of them did not call any."""


class CollectiveMonitor:
    """Compares what the ranks of a group are about to call, over a Gloo group of its own.

    Args:
        side_group: the same ranks as the group that is watched; used for nothing else.
        ranks: their numbers in the world, for messages.
        timeout: of `side_group`, for messages.
    """

    def __init__(self, side_group: dist.ProcessGroup, ranks: list[int], timeout: timedelta | None) -> None:
        self._side_group = side_group
        self._ranks = ranks
        self._timeout = timeout
        self._calls = 0

    def close(self) -> None:
        """Frees the side group."""
        dist.destroy_process_group(self._side_group)

    def check(self, call: str) -> None:
        """Waits until every rank is about to make its next call, and compares the calls.

        Raises:
            CollectiveMismatchError: the calls differ, or a rank did not come within the timeout.
        """
        self._calls += 1
        text = call.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in self._ranks]
        try:
            dist.all_gather(everyone, mine, group=self._side_group)
        except RuntimeError as error:
            patience = f" within {self._timeout.total_seconds():.0f} s" if self._timeout else ""
            raise CollectiveMismatchError(
                f"not all of the ranks {self._ranks} reached collective number {self._calls} of their "
                f"group{patience}; rank {dist.get_rank()} was about to call {call}. A rank has failed, has "
                "left the loop early, or took a branch without this call."
            ) from error
        calls = [bytes(part.tolist()).decode().rstrip() for part in everyone]
        if len(set(calls)) > 1:
            listing = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self._ranks, calls, strict=True))
            raise CollectiveMismatchError(
                f"the ranks of a group called different collectives as their number {self._calls}: "
                f"{listing}. Every rank of a group must make the same calls, of the same sizes, in the same "
                "order."
            )


@dataclass(frozen=True)
class ParallelGroups:
    """What :func:`init_process_group` made.

    Args:
        world: the default group at the time; when it is gone, so are these.
        mesh: the ranks, with axes "dp" and "tp".
        model_mesh: this rank's model-parallel group, the axis "tp" of `mesh`.
        settings: the arguments of the call.
        monitor: compares the ranks' calls; None without ``check_collectives``.
        uninstall: undoes what `install` did.
    """

    world: dist.ProcessGroup
    mesh: DeviceMesh
    model_mesh: DeviceMesh
    settings: tuple[object, ...]
    monitor: CollectiveMonitor | None
    uninstall: Callable[[], None]


class _Session:
    """Holds the groups of this process."""

    def __init__(self) -> None:
        self._groups: ParallelGroups | None = None

    def set(self, groups: ParallelGroups | None) -> None:
        former, self._groups = self._groups, groups
        if former is not None:
            former.uninstall()

    def get(self) -> ParallelGroups | None:
        if not dist.is_initialized():
            self.set(None)  # torch's own destroy_process_group has ended them
        groups = self._groups
        return None if groups is None or dist.group.WORLD is not groups.world else groups

    def require(self) -> ParallelGroups:
        groups = self.get()
        if groups is None:
            raise RuntimeError(
                "no model-parallel group exists yet: call "
                "tensorshard.distributed.init_process_group(group_size) first, or pass group="
            )
        return groups


_session = _Session()


def init_process_group(
    group_size: int | None = None,
    *,
    device_type: str | None = None,
    timeout: timedelta | None = None,
    check_collectives: bool = False,
    install: Callable[[Callable[[], bool]], Callable[[], None]] | None = None,
) -> None:
    """Makes the model-parallel groups, and the data-parallel groups across them. Every process calls it.

    Args:
        group_size, device_type, timeout, check_collectives: see :func:`tensorshard.distributed.init_process_group`.
        install: called once, with a function that says whether the groups still exist; returns a function that undoes
            what it did, which is called when they are destroyed.
    """
    if not dist.is_initialized():
        join_world(default_device())
    world_size = dist.get_world_size()
    group_size = world_size if group_size is None else group_size
    if not isinstance(group_size, int) or isinstance(group_size, bool):
        raise TypeError(f"group_size={group_size!r} was given: it is a number of ranks, or None for all {world_size}")
    if group_size < 1 or world_size % group_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"group_size={group_size} does not divide the world of {world_size} processes: use one of "
            f"{', '.join(map(str, divisors))}"
        )
    device_type = device_type or ("cuda" if "nccl" in str(dist.get_backend_config()) else "cpu")
    settings = (group_size, device_type, timeout, check_collectives)
    existing = _session.get()
    if existing is not None:
        if existing.settings != settings:
            raise RuntimeError(
                f"model-parallel groups of {existing.model_mesh.size()} exist already and were asked for "
                f"again with group_size={group_size}, device_type={device_type!r}, timeout={timeout}, "
                f"check_collectives={check_collectives}: call "
                "tensorshard.distributed.destroy_process_group() first"
            )
        return
    ranks = torch.arange(world_size, device="cpu").view(-1, group_size)
    groups = [_own_group(ranks.t(), timeout), _own_group(ranks, timeout)]
    mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("dp", "tp"))
    monitor = None
    if check_collectives:
        side_group = _own_group(ranks, timeout, "gloo")
        monitor = CollectiveMonitor(side_group, ranks[dist.get_rank() // group_size].tolist(), timeout)
    _session.set(None)  # those of an earlier world
    uninstall = install(is_initialized) if install else lambda: None
    _session.set(ParallelGroups(world_group(), mesh, mesh["tp"], settings, monitor, uninstall))


def _own_group(ranks: torch.Tensor, timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """Makes one group per row of `ranks`; returns this rank's. One row of all ranks is the world, which exists."""
    if len(ranks) == 1 and backend is None:
        return world_group()
    groups = [dist.new_group(row, timeout=timeout, backend=backend) for row in ranks.tolist()]
    return next(group for row, group in zip(ranks.tolist(), groups, strict=True) if dist.get_rank() in row)


def world_group() -> dist.ProcessGroup:
    """The default group, of all processes."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has no default group: call torch.distributed.init_process_group first")
    return world


def is_initialized() -> bool:
    """Whether :func:`tensorshard.distributed.init_process_group` was called, and its groups still exist.

    Examples:
        >>> ts.distributed.is_initialized()
        False
    """
    return _session.get() is not None


def destroy_process_group() -> None:
    """Frees the model-parallel and data-parallel groups. torch's default group stays.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> ts.distributed.destroy_process_group()
        >>> ts.distributed.is_initialized()
        False
    """
    groups = _session.get()
    _session.set(None)
    if groups is None:
        return
    if groups.monitor is not None:
        groups.monitor.close()
    for axis in ("dp", "tp"):
        group = groups.mesh.get_group(axis)
        if group is not groups.world:
            dist.destroy_process_group(group)


def get_mesh() -> DeviceMesh:
    """All ranks, as a mesh with axes "dp" and "tp", for ``fully_shard`` and ``distribute_tensor``.

    Raises:
        RuntimeError: there are no model-parallel groups.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.get_mesh()["dp"].size(), ts.distributed.get_mesh()["tp"].size()
        (1, 2)
    """
    return _session.require().mesh


def get_group() -> dist.ProcessGroup:
    """This rank's model-parallel group.

    Raises:
        RuntimeError: there are no model-parallel groups.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> torch.distributed.get_process_group_ranks(ts.distributed.get_group())
        [0, 1]
    """
    return _session.require().model_mesh.get_group()


def get_rank(group: Group | None = None) -> int:
    """This rank's number in its model-parallel group, or in `group`, counted from 0.

    Raises:
        RuntimeError: there are no model-parallel groups, and no `group` was given.

    Examples:
        >>> ts.distributed.init_process_group()
        >>> ts.distributed.get_rank()
        0
    """
    return resolve_group(group).rank()


def get_group_size(group: Group | None = None) -> int:
    """Number of ranks in the model-parallel group, or in `group`.

    Raises:
        RuntimeError: there are no model-parallel groups, and no `group` was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.get_group_size()
        2
    """
    return resolve_group(group).size()


def get_world_size() -> int:
    """Number of processes in the world: the size of a model-parallel group times the number of these groups.

    Raises:
        RuntimeError: there are no model-parallel groups.

    Examples:
        >>> ts.distributed.init_process_group(group_size=1)  # on two ranks
        >>> ts.distributed.get_world_size()
        2
    """
    return _session.require().world.size()


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks with this rank's number in all model-parallel groups. They hold the same shards.

    Raises:
        RuntimeError: there are no model-parallel groups.

    Examples:
        >>> ts.distributed.init_process_group(group_size=1)  # on two ranks
        >>> torch.distributed.get_process_group_ranks(ts.distributed.get_data_parallel_group())
        [0, 1]
    """
    return _session.require().mesh.get_group("dp")


def get_data_parallel_rank() -> int:
    """Number of the model-parallel group that this rank is in, counted from 0.

    Raises:
        RuntimeError: there are no model-parallel groups.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> ts.distributed.get_data_parallel_rank()
        0
    """
    return get_data_parallel_group().rank()


def get_data_parallel_size() -> int:
    """Number of model-parallel groups.

    Raises:
        RuntimeError: there are none.

    Examples:
        >>> ts.distributed.init_process_group(group_size=1)  # on two ranks
        >>> ts.distributed.get_data_parallel_size()
        2
    """
    return get_data_parallel_group().size()


def resolve_group(group: Group | None) -> dist.ProcessGroup:
    """The process group meant by a ``group`` argument; None means the model-parallel group.

    Raises:
        RuntimeError: None was given and there is no model-parallel group.
        ValueError: a mesh of several dimensions, or a group that this rank is not in.
        TypeError: neither a process group nor a mesh.
    """
    if group is None:
        return get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group= is one that rank {dist.get_rank()} is not in: call this only on the ranks of a group")
    if not isinstance(group, DeviceMesh):
        raise TypeError(
            f"group={group!r} was given: pass a torch.distributed process group or a mesh such as mesh['tp']"
        )
    if group.ndim != 1:
        raise ValueError(f"group={group} has {group.ndim} dimensions: pass one of them, such as mesh['tp']")
    return group.get_group()


def resolve_mesh(group: Group | None) -> DeviceMesh:
    """The one-dimensional mesh on which a layer with this ``group`` argument holds its parameters.

    Raises:
        RuntimeError: None was given and there is no model-parallel group.
        ValueError: a mesh of several dimensions, or a group that this rank is not in.
        TypeError: neither a process group nor a mesh.
    """
    if group is None:
        return _session.require().model_mesh
    process_group = resolve_group(group)
    if isinstance(group, DeviceMesh):
        return group
    groups = _session.get()
    if groups is not None and process_group is groups.model_mesh.get_group():
        return groups.model_mesh
    device_type = "cuda" if "nccl" in str(dist.get_backend_config(process_group)) else "cpu"
    return DeviceMesh.from_group(process_group, device_type, mesh_dim_names=("tp",))


def find_monitor(group: dist.ProcessGroup) -> CollectiveMonitor | None:
    """The monitor that compares the ranks' calls over `group`; None without ``check_collectives``."""
    groups = _session.get()
    if groups is None or groups.monitor is None or group is not groups.model_mesh.get_group():
        return None
    return groups.monitor
