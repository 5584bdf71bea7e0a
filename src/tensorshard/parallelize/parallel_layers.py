"""Models with parallel layers that were built by hand, under a Plan: their groups are its tensor-parallel ranks.

Such layers call their collectives themselves. So nothing is searched for, and no forward is replaced. The Plan only
needs to know how their parameters are split: for ZeRO, the norm of the gradients, and checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from tensorshard.comm.marks import ParallelMark
from tensorshard.layers.parallel_module import layout_of
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.tensor_parallel.table.layouts import Layout, check_can_split
from tensorshard.weights.initial.source import named_tensors


def split_by_hand(model: nn.Module) -> dict[str, ParallelMark]:
    """How parameters and buffers of `model` are split, by their names. Those that are not split are left out."""
    marks = {name: layout_of(tensor) for name, tensor in named_tensors(model)}
    return {name: mark for name, mark in marks.items() if mark is not None and mark.dim is not None}


def check_split_by_hand(model: nn.Module, plan: Plan) -> None:
    """Refuses a model with parallel layers that `plan` cannot take as they are.

    Args:
        plan: a resolved plan of all ranks.

    Raises:
        ValueError: layers over other ranks than the plan's tensor-parallel ones; a plan that would split layers or a
            sequence, or cut a pipeline; a parameter whose full size is not known; a dimension of fewer elements than
            there are ranks.
    """
    for name, mark in split_by_hand(model).items():
        if mark.group is None or mark.size is None or mark.dim is None:
            raise ValueError(
                f"{name!r} is marked as split, but not of what size and over which ranks: register it with size= and "
                f"group="
            )
        first = dist.get_rank() // plan.tp * plan.tp
        ranks = dist.get_process_group_ranks(mark.group)
        expected = list(range(first, first + plan.tp))
        if ranks != expected:
            raise ValueError(
                f"{name!r} is split over the ranks {ranks} already, but this plan's tensor-parallel ranks, with "
                f"tp={plan.tp}, are {expected}: use tp={len(ranks)} where the layers' groups "
                f"are those of tensorshard.distributed.init_process_group({len(ranks)}), or give the model with plain "
                f"layers"
            )
        refused = {"pp": plan.pp > 1, "tp_plan": plan.tp_plan is not None, "sequence_parallel": plan.sequence_parallel}
        for field, given in refused.items():
            if given:
                raise ValueError(
                    f"{name!r} is split by hand, and this plan has {field}={getattr(plan, field)!r}, which needs "
                    f"layers that it splits itself: leave {field} out, or give the model with plain layers"
                )
        check_can_split(_layout(mark), len(ranks), name)


@dataclass(frozen=True)
class _ByHand:
    """The source of a :class:`TensorSplit` that was built by hand."""

    names: tuple[str, ...]

    def describe(self) -> str:
        """A sentence that says what is split."""
        return "split by hand: " + ", ".join(self.names)


def tensor_split_of(marks: Mapping[str, ParallelMark], group: dist.ProcessGroup) -> TensorSplit:
    """The layouts of what is split by hand."""
    layouts = {name: _layout(mark) for name, mark in marks.items()}
    return TensorSplit(layouts, group, _ByHand(tuple(layouts)))


def _layout(mark: ParallelMark) -> Layout:
    assert mark.dim is not None and mark.size is not None  # check_split_by_hand refuses others
    return Layout(mark.dim, (mark.size,))
