"""Forward and backward of batches through a pipeline."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import all_reduce_, on_the_wire
from tensorshard.comm.decisions import decide_once
from tensorshard.comm.world import world
from tensorshard.common.words import with_article
from tensorshard.engine.last_batch import MicroBatch
from tensorshard.engine.loss import LossTally, Objective, check_has_gradient
from tensorshard.engine.step import Read, StepAgain, StepLoss, StepRunner
from tensorshard.model.batches import batch_size, split_unevenly, to_device
from tensorshard.model.tensors import Structure, map_tensors, take_apart
from tensorshard.passes.precision import autocast, widen_output
from tensorshard.pipeline.run.pipelined_model import PipelinedModel
from tensorshard.pipeline.run.schedule_runner import PipelineRunner
from tensorshard.pipeline.run.split_backward import may_split_backward
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.pipeline.run.torch_stage import StageHooks
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan

# For forwards alone: schedules with the same stages on each rank, and for any number of micro-batches.
_FORWARD_SCHEDULES = {
    "1f1b": "gpipe",
    "interleaved_1f1b": "looped_bfs",
    "interleaved_zero_bubble": "looped_bfs",
    "dualpipev": "zbv",
}


class PipelineStepRunner(StepRunner):
    """This rank runs some stages of the model's forward, together with the other ranks of its pipeline."""

    _sharded: PipelinedModel

    def __init__(
        self, sharded: PipelinedModel, plan: Plan, mesh: Mesh, objective: Objective, device: torch.device
    ) -> None:
        super().__init__(sharded, plan, mesh, objective, device)
        self._group = mesh.group("pp")
        self._is_last = self._group.rank() == sharded.last_rank
        self._failure: Exception | None = None  # of the loss, until all ranks know of it
        self._predicts_whole = False  # at once, as the outputs of micro-batches cannot be joined
        self._runner = self._make_runner(plan.pp_schedule)
        forward = _FORWARD_SCHEDULES.get(plan.pp_schedule, plan.pp_schedule)
        self._forward_runner = self._runner if forward == plan.pp_schedule else self._make_runner(forward)

    def _make_runner(self, schedule: str) -> PipelineRunner:
        return PipelineRunner(
            self._sharded.stages,
            schedule,
            group=self._group,
            device=self._device,
            context=lambda: autocast(self._plan.precision, self._device),
            hooks=_GradientHooks(self._sharded, self._numbered),
            split=may_split_backward(self._plan),
        )

    def _numbered(self, micro_batch: int) -> AbstractContextManager[None]:
        """Around a stage's forward of a micro-batch."""
        return nullcontext() if self.numbers is None else self.numbers.stage(micro_batch)

    def train(self, inputs: Any, targets: Any, loss_scale: float, *, first_alone: bool = False) -> StepLoss:
        self._same_batch.check("step", inputs, targets)
        batches = self.batches.split(inputs, targets, self._plan.micro_batches, all_of_them=True)
        parts = [part.on_device(self._device, targets=self._is_last) for part in batches]
        if self.note_inputs is not None and parts[0].counts:
            self.note_inputs(parts[0].inputs)
        self._sharded.follow_modes()
        self._sharded.discard_gradients()
        tally = self._tally = LossTally(self._mesh)

        def loss(index: int, output: Callable[[], Any]) -> torch.Tensor:
            loss_sum, count = self._loss(index, output, parts[index], trains=True)
            self._sharded.loss_is_over()
            tally.add(loss_sum, count, micro_batches=len(parts))
            if tally.parts == len(parts):
                tally.start_total()
            assert tally.normalizer is not None
            return loss_sum * (loss_scale / tally.normalizer)

        if self.numbers is not None:
            self.numbers.begin([part.inputs for part in parts], [part.counts for part in parts])
        self._sharded.begin_step()
        with self._sharded.outputs_for_loss():
            self._runner.step([part.inputs for part in parts], loss, hand_over=True)
        self._sharded.finish_backward()
        return self._broadcast_loss(tally, len(parts))

    def evaluate(self, inputs: Any, targets: Any, *, micro_batches: int | None = None) -> StepLoss:
        self._same_batch.check("evaluate", inputs, targets)
        self._sharded.follow_modes()
        batches = self.batches.split_for_evaluation(inputs, targets, micro_batches or self._plan.micro_batches)
        parts = [part.on_device(self._device, targets=self._is_last) for part in batches]
        tally = LossTally(self._mesh)

        def consume(index: int, output: Callable[[], Any]) -> None:
            tally.add(*self._loss(index, output, parts[index], trains=False), micro_batches=len(parts))
            self._sharded.loss_is_over()

        if self.numbers is not None:
            self.numbers.begin([part.inputs for part in parts], [part.counts for part in parts])
        with self._sharded.outputs_for_loss():
            self._forward_runner.forward([part.inputs for part in parts], consume, hand_over=True)
        if self._is_last:
            tally.start_total()
        return self._broadcast_loss(tally, len(parts))

    def _loss(
        self, index: int, output: Callable[[], Any], part: MicroBatch, *, trains: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch; NaN if it failed, so that the other ranks do not wait for this one.

        All of them raise the error when the micro-batches are over.
        """
        if self.numbers is not None:
            self.numbers.place_stage(index)
        try:
            with self._sharded.computing_loss(), self._sharded.sequences.active():
                if part.counts:
                    loss = self._objective(output(), part.inputs, part.targets)
                else:
                    loss = self._objective.of_none(output(), part.targets, part.none)
                total, count = self._sharded.sequences.whole(loss)
            if trains:
                check_has_gradient(total)
                self._check_output_is_seen()
        except Exception as error:
            if self._failure is None:
                error.add_note(f"in the loss of micro-batch {index} (pipeline rank {self._group.rank()})")
                self._failure = error
            nothing = torch.full((), math.nan, device=self._device, requires_grad=trains)
            return nothing, torch.ones((), device=self._device)
        return total, count

    def _check_output_is_seen(self) -> None:
        """Refuses an output that holds its tensors where the run that found the cuts did not see them."""
        graph = self._sharded.stages[-1].latest.graph
        if graph.output_gradients:
            return
        kinds = ", ".join(graph.output_kinds) or "nothing with a gradient"
        raise ValueError(
            f"the loss has a gradient, but no tensor was seen in the model's output ({kinds}) that has one, so under "
            f"pp={self._plan.pp} no gradient would reach the stages: return a tensor, or a tuple, dict, dataclass or "
            f"SimpleNamespace of tensors"
        )

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def predict(self, inputs: Any, *, compare: Any, read: Read | None = None, targets: Any = None) -> Any:
        if compare is not None:
            self._same_batch.check("predict", compare, None)
        self._sharded.follow_modes()
        count = 1 if self._predicts_whole else self._plan.micro_batches
        parts = self._on_device(split_unevenly(inputs, targets, count))
        outputs = self._outputs(parts, read)
        sizes = [batch_size(part) for part, _ in parts]
        last = self._sharded.last_rank
        if not decide_once(lambda: _can_join(outputs, sizes), self._group, rank=last):
            self._predicts_whole = True
            outputs = self._outputs(self._on_device([(inputs, targets)]), read)
        return self._shown_to_all(lambda: _joined(outputs))

    def run(self, given: Any, read: Callable[[Any], None]) -> None:
        def note(output: Any, _: Any) -> torch.Tensor:
            read(output)
            return torch.zeros(())

        self._sharded.follow_modes()
        self._outputs([(given, None)], note, first=0)

    def _outputs(self, parts: list[tuple[Any, Any]], read: Read | None, first: int | None = None) -> list[Any]:
        """The model's output for each part, or what `read` makes of it, on the rank of the last stage."""
        outputs: dict[int, Any] = {}

        def consume(index: int, output: Callable[[], Any]) -> None:
            with self._sharded.sequences.active():
                if read is None:
                    result = output()
                else:
                    result = read(widen_output(output()), parts[index][1])
                    self._sharded.loss_is_over()
                outputs[index] = widen_output(self._sharded.sequences.whole(result))

        if self.numbers is not None:
            self.numbers.begin([part for part, _ in parts], [True] * len(parts), first)
        with nullcontext() if read is None else self._sharded.outputs_for_loss():
            self._forward_runner.forward([part for part, _ in parts], consume, hand_over=True)
        return [outputs[index] for index in sorted(outputs)]

    def _on_device(self, parts: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        # Only the last stage, which computes the loss, needs the targets.
        return [
            (to_device(inputs, self._device), to_device(targets, self._device) if self._is_last else targets)
            for inputs, targets in parts
        ]

    def _broadcast_loss(self, tally: LossTally, parts: int) -> StepLoss:
        """Sends the last stage's loss to every rank, and what any rank has met to all."""
        order = self._sharded.sequences.order
        notes = order.notes() if order is not None and order.is_open else []
        message = torch.tensor([0.0] * 6 + notes, dtype=torch.float64, device=self._device)
        if self._is_last:
            mean, correction = tally.mean(), tally.correction()
            message[0] = mean
            message[1] = 1.0 if correction is None else correction
            message[2] = float(mean.dtype == torch.float64)
            message[3] = float(self._failure is not None)
            message[5] = tally.count()
        message[4] = float(torch.is_grad_enabled() and self._sharded.is_stale)
        all_reduce_(message, self._group, what="the loss of the last stage")
        wide, failed, stale = map(bool, world().known(message[2:5], [False] * 3))
        if notes:  # of all stages together
            assert order is not None
            order.choose(world().known(message[6:], [0.0] * len(notes)))
        if failed:
            if torch.is_grad_enabled():
                self._runner.forget_latest()
            last = self._sharded.last_rank
            decide_once(self._raise_failure, self._group, rank=last)
        if stale:
            self._sharded.expect_gradients()
            raise StepAgain
        mean = message[0] if wide else message[0].float()
        return StepLoss(mean, message[1] if parts > 1 else None, message[5])

    def _shown_to_all(self, result: Callable[[], Any]) -> Any:
        """``result()`` of the last stage's rank, or the error that it raises, on every rank."""
        tensors: list[torch.Tensor] = []

        def describe() -> tuple[Structure, list[tuple[torch.Size, torch.dtype]]]:
            tensors[:], structure = take_apart(result())
            if structure.opaque() and not tensors:
                raise TypeError(
                    f"the model's output is {with_article(structure.opaque()[0])}, which cannot be sent from "
                    f"the last stage to the other ranks of pp={self._plan.pp}; return a tensor, or a tuple, dict, "
                    f"dataclass or SimpleNamespace of tensors. engine.step and engine.evaluate work"
                )
            return structure, [(tensor.shape, tensor.dtype) for tensor in tensors]

        source = self._sharded.last_rank
        structure, layouts = decide_once(describe, self._group, rank=source)
        if not self._is_last:
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in layouts]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(on_the_wire(tensor), group=self._group, group_src=source)
        return structure.build(tensors)


class _GradientHooks(StageHooks):
    """Tells the sharded stages when backward is about to add to gradients, and when it is over."""

    def __init__(self, sharded: PipelinedModel, numbered: Callable[[int], AbstractContextManager[None]]) -> None:
        self._numbered = numbered
        self._parts = {stage.index: part for stage, part in zip(sharded.stages, sharded.parts, strict=True)}

    def around_forward(self, stage: StageModule, micro_batch: int) -> AbstractContextManager[None]:
        return self._numbered(micro_batch)

    def before_backward(self, stage: StageModule, micro_batch: int, last: bool) -> None:
        self._parts[stage.index].begin_micro_batch(last)

    def after_backward(self, stage: StageModule, micro_batch: int) -> None:
        self._parts[stage.index].finish_micro_batch()


def _can_join(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether the outputs of micro-batches of `sizes` can be joined: the first dimension of each is the samples."""
    if len(outputs) == 1:
        return True
    taken = [take_apart(output)[0] for output in outputs]
    return len({len(tensors) for tensors in taken}) == 1 and all(
        tensor.dim() > 0 and tensor.size(0) == size
        for tensors, size in zip(taken, sizes, strict=True)
        for tensor in tensors
    )


def _joined(outputs: Sequence[Any]) -> Any:
    """The outputs of micro-batches, joined to the output of their batch."""
    if len(outputs) == 1:
        return outputs[0]
    columns = zip(*(take_apart(output)[0] for output in outputs), strict=True)
    remaining = (torch.cat(column) for column in columns)
    return map_tensors(lambda _: next(remaining), outputs[0])
