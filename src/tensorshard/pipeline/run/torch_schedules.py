"""torch.distributed.pipelining's schedules: building one, and the actions of each rank in order."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tensorshard.plan.schedules import check_schedule, find_schedule

# By torch's names. All other entries of its lists send or reduce tensors.
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


@dataclass(frozen=True)
class Action:
    """One step of a rank's work in a schedule.

    Args:
        kind: "F": forward; "B": backward; "I": backward of the inputs alone; "W": backward of the parameters.
        stage: the stage's index.
        micro_batch: the micro-batch's index.
    """

    kind: str
    stage: int
    micro_batch: int


def actions(name: str, *, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does, in order, as torch's schedule has it. No process group is needed.

    Raises:
        ValueError: as for :func:`check_schedule`.
    """
    check_schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    if name == "1f1b":  # torch's own list for it numbers the last rank's micro-batches from 1, but runs this one
        return [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    from torch import nn

    schedule = find_schedule(name)
    stages: Any = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank, stage_index=index, group_size=ranks, group_rank=0, submod=nn.Module(),
            is_first=index == 0, is_last=index == ranks * stages_per_rank - 1, has_backward=True,
        )
        for index in schedule.stages_of(0, ranks, stages_per_rank)
    ]  # fmt: skip
    made = build(name, stages, micro_batches, loss=lambda output, target: output)
    return [[action for entry in made.pipeline_order[rank] for action in _actions(entry)] for rank in range(ranks)]


def build(name: str, stages: list[Any], micro_batches: int, loss: Callable[[Any, Any], Any]) -> Any:
    """Torch's schedule over a rank's `stages`; gradients are not scaled by it."""
    schedule = find_schedule(name)
    return schedule.torch_class()(
        stages[0] if schedule.single else stages, n_microbatches=micro_batches, loss_fn=loss, scale_grads=False
    )


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(micro_batches, ranks - rank)
    order = [Action("F", rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        order.append(Action("B", rank, index))
        if index + ahead < micro_batches:
            order.append(Action("F", rank, index + ahead))
    return order


def _actions(entry: Any) -> list[Action]:
    if entry is None:
        return []
    if entry.sub_actions:  # a forward and a backward that may overlap
        return [action for inner in entry.sub_actions for action in _actions(inner)]
    kind = _KINDS.get(entry.computation_type.name)
    return [] if kind is None else [Action(kind, entry.stage_index, entry.microbatch_index)]
