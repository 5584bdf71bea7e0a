"""One step of a pipeline: all micro-batches through this rank's stages, as a schedule orders them.

Also here: torch.distributed.pipelining's schedules: building one, and the actions of each rank in order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.pipeline.run.torch_stage import ScheduledStage, StageHooks
from tensorshard.plan.schedules import check_schedule, find_schedule
from tensorshard.torch_private.pipelining import without_messages
from tensorshard.torch_private.process_groups import is_nccl

# By torch's names. All other entries of its lists send or reduce tensors.
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class PipelineRunner:
    """Runs a rank's stages together with those of the other ranks of `group`.

    Args:
        stages: this rank's, in order: those that ``find_schedule(schedule).stages_of(...)`` says.
        schedule: its name.
        group: the ranks of the pipeline; None for the world.
        device: of this rank.
        context: makes the context of each forward, such as ``torch.autocast``.
        hooks: called before and after backwards.
        split: whether gradients of inputs and of parameters may be computed separately, if the schedule does so.

    Raises:
        ValueError: the stages are not those that the schedule gives this rank.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        schedule: str,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        hooks: StageHooks | None = None,
        split: bool = True,
    ) -> None:
        self.schedule = schedule
        self.stages = list(stages)
        self._group = group
        self._device = device or torch.device("cpu")
        self._ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        count = stages[0].cut.stages
        check_schedule(schedule, ranks=self._ranks, stages_per_rank=count // self._ranks, micro_batches=None)
        expected = find_schedule(schedule).stages_of(rank, self._ranks, count // self._ranks)
        if [stage.index for stage in stages] != expected or count % self._ranks:
            raise ValueError(
                f"rank {rank} of {self._ranks} has the stages {[stage.index for stage in stages]} of {count}; the "
                f"{schedule} schedule gives it {expected}"
            )
        self._scheduled = [
            ScheduledStage(
                stage,
                group=group,
                device=self._device,
                context=context,
                hooks=hooks or StageHooks(),
                split=split,
                sends=schedule != "1f1b",
            )
            for stage in stages
        ]
        self._made: dict[int, Any] = {}
        self._consume: Callable[[int, Callable[[], Any]], torch.Tensor] | None = None

    def step(
        self, micro_batches: Sequence[Any], loss: Callable[[int, Any], torch.Tensor], *, hand_over: bool = False
    ) -> None:
        """Forward and backward of all `micro_batches`. A collective of the pipeline's ranks.

        Args:
            micro_batches: the model's inputs, the same on every rank of the pipeline, on its device. Shapes may differ
                between them.
            loss: called as ``loss(index, output)`` on the last stage's rank after each micro-batch's forward. It
                returns the scalar from which the micro-batch's backward starts, scaled as the gradients should be. It
                keeps the sums and counts of losses itself.
            hand_over: whether `loss` gets a function in place of the output, which returns the output once. Then
                nothing else holds the output.

        Raises:
            ValueError: the schedule does not work with that many micro-batches.
        """
        self._drive(
            micro_batches,
            loss if hand_over else lambda index, output: loss(index, output()),
            lambda schedule, target: schedule.step(target=target, return_outputs=False),
        )

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[Any], consume: Callable[[int, Any], None], *, hand_over: bool = False
    ) -> None:
        """Forward alone. A collective of the pipeline's ranks.

        Args:
            micro_batches: as for :meth:`step`.
            consume: called as ``consume(index, output)`` on the last stage's rank.
            hand_over: as for :meth:`step`.

        Raises:
            ValueError: as for :meth:`step`.
        """

        def done(index: int, output: Callable[[], Any]) -> torch.Tensor:
            consume(index, output if hand_over else output())
            return torch.zeros((), device=self._device)

        self._drive(micro_batches, done, lambda schedule, target: schedule.eval(target=target, return_outputs=False))

    def forget_latest(self) -> None:
        """Called after a step whose loss has failed, on all ranks."""
        for stage in self._scheduled:
            stage.forget_latest()

    def _drive(
        self,
        micro_batches: Sequence[Any],
        consume: Callable[[int, Callable[[], Any]], torch.Tensor],
        run: Callable[[Any, torch.Tensor], Any],
    ) -> None:
        count = len(micro_batches)
        schedule = self._schedule(count)
        self._consume = consume
        for stage in self._scheduled:
            stage.begin(micro_batches)
        try:
            # The schedule cuts its target into one number for each micro-batch. It never sees the inputs.
            run(schedule, torch.arange(count))
            for stage in self._scheduled:
                stage.finish_sends()
        except BaseException:
            self._made.pop(count, None)  # its state may wait for messages that never came
            raise
        finally:
            self._consume = None
            for stage in self._scheduled:
                stage.begin(())

    def _schedule(self, count: int) -> Any:
        if count not in self._made:
            check_schedule(self.schedule, ranks=self._ranks, stages_per_rank=len(self.stages), micro_batches=count)
            self._made[count] = build(self.schedule, self._scheduled, count, self._loss)
        return self._made[count]

    def _loss(self, output: tuple[int, list[Any]], target: torch.Tensor) -> torch.Tensor:
        assert self._consume is not None
        try:
            return self._consume(output[0], output[1].pop)
        except Exception as error:
            error.add_note(f"in the loss of micro-batch {output[0]} (pipeline rank {dist.get_rank(self._group)})")
            raise


def connect(group: dist.ProcessGroup, rank_of: Sequence[int], device: torch.device) -> None:
    """Opens the connections of a pipeline's ranks. A collective of theirs.

    NCCL has one for batches of messages, and for each pair of ranks one for messages outside of batches. A first call
    holds up its rank until the others make it, so it should not be one of a step, where others may wait for this rank.

    Args:
        rank_of: for each stage, its rank in `group`.
    """
    if not is_nccl(group, device):
        return
    message, mine = torch.zeros(1, device=device), group.rank()
    dist.all_reduce(message, group=group)
    for first, second in sorted({(min(pair), max(pair)) for pair in pairwise(rank_of)}):
        if first == second or mine not in (first, second):
            continue
        started = (
            dist.isend(message, group=group, group_dst=second)
            if mine == first
            else dist.irecv(message, group=group, group_src=first)
        )
        if started is not None:
            started.wait()


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
    with without_messages():
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
