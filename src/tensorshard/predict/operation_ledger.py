"""A ledger of operations: what a step computes and what it sends, on real tensors or on fake ones."""

from collections import Counter
from collections.abc import Callable
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
from tensorshard.predict.operations import BACKWARD, FORWARD, UPDATE, Kernel, Operations, Transfer
from tensorshard.predict.operator_costs import cost_of
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import KnownResult
from tensorshard.torch_private.operators import schema
from tensorshard.torch_private.process_groups import group_of_argument
from tensorshard.torch_private.pytree import tree_leaves

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

# Axis and collective of what FSDP sends for parameters and gradients.
_OF_FSDP = {
    *((axis, collective) for axis in ("dp_shard", "shard") for collective in ("all_gather", "reduce_scatter")),
    ("dp_replicate", "all_reduce"),
}


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
        found = Operations(Counter(self._counts.kernels))
        for (transfer, group), count in self._counts.transfers.items():
            if transfer.ranks > 1:
                axis = axes[group]
                if transfer.collective == "all_to_all" and dist.get_process_group_ranks(self._groups[group]) == sharing:
                    found.transfers[replace(transfer, axis="ep", overlaps=False)] += count  # experts wait for tokens
                    continue
                if axis == "cp" and (transfer.part_of or transfer.collective) != "all_to_all":
                    axis = "shard"  # with one data rank, parameters and gradients travel along cp alone
                hidden = transfer.overlaps or (plan.zero == 3 and _is_of_fsdp(transfer, axis))
                found.transfers[replace(transfer, axis=axis, overlaps=hidden)] += count
        return found

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
            kernel = Kernel(section, name, cost.dtype, cost.flops, cost.nbytes)
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
        group = next((found for found in map(group_of_argument, arguments) if found is not None), None)
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


def _is_of_fsdp(transfer: Transfer, axis: str) -> bool:
    """Whether FSDP makes a transfer for parameters or gradients. These run on streams of their own, while the model
    computes; others along the same axis, such as those of a batch normalization, are the model's own."""
    return (axis, transfer.part_of or transfer.collective) in _OF_FSDP


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
