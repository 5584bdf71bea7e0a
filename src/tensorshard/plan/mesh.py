"""The Mesh: where each part of a plan runs. The one place where process groups are made."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tensorshard.comm.groups import world_group
from tensorshard.comm.world import longer, was_joined_here
from tensorshard.plan.plan import AXES, Plan, coordinates
from tensorshard.plan.schedules import find_schedule
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily
from tensorshard.torch_private.process_groups import backend_of_pipeline, forget_meshes, merged_group, set_group_timeout

_GROUPS_SHOWN = 8

_known: dict[DeviceMesh | tuple[Any, ...], DeviceMesh] = {}
_world_of_known: list[dist.ProcessGroup | None] = []
_of_parents: list[Any] = []  # what the processes that this one was forked from had of these


class Mesh:
    """Which process has which place along each axis of a plan, and the process groups. An Engine has one.

    Ranks are numbered with the axes in the order ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, the last one
    innermost. So the ranks of a ``tp`` group are neighbours on one machine, and pipeline stages are the furthest apart.

    Args:
        plan: a resolved plan.
        device_type: of the tensors that are sent, "cpu" or "cuda".
        group: the processes to use; all of the world if None.
        timeout: how long ranks wait for each other in the groups that are made here, and in a world that
            :func:`tensorshard.parallelize` has joined; None for torch's own. In place of the default one, ranks wait
            half an hour until :meth:`end_start`, and in :meth:`waiting_longer`.

    Raises:
        ValueError: the plan's degrees do not multiply to the world size.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 16, 4)
        >>> engine = ts.parallelize(build, ts.Plan(), optimizer=adamw, loss_fn=torch.nn.functional.mse_loss)
        >>> engine.mesh.rank, engine.mesh.dp_rank, engine.mesh.dp_size
        (0, 0, 1)
    """

    def __init__(
        self,
        plan: Plan,
        device_type: str,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self._timeout = timeout
        self._group = group
        self._made: list[dist.ProcessGroup] = []  # whose timeouts are set here
        self._starts = True
        self._members = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world_size = len(self._members)
        self.world_group: dist.ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
        self._plan = plan = plan.resolve(self.world_size)
        self.degrees: dict[str, int] = {axis: getattr(plan, axis) for axis in AXES}
        self.schedule = plan.pp_schedule
        self.stages_per_rank = plan.stages_per_rank
        # Axes of degree 1 need no group, except for dp_shard: ZeRO's tensors always use it.
        self._axes = tuple(axis for axis in AXES if self.degrees[axis] > 1 or axis == "dp_shard")
        shape = tuple(self.degrees[axis] for axis in self._axes)
        with unset_fake_temporarily():
            self.device_mesh = _device_mesh(device_type, self._members, shape, self._axes, group)
        for axis in self._axes:
            self._apply_timeout(self.device_mesh.get_group(axis))
        self._apply_timeout(self.world_group)

    def _apply_timeout(self, made: dist.ProcessGroup) -> None:
        given = made is self.world_group or made is dist.group.WORLD
        if self._timeout is not None and made not in self._made and (not given or was_joined_here(made)):
            self._made.append(made)
            self._set_timeouts([made], long=self._starts)

    def _set_timeouts(self, groups: list[dist.ProcessGroup], *, long: bool) -> None:
        timeout = longer(self._timeout) if long else self._timeout
        for group in groups:
            assert timeout is not None
            set_group_timeout(group, timeout)

    def end_start(self) -> None:
        """Called after each step: from the first one on, ranks wait for each other for `timeout`."""
        if self._starts:
            self._starts = False
            self._set_timeouts(self._made, long=False)

    @contextmanager
    def waiting_longer(self) -> Iterator[None]:
        """Inside, a rank may work for long while the others wait, as one that writes to a slow disk does."""
        self._set_timeouts(self._made, long=True)
        try:
            yield
        finally:
            self._set_timeouts(self._made, long=self._starts)

    def index(self, axis: str) -> int:
        """This rank's place along `axis`."""
        return coordinates(self.rank, self.degrees)[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one only along `axis`.

        Raises:
            ValueError: the axis has degree 1, so there is no other rank.
        """
        if axis not in self._axes:
            raise ValueError(f"the {axis} axis has degree {self.degrees[axis]} and therefore no group")
        return self.along(axis).get_group()

    def groups(self) -> list[dist.ProcessGroup]:
        """All groups of this rank: the world's first, then those of the axes, then those of experts."""
        groups = [self.world_group, *(self.group(axis) for axis in self._axes)]
        return [*groups, *(self.experts.group(axis) for axis in self._axes_of_experts())]

    def group_names(self) -> list[str]:
        """What :meth:`groups` are called, in the same order."""
        names = ["world", *self._axes]
        of_experts = {"cp": "ep", "dp_shard": "dp_shard of experts", "dp_replicate": "dp_replicate of experts"}
        return [*names, *(of_experts[axis] for axis in self._axes_of_experts())]

    def _axes_of_experts(self) -> list[str]:
        """The axes of :attr:`experts` along which groups of it send."""
        return [] if self.experts is self else [axis for axis in self.experts._axes if axis not in ("pp", "tp")]

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The group of the ranks that share the experts of each mixture."""
        return self.experts.group("cp")

    def along(self, *axes: str) -> DeviceMesh:
        """The part of the device mesh that has only `axes`."""
        with unset_fake_temporarily():
            mesh = self.device_mesh[axes]
            return _known.setdefault(mesh, mesh)

    @property
    def stages(self) -> list[int]:
        """The pipeline stages that this rank has, in order. Without a pipeline there is one stage."""
        return find_schedule(self.schedule).stages_of(self.index("pp"), self.degrees["pp"], self.stages_per_rank)

    @property
    def dp_size(self) -> int:
        """Number of data ranks: processes that see different samples."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """This process's place among the data ranks."""
        return self.index("dp_replicate") * self.degrees["dp_shard"] + self.index("dp_shard")

    @cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """The group of the data ranks, over which losses are averaged: dp_replicate x dp_shard."""
        if self.degrees["dp_replicate"] == 1 and self.dp_size < self.world_size:
            return self.group("dp_shard")
        return self.merged("dp", "dp_replicate", "dp_shard")

    @property
    def shard_size(self) -> int:
        """Number of processes over which parameters, gradients and optimizer states are sharded: dp_shard x cp."""
        return self.degrees["dp_shard"] * self.degrees["cp"]

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """The group over which states are sharded: dp_shard x cp."""
        return self.merged("shard", "dp_shard", "cp")

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh over which states are sharded: dp_shard x cp as one dimension."""
        return self.along("dp_shard") if self.degrees["cp"] == 1 else self._mesh_of(dp_shard=self.shard_group)

    @property
    def gradient_ranks(self) -> int:
        """Number of processes over which gradients are averaged: the data ranks x cp."""
        return self.dp_size * self.degrees["cp"]

    @cached_property
    def gradient_group(self) -> dist.ProcessGroup:
        """The group over which gradients are averaged: dp_replicate x dp_shard x cp."""
        return self.dp_group if self.degrees["cp"] == 1 else self.merged("gradients", "dp_replicate", "dp_shard", "cp")

    @cached_property
    def experts(self) -> "Mesh":
        """The mesh as the parameters of experts see it; this mesh itself without expert parallelism.

        The first call makes the groups: a collective of the mesh.
        """
        plan = self._plan
        if plan.ep == 1:
            return self
        seen = replace(
            plan, dp_shard=plan.dp_shard * plan.cp // plan.ep, cp=plan.ep, ep=1, compile=False, logits=Plan().logits
        )
        made = _ExpertMesh(seen, self.device_mesh.device_type, self._group, timeout=self._timeout)
        self._made += [group for group in made._made if group not in self._made]
        made._made = self._made  # groups that are made later get their timeouts with all others
        return made

    def _mesh_of(self, **groups: dist.ProcessGroup) -> DeviceMesh:
        """The mesh with these groups as its dimensions, by their names."""
        with unset_fake_temporarily():
            ranks = torch.zeros((), dtype=torch.int64)  # relative to this one
            for group in groups.values():
                ranks = ranks[..., None] + torch.tensor(dist.get_process_group_ranks(group)) - dist.get_rank()
            made = DeviceMesh.from_group(
                list(groups.values()),
                self.device_mesh.device_type,
                mesh=ranks + dist.get_rank(),
                mesh_dim_names=tuple(groups),
            )
            return _known.setdefault(made, made)

    def merged(self, name: str, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one only along `axes`, in the order of the ranks.

        The first call with these axes makes it: a collective of the mesh.

        Args:
            name: of the group.
            axes: in the order of the mesh.
        """
        shared = [axis for axis in axes if self.degrees[axis] > 1]
        if math.prod(self.degrees[axis] for axis in shared) == self.world_size:
            return self.world_group
        if len(shared) < 2:
            return self.group(shared[0] if shared else "dp_shard")
        with unset_fake_temporarily():
            made = merged_group(self.along(*shared), name)
        self._apply_timeout(made)
        return made

    def describe(self) -> str:
        """One line for each axis: its degree, this rank's index, its group's ranks. Then every rank's groups."""
        lines = [f"rank {self._members[self.rank]} of {dist.get_world_size()}"]
        for axis in AXES:
            members = self._numbers(group_ranks(self.rank, axis, self.degrees))
            lines.append(f"{axis:<13} degree {self.degrees[axis]:<4} index {self.index(axis):<4} ranks {members}")
        if self.degrees["pp"] > 1:
            lines += self._describe_stages()
        if self._plan.ep > 1:
            ranks = self._numbers(group_ranks(self.rank, "cp", self.experts.degrees))
            lines.append(f"experts are split over {self._plan.ep} ranks of {self._plan.expert_axes}: {ranks}")
        for axis in AXES:
            if self.degrees[axis] > 1:
                lines.append(f"all groups along {axis}: {self._all_groups(axis)}")
        return "\n".join(lines)

    def _describe_stages(self) -> list[str]:
        schedule, ranks = find_schedule(self.schedule), self.degrees["pp"]
        shown = [
            f"{index}: {', '.join(map(str, schedule.stages_of(index, ranks, self.stages_per_rank)))}"
            for index in range(min(ranks, _GROUPS_SHOWN))
        ]
        if ranks > _GROUPS_SHOWN:
            shown.append("...")
        mine = ", ".join(map(str, self.stages))
        count = ranks * self.stages_per_rank
        return [f"stages of this rank: {mine} of {count} ({self.schedule})", f"stages by pp index: {' | '.join(shown)}"]

    def _all_groups(self, axis: str) -> str:
        groups = {tuple(group_ranks(rank, axis, self.degrees)): None for rank in range(self.world_size)}
        shown = [self._numbers(list(group)) for group in groups]
        if len(shown) > _GROUPS_SHOWN:
            shown = [*shown[: _GROUPS_SHOWN - 1], f"... {len(shown)} in all"]
        return " | ".join(shown)

    def _numbers(self, ranks: list[int]) -> str:
        return _ranges([self._members[rank] for rank in ranks])


class _ExpertMesh(Mesh):
    """A mesh in which ``dp_shard`` has the ranks that hold the same experts.

    The ranks that share experts are its ``cp``, which lies between ``dp_shard`` and ``tp``. They have different
    samples, and hold different parameters.
    """

    @property
    def shard_size(self) -> int:
        return self.degrees["dp_shard"]

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        return self.group("dp_shard")

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        return self.along("dp_shard")

    @property
    def gradient_ranks(self) -> int:
        return self.dp_size

    @cached_property
    def gradient_group(self) -> dist.ProcessGroup:
        return self.dp_group


def _device_mesh(
    device_type: str, members: list[int], shape: tuple[int, ...], axes: tuple[str, ...], group: dist.ProcessGroup | None
) -> DeviceMesh:
    """The mesh of these ranks. All Engines of one world that have them along the same axes share it and its groups.

    To torch, meshes of the same ranks are equal. Its caches give a DTensor any one of those that are equal, on each
    rank another one. If they had different groups, ranks would wait for each other in different groups.
    """
    if _world_of_known != [dist.group.WORLD]:
        if _known:
            forget_meshes()
        _known.clear()
        _world_of_known[:] = [dist.group.WORLD]
    key = (device_type, *members, shape, axes)
    made = _known.get(key)
    if made is not None:
        try:
            made.get_all_groups()
            return made
        except (RuntimeError, ValueError):  # its groups were destroyed, and a new one is in its place
            forget_meshes()
            _known.clear()
    if group is not None and shape == (len(members),):
        made = DeviceMesh.from_group(group, device_type, mesh_dim_names=axes)
    else:
        # Only the group of a pipeline's ranks.
        lazily = backend_of_pipeline(group or world_group()) if "pp" in axes else None
        backends = None if lazily is None else tuple((lazily if axis == "pp" else None, None) for axis in axes)
        ranks = torch.tensor(members, device="cpu").view(shape)
        made = DeviceMesh(device_type, ranks, mesh_dim_names=axes, backend_override=backends)
    _known[key] = made
    return made


def _keep_in_fork() -> None:
    """Freed groups would wait for threads, which a fork does not have."""
    _of_parents.append((dict(_known), list(_world_of_known)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_fork)


def _ranges(ranks: list[int]) -> str:
    """A short text for evenly spaced ranks: all of them if few, else the ends and the step."""
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]} (every {step})" if step > 1 else f"{ranks[0]}-{ranks[-1]}"


def group_ranks(rank: int, axis: str, degrees: dict[str, int]) -> list[int]:
    """The ranks that differ from `rank` only along `axis`, itself included."""
    stride = math.prod(degrees[inner] for inner in AXES[AXES.index(axis) + 1 :])
    first = rank - coordinates(rank, degrees)[axis] * stride
    return [first + i * stride for i in range(degrees[axis])]
