"""The stages that the schedules of torch.distributed.pipelining drive.

A schedule asks a stage for its sends and receives and tells it when to compute. All of these methods are written here,
and nothing else of torch's stages is used. So inputs may have any structure, outputs need not be tensors, shapes may
change, and tensors are sent without sending their shapes first.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tensorshard.comm.collectives import on_the_wire
from tensorshard.comm.world import world
from tensorshard.model.tensors import TensorSpec
from tensorshard.pipeline.cut import Cut
from tensorshard.pipeline.run.split_backward import WeightBackward, backward_of_inputs
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.torch_private.pipelining import ScheduleStage

logger = logging.getLogger("tensorshard")

_UNDER_WAY = 4  # messages that a stage sends at once; it waits for the oldest one before it sends a further one


class StageHooks:
    """Called before and after a stage's backwards. A subclass overrides what it needs."""

    def before_forward(self, stage: StageModule, micro_batch: int) -> None:
        """Called before each forward."""

    def around_forward(self, stage: StageModule, micro_batch: int) -> AbstractContextManager[None]:
        """Around each forward."""
        return nullcontext()

    def before_backward(self, stage: StageModule, micro_batch: int, last: bool) -> None:
        """Called before each backward that adds to parameters' gradients. After the `last` one, these are final."""

    def after_backward(self, stage: StageModule, micro_batch: int) -> None:
        """Called after each of them."""

    def after_last_backward(self, stage: StageModule) -> None:
        """Called once a step, when the stage has the gradients of all its micro-batches."""


@dataclass
class _MicroBatch:
    """What a stage holds of one micro-batch between its forward and its backward."""

    cut: Cut
    received_specs: tuple[TensorSpec, ...]
    sent_specs: tuple[TensorSpec, ...]
    received: tuple[torch.Tensor, ...] = ()
    sent: tuple[torch.Tensor, ...] = ()
    roots: tuple[GradientEdge | None, ...] = ()  # where the backward from each tensor that is sent starts
    gradients: tuple[torch.Tensor | None, ...] = ()  # of the tensors that were sent
    input_gradients: tuple[torch.Tensor | None, ...] = ()  # of the tensors that were received
    weights: WeightBackward | None = None
    flags: torch.Tensor | None = None  # [sent tensors]: 1 where there is a gradient


def _root(tensor: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


class _Absent:
    """Which tensors that cross a cut get no gradient, such as those of which only a part of the model's output that the
    loss leaves out is made. Before them is no gradient of zeros, with which an optimizer would decay weights, but none.

    Neighbours tell each other in the first step with a cut. Learned is what holds for all of its micro-batches.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Cut, frozenset[int]]] = {}
        self._learned: dict[int, tuple[Cut, frozenset[int]]] = {}
        self._left = 0  # micro-batches of this step
        self._recent: set[int] = set()  # cuts of which the latest step has shown it

    def begin(self, micro_batches: int) -> None:
        """Called before each step. What a failed step has learned is forgotten."""
        learned = {} if self._left else self._learned
        self._recent = set(learned)
        self._known |= learned
        self._learned, self._left = {}, micro_batches

    def forget_latest(self) -> None:
        """Called after a step whose loss has failed: it had no gradients."""
        for cut in self._recent:
            self._known.pop(cut, None)

    def of(self, cut: Cut) -> frozenset[int] | None:
        """Places of the tensors without gradients; None in the first step with `cut`."""
        known = self._known.get(id(cut))
        return None if known is None else known[1]

    def learn(self, cut: Cut, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called once with the gradients of each micro-batch."""
        if id(cut) not in self._known:
            absent = frozenset(place for place, gradient in enumerate(gradients) if gradient is None)
            before = self._learned.get(id(cut), (cut, absent))[1]
            self._learned[id(cut)] = cut, absent & before
        self._left -= 1


class ScheduledStage(ScheduleStage):
    """A :class:`StageModule` between its neighbours.

    Args:
        stage: what computes.
        group: of the pipeline's ranks.
        device: of received tensors.
        context: makes the context of each forward, such as ``torch.autocast``.
        hooks: called before and after backwards.
        split: whether schedules that compute gradients of inputs and of parameters separately may do so. If not, both
            are computed at the time of the inputs' gradients.
        sends: whether it sends by itself. A schedule of torch's keeps what is sent until the step ends, all
            micro-batches of it. One that sends and receives at once must do so itself; it keeps nothing.
    """

    def __init__(
        self,
        stage: StageModule,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        hooks: StageHooks,
        split: bool,
        sends: bool,
    ) -> None:
        # An empty module: torch would gather and reduce a sharded one by itself, at the wrong times.
        super().__init__(nn.Module(), stage.index, stage.cut.stages, device, group)
        self.stage = stage
        self._context, self._hooks = context, hooks
        self._split = split and not stage.cut.graph.unsplittable_backward
        self._inputs: Sequence[Any] = ()
        self._batches: dict[int, _MicroBatch] = {}
        self._backwards = 0  # those of this step that added to parameters' gradients
        self._absent_received, self._absent_sent = _Absent(), _Absent()
        self._said = False
        self._sends, self._under_way = sends, deque[list[dist.Work | None]]()

    def begin(self, inputs: Sequence[Any]) -> None:
        """Sets the micro-batches of the next step, and forgets what a failed step left."""
        self._inputs = inputs
        self._batches = {}
        self._backwards = 0
        self._under_way.clear()
        self._absent_received.begin(len(inputs))
        self._absent_sent.begin(len(inputs))

    def forget_latest(self) -> None:
        """Forgets what a step, whose loss has failed, has shown of gradients."""
        self._absent_received.forget_latest()
        self._absent_sent.forget_latest()

    def _of(self, index: int) -> _MicroBatch:
        if index not in self._batches:
            with self._context():
                inputs = self._inputs[index]
                cut = self.stage.cut_for(inputs)
                self._batches[index] = _MicroBatch(cut, *self.stage.crossing_specs(inputs, cut))
        return self._batches[index]

    # -- forward --

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        batch = self._of(fwd_chunk_id)
        batch.received = tuple(spec.empty(self.device) for spec in batch.received_specs)
        return self._ops(dist.irecv, batch.received_specs, batch.received, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._of(mb_index).received = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        batch = self._of(fwd_chunk_id)
        for spec, tensor in zip(batch.received_specs, batch.received, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        self._hooks.before_forward(self.stage, fwd_chunk_id)
        with (
            self._named("forward", fwd_chunk_id),
            self._context(),
            self._hooks.around_forward(self.stage, fwd_chunk_id),
        ):
            output = self.stage(self._inputs[fwd_chunk_id], batch.received, batch.cut)
        if self.is_last:
            # The schedule's loss function takes it out of this list, so that nothing else holds it.
            return fwd_chunk_id, [output]
        batch.sent, batch.roots = output, tuple(map(_root, output))
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        batch = self._of(fwd_chunk_id)
        tensors = [spec.arranged(t.detach()) for spec, t in zip(batch.sent_specs, batch.sent, strict=True)]
        batch.sent = ()  # backward does not need the values, which would take memory until then
        return self._sent(self._ops(dist.isend, batch.sent_specs, tensors, self.stage_index + 1))

    # -- backward --

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        batch = self._of(bwd_chunk_id)
        absent = self._absent_sent.of(batch.cut)
        batch.gradients = tuple(
            spec.empty(self.device) if spec.requires_grad and place not in (absent or ()) else None
            for place, spec in enumerate(batch.sent_specs)
        )
        operations = self._ops(dist.irecv, batch.sent_specs, batch.gradients, self.stage_index + 1)
        if operations and absent is None and not world().is_simulated:
            batch.flags = torch.empty(len(batch.gradients), device=self.device)
            operations.append(self._op(dist.irecv, batch.flags, self.stage_index + 1))
        return operations

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self._of(mb_index).gradients = tuple(next_stage_bwd_outputs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            self._batches.pop(bwd_chunk_id, None)
            return
        batch = self._of(bwd_chunk_id)
        if batch.flags is not None:
            batch.gradients = tuple(
                gradient if flag else None for gradient, flag in zip(batch.gradients, batch.flags.tolist(), strict=True)
            )
            batch.flags = None
        if not self.is_last:
            self._absent_sent.learn(batch.cut, batch.gradients)
        roots, gradients = batch.roots, batch.gradients
        if self.is_last:
            if loss.numel() != 1:
                raise RuntimeError(
                    f"grad can be implicitly created only for scalar outputs, and the loss has shape {list(loss.shape)}"
                )
            roots, gradients = (_root(loss),), (torch.ones_like(loss),)
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if root is not None and gradient is not None
        ]
        if full_backward or not self._split:
            self._before_gradients(bwd_chunk_id)
            if pairs:
                with self._named("backward", bwd_chunk_id):
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            batch.input_gradients = tuple(t.grad for t in batch.received)
            self._hooks.after_backward(self.stage, bwd_chunk_id)
        else:
            with self._named("backward", bwd_chunk_id):
                input_gradients, batch.weights = backward_of_inputs(
                    [t for t, _ in pairs], [g for _, g in pairs], batch.received, self.stage.module.parameters()
                )
            batch.input_gradients = tuple(input_gradients)
        batch.received = batch.sent = batch.gradients = batch.roots = ()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        batch = self._batches.get(bwd_chunk_id)
        if batch is None or batch.weights is None:
            return
        self._before_gradients(bwd_chunk_id)
        with self._named("backward", bwd_chunk_id):
            batch.weights.run()
        batch.weights = None
        self._hooks.after_backward(self.stage, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        batch = self._of(bwd_chunk_id)
        absent, gradients = self._absent_received.of(batch.cut), batch.input_gradients
        tensors = [
            self._gradient(spec, gradient, None if absent is None else place in absent) if spec.requires_grad else None
            for place, (spec, gradient) in enumerate(zip(batch.received_specs, gradients, strict=True))
        ]
        operations = self._ops(dist.isend, batch.received_specs, tensors, self.stage_index - 1)
        if operations and absent is None and not world().is_simulated:
            flags = torch.tensor([float(gradient is not None) for gradient in gradients], device=self.device)
            operations.append(self._op(dist.isend, flags, self.stage_index - 1))
        self._absent_received.learn(batch.cut, gradients)
        batch.input_gradients = ()
        return self._sent(operations)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        if not self.has_backward:
            return ()
        batch = self._of(mb_index)
        gradients, batch.input_gradients = batch.input_gradients, ()
        self._absent_received.learn(batch.cut, gradients)
        return gradients

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            self._hooks.after_last_backward(self.stage)

    def finish_sends(self, most: int = 0) -> None:
        """Waits until at most so many of the messages that it sends are under way, and lets go of the others."""
        while len(self._under_way) > most:
            for work in self._under_way.popleft():
                if work is not None:
                    work.wait()

    # -- methods that schedules call, and that do nothing here --

    def clear_runtime_states(self) -> None:
        """Does nothing: :meth:`begin` clears the state."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Does nothing: the loss is scaled already."""

    # -- internals --

    @contextmanager
    def _named(self, what: str, index: int) -> Iterator[None]:
        """Adds to an exception where it happened, since the ranks that wait for this one raise other errors."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"in the {what} of micro-batch {index} on stage {self.stage_index} of {self.num_stages} "
                f"(pipeline rank {self.group_rank})"
            )
            raise

    def _before_gradients(self, index: int) -> None:
        # Counted here: a schedule that splits backwards does not call a backward of inputs the last one.
        self._backwards += 1
        self._hooks.before_backward(self.stage, index, last=self._backwards == len(self._inputs))

    def _gradient(
        self, spec: TensorSpec, gradient: torch.Tensor | None, was_absent: bool | None
    ) -> torch.Tensor | None:
        """What is sent for a gradient of a received tensor.

        Args:
            was_absent: in the first step; None if this is the first step.
        """
        if gradient is None:
            if was_absent is False and not self._said:
                self._said = True
                logger.warning(
                    "stage %d has no gradient in this step for a tensor %s that it received, and had one in the first "
                    "step: the stages before it get zeros, with which an optimizer decays weights, as without "
                    "pipelines it would not",
                    self.stage_index,
                    spec,
                )
            return None if was_absent else spec.empty(self.device).zero_()
        if was_absent:
            raise RuntimeError(
                f"stage {self.stage_index} has a gradient in this step for a tensor {spec} that it received, and had "
                f"none in the first step with such inputs, so that the stages before it do not wait for one: let the "
                f"loss use all of what it ever uses from the first step, times 0 where it should not count"
            )
        return spec.arranged(gradient)

    def _op(self, kind: Any, tensor: torch.Tensor, neighbour: int) -> dist.P2POp:
        group = self.group if self.group is not None else dist.group.WORLD
        peer = dist.get_global_rank(group, self.stage_index_to_group_rank[neighbour])  # type: ignore[arg-type]
        return dist.P2POp(kind, tensor, peer, self.group)

    def _sent(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Sends; returns what is left for the schedule to send."""
        if not self._sends:
            return operations
        self._under_way.append([one.op(one.tensor, one.peer, one.group) for one in operations])
        # Neighbours receive in the order of the schedule, in which whatever they wait for before is sent earlier.
        self.finish_sends(_UNDER_WAY)
        return []

    def _ops(
        self, kind: Any, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], neighbour: int
    ) -> list[dist.P2POp]:
        return [
            self._op(kind, on_the_wire(spec.in_memory_order(tensor)), neighbour)
            for spec, tensor in zip(specs, tensors, strict=True)
            if tensor is not None
        ]
