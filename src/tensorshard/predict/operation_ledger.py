"""A ledger of operations: what a step computes and what it sends, on real tensors or on fake ones.

Also here: what a rank's step consists of: kernels and transfers with their counts, on any hardware.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import collective_under_way
from tensorshard.comm.sharding import to_local
from tensorshard.common.sampled_loops import SampledLoop
from tensorshard.plan.mesh import Mesh, group_ranks
from tensorshard.plan.plan import AXES, Plan
from tensorshard.predict.operator_costs import cost_of
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import KnownResult
from tensorshard.torch_private.operators import schema
from tensorshard.torch_private.process_groups import group_of_argument
from tensorshard.torch_private.pytree import tree_leaves

FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
SECTIONS = (FORWARD, BACKWARD, UPDATE)
# By the operator's name, without "c10d::" and underscores: the collective, and which argument is the full tensor.
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_base": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "send": ("send", 0),
    "recv": ("receive", 0),
}
# Functional collectives, which return a new tensor.
_FUNCTIONAL: dict[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Kernel:
    """Calls of one operator that do the same work.

    Args:
        section: of the step: "forward", "backward" (with what is recomputed there) or "update".
        name: the operator's name, such as "aten.mm".
        dtype: the type that it computes in, such as "bfloat16".
        flops: floating-point operations of one call; a multiplication and an addition count as two. 0 for operators
            that are bound by memory.
        nbytes: bytes that one call reads and writes.
        repeated: whether it belongs to a forward that is computed again in backward.
    """

    section: str
    name: str
    dtype: str
    flops: int
    nbytes: int
    repeated: bool = False


@dataclass(frozen=True)
class Transfer:
    """Collectives, sends or receives of one size.

    Args:
        section: of the step, as for :class:`Kernel`.
        axis: the axis of the mesh along which the group lies; "dp" for both data axes at once, "shard" for dp_shard and
            cp, over which parameters are sharded, "gradients" for the data axes and cp, "ep" for the ranks that share
            experts, "experts" for those that hold the same ones, "world" for all ranks.
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send" or
            "receive".
        nbytes: bytes of the full tensor: the one that is gathered, or the one that is reduced.
        ranks: the number of ranks in the group.
        overlaps: whether the Engine goes on computing while the transfer is under way.
        part_of: the collective that a send or a receive belongs to; "" if it belongs to none.
    """

    section: str
    axis: str
    collective: str
    nbytes: int
    ranks: int
    overlaps: bool = False
    part_of: str = ""

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, by the algorithms that send the fewest (rings)."""
        n = self.ranks
        if self.collective == "all_reduce":
            return 2 * self.nbytes * (n - 1) / n
        if self.collective in ("all_gather", "reduce_scatter", "all_to_all"):
            return self.nbytes * (n - 1) / n
        return 0.0 if self.collective == "receive" else float(self.nbytes)


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective moves along one axis in a step of one rank.

    Args:
        nbytes: bytes of the full tensors. count: the number of calls. ranks: the number of ranks in the group.
        sent: bytes that the rank itself sends.
    """

    nbytes: int
    count: int
    ranks: int
    sent: float


@dataclass
class Operations:
    """The operations of one rank's step.

    Attributes:
        kernels, transfers: how often each occurs.
    """

    kernels: Counter[Kernel] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    def flops_by_type(self) -> Counter[str]:
        """:attr:`flops` by the type that they are computed in, without what recomputation computes again."""
        by_type: Counter[str] = Counter()
        for kernel, count in self.kernels.items():
            by_type[kernel.dtype] += 0 if kernel.repeated else kernel.flops * count
        return by_type

    @property
    def memory_traffic(self) -> int:
        """Bytes that kernels read and write, if nothing stays in caches."""
        return sum(kernel.nbytes * count for kernel, count in self.kernels.items())

    def traffic(self) -> dict[str, dict[str, Traffic]]:
        """What is moved, by axis and collective. Groups of one rank move nothing, and are left out."""
        traffic: dict[str, dict[str, Traffic]] = {}
        for transfer, count in self.transfers.items():
            of_axis = traffic.setdefault(transfer.axis, {})
            before = of_axis.get(transfer.collective, Traffic(0, 0, transfer.ranks, 0.0))
            of_axis[transfer.collective] = Traffic(
                before.nbytes + transfer.nbytes * count,
                before.count + count,
                transfer.ranks,
                before.sent + transfer.sent * count,
            )
        return traffic

    def of(self, section: str) -> Iterator[tuple[Kernel, int]]:
        """The kernels of a section, with their counts."""
        return ((kernel, count) for kernel, count in self.kernels.items() if kernel.section == section)


@dataclass
class Counts:
    """Kernels and transfers with their counts. A transfer has the name of its group beside it, and no axis yet."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    transfers: Counter[tuple[Transfer, str]] = field(default_factory=Counter)


class OperationLedger(TorchDispatchMode):
    """Counts kernels and transfers while it records.

    :meth:`note` counts one call. As a dispatch mode the ledger sees calls itself. For an operation on DTensors it
    counts the operations on their shards.

    Attributes:
        recording: whether what runs now counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self._phase: Callable[[], str] = lambda: FORWARD
        self._counts = Counts()
        # What ran since the last backward. It is a forward if another backward follows, and else part of the update.
        self._after_backward = Counts()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self.loop = SampledLoop()

    def begin_step(self, phase: Callable[[], str]) -> None:
        """Begins a step. What was counted before is dropped.

        Args:
            phase: returns what is going on: "forward", "backward" or "update".
        """
        self._phase = phase
        self._counts, self._after_backward = Counts(), Counts()
        self.recording = True

    def end_step(self) -> None:
        """Ends the step."""
        self.recording = False
        self._take_rest(UPDATE)

    @property
    def kernel_count(self) -> int:
        """How many kernels were counted."""
        return self._counts.kernels.total()

    def operations(self, mesh: Mesh, plan: Plan) -> Operations:
        """What was counted, with each group named by its axis of `mesh`."""
        axes = {name: axis_of(dist.get_process_group_ranks(group), mesh) for name, group in self._groups.items()}
        sharing = dist.get_process_group_ranks(mesh.expert_group) if plan.ep > 1 else []
        operations = Operations(Counter(self._counts.kernels))
        for (transfer, group), count in self._counts.transfers.items():
            if transfer.ranks > 1:
                axis = axes[group]
                if transfer.collective == "all_to_all" and dist.get_process_group_ranks(self._groups[group]) == sharing:
                    # Experts wait for tokens.
                    operations.transfers[replace(transfer, axis="ep", overlaps=False)] += count
                    continue
                if axis == "cp" and (transfer.part_of or transfer.collective) != "all_to_all":
                    axis = "shard"  # with one data rank, parameters and gradients travel along cp alone
                operations.transfers[replace(transfer, axis=axis)] += count
        return operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on its shards, which come here
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.recording:
            self.note(func, args, kwargs, output)
        return output

    def note(self, func: Any, args: Any, kwargs: Any, output: Any, known: KnownResult | None = None) -> None:
        """Counts a call of the operator `func`.

        Args:
            known: where the call's cost is kept for later calls like it.
        """
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_transfer(func, args, kwargs, output)
            return
        if known is None:
            cost = cost_of(func, args, kwargs, output)
        elif "cost" in known.notes:
            cost = known.notes["cost"]
        else:
            cost = known.notes["cost"] = cost_of(func, args, kwargs, output)
        if cost is not None:
            section = self._entered(self._phase())
            name = str(func.overloadpacket)
            # A backward computes without grad mode; a forward that runs again in it has grad mode on.
            repeated = section == BACKWARD and torch.is_grad_enabled()
            kernel = Kernel(section, name, cost.dtype, cost.flops, cost.nbytes, repeated)
            self._now(section).kernels[kernel] += self.loop.times

    def _now(self, section: str) -> Counts:
        """Where an operation of `section` is counted."""
        return self._after_backward if section == FORWARD else self._counts

    def _entered(self, section: str) -> str:
        if section == BACKWARD:
            self._take_rest(FORWARD)
        elif section == UPDATE:
            self._take_rest(UPDATE)
        return section

    def _take_rest(self, section: str) -> None:
        rest, self._after_backward = self._after_backward, Counts()
        for kernel, count in rest.kernels.items():
            self._counts.kernels[replace(kernel, section=section)] += count
        for (transfer, group), count in rest.transfers.items():
            self._counts.transfers[replace(transfer, section=section), group] += count

    def _note_transfer(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = func.overloadpacket.__name__.strip("_")
        arguments = [*args, *kwargs.values()]
        part_of = ""
        if func.namespace == "c10d":
            if name not in _COLLECTIVES:
                return  # barriers, and transfers of Python objects
            collective, place = _COLLECTIVES[name]
            full = args[place]
            if collective in ("send", "receive"):
                part_of, waits = collective_under_way() or ("", False)
            else:
                waits = _is_waited_for(func, args, kwargs)
        elif name in _FUNCTIONAL:
            collective = _FUNCTIONAL[name]
            full = output if collective == "all_gather" else args[0]
            waits = True
        else:
            return
        group = next((group for group in map(group_of_argument, arguments) if group is not None), None)
        if group is None:
            return
        self._groups[group.group_name] = group
        size = sum(to_local(leaf).nbytes for leaf in tree_leaves(full) if isinstance(leaf, torch.Tensor))
        section = self._entered(self._phase())
        transfer = Transfer(section, "", collective, size, group.size(), not waits, part_of)
        self._now(section).transfers[transfer, group.group_name] += self.loop.times


def _is_waited_for(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call returns only when the collective is over."""
    names = [argument.name for argument in schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return not given.get("async_op", given.get("asyncOp", True))


def axis_of(ranks: list[int], mesh: Mesh) -> str:
    """The axis along which a group of this rank lies; "dp" for both data axes, "shard" for dp_shard and cp,
    "gradients" for all three, "experts" for those that hold the same experts, "world" for any other group."""
    for axis in AXES:
        if mesh.degrees[axis] > 1 and ranks == group_ranks(mesh.rank, axis, mesh.degrees):
            return axis
    if mesh.degrees["cp"] > 1 and len(ranks) in (mesh.shard_size, mesh.gradient_ranks):
        step = mesh.degrees["tp"]
        if ranks == list(range(ranks[0], ranks[0] + step * len(ranks), step)):
            return "shard" if len(ranks) == mesh.shard_size else "gradients"
    if len(ranks) == mesh.dp_size < mesh.world_size:
        return "dp"
    holders = mesh.experts
    return "experts" if holders is not mesh and len(ranks) in (holders.shard_size, holders.dp_size) else "world"
