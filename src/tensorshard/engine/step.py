"""Forward and backward over a batch by a whole model; :mod:`.pipeline_step` does it by a pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.engine_random import kept_random_state
from tensorshard.engine.guards.wrong_batch import SameBatch, explained_forward
from tensorshard.engine.last_batch import MicroBatch, ShortBatches
from tensorshard.engine.loader import EngineLoaders
from tensorshard.engine.loss import LossTally, MeansWithoutGraphs, Objective, check_has_gradient, model_loss
from tensorshard.engine.same_numbers import SameNumbers
from tensorshard.engine.whole_batch import WholeBatch
from tensorshard.model.batches import call_model, to_device
from tensorshard.model.parameters import BufferValues
from tensorshard.passes.batch_norm import ignored_in_statistics
from tensorshard.passes.precision import autocast, widen_output
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.autograd import engines_backward

Read = Callable[[Any, Any], Any]
"""(output, targets) -> a tensor whose first dimension is the samples."""


@dataclass(frozen=True)
class StepLoss:
    """The result of a step's forwards and backwards.

    Args:
        mean: the global mean loss, on every rank.
        correction: the factor that the gradients still need; None for no factor.
        count: the global count that it is a mean over, in fp64; of each of its `terms`.
        terms: the global means of the terms that `mean` is the sum of: [terms]; None for a loss without terms.
        metrics: the global sum and count, [2] in fp64, of each value that the loss function returned beside it.
    """

    mean: torch.Tensor
    correction: torch.Tensor | None
    count: torch.Tensor
    terms: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def mean_over_batches(losses: Sequence[StepLoss]) -> torch.Tensor:
    """The mean loss over all samples of several batches; each term's by its own count."""
    means = torch.stack([loss.mean if loss.terms is None else loss.terms for loss in losses])
    counts = torch.stack([loss.count for loss in losses])
    total = counts.sum(0)
    return ((means * counts).sum(0) / torch.where(total == 0, 1.0, total)).sum().to(means.dtype)


def mean_metrics(losses: Sequence[StepLoss]) -> dict[str, torch.Tensor]:
    """The means over all samples of several batches: fp32 scalars, NaN for a count of zero."""
    names = dict.fromkeys(name for loss in losses for name in loss.metrics)
    totals = {name: torch.stack([m.metrics[name] for m in losses if name in m.metrics]).sum(0) for name in names}
    return {name: (total[0] / total[1]).float() for name, total in totals.items()}


class StepAgain(Exception):
    """Raised on all ranks where a step has to be made once more, from the state before it."""


class StepRunner(ABC):
    """How batches go through a sharded model. All calls are collectives of the mesh."""

    def __init__(
        self, sharded: ShardedModel, plan: Plan, mesh: Mesh, objective: Objective, device: torch.device
    ) -> None:
        self._sharded = sharded
        self._plan = plan
        self._mesh = mesh
        self._objective = objective
        self._device = device
        self._same_batch = SameBatch(mesh, device)
        self.whole_batch = WholeBatch(mesh, plan)
        self.whole_batch.install(sharded.model)
        self.batches = ShortBatches(mesh, EngineLoaders(), lambda: None)
        self._tally: LossTally | None = None  # of the step under way
        self.numbers: SameNumbers | None = None
        self.note_inputs: Callable[[Any], None] | None = None  # of the first micro-batch of a step

    def draw_from(self, numbers: SameNumbers) -> None:
        """Makes random numbers those of `numbers`."""
        self.numbers = numbers
        self._objective = replace(self._objective, draws=numbers.loss_of_output)

    def watch_loaders(self, loaders: EngineLoaders, stand_ins: Callable[[], None]) -> None:
        """Lets the batches of `loaders` be smaller at the end of an epoch, and calls `stand_ins` before a step in which
        some rank runs a sample that is not its own."""
        self.batches = ShortBatches(self._mesh, loaders, stand_ins)

    def abandon(self) -> None:
        """Ends what a failed step left under way. A collective of the ranks on which the step failed."""
        self.whole_batch.forget()
        tally, self._tally = self._tally, None
        if tally is not None:
            tally.abandon()
        self._sharded.abandon_step()

    @abstractmethod
    def train(self, inputs: Any, targets: Any, loss_scale: float, *, first_alone: bool = False) -> StepLoss:
        """Forward and backward of all micro-batches; every master's gradient is final when this returns.

        Args:
            loss_scale: gradients are multiplied by it.
            first_alone: whether only the first micro-batch is run, if that can be.
        """

    @abstractmethod
    def evaluate(self, inputs: Any, targets: Any, *, micro_batches: int | None = None) -> StepLoss:
        """The global mean loss, on every rank. Modules are in evaluation mode already.

        Args:
            micro_batches: into how many parts of nearly equal size the batch is cut; None for as few as possible.
        """

    @abstractmethod
    def run(self, given: Any, read: Callable[[Any], None]) -> None:
        """Runs the model on one micro-batch, as the first of the whole batch, and calls `read` with its output, on the
        ranks that have it.

        Args:
            given: the positional and keyword arguments of the model's call; of a pipeline, the inputs.
        """

    @abstractmethod
    def predict(self, inputs: Any, *, compare: Any, read: Read | None = None, targets: Any = None) -> Any:
        """The model's output for this data rank's batch. Modules are in evaluation mode already.

        Args:
            compare: the part of the inputs that is compared between ranks that should have the same; None for no
                comparison.
            read: what is returned in place of the output, computed from it and `targets`. It gets outputs as a loss
                function does, so that logits need not be held.
            targets: of the same samples, for `read`.
        """


class WholeModelStepRunner(StepRunner):
    """This rank runs all of the model's forward."""

    def train(self, inputs: Any, targets: Any, loss_scale: float, *, first_alone: bool = False) -> StepLoss:
        self._same_batch.check("step", inputs, targets)
        parts = self.batches.split(inputs, targets, self._plan.micro_batches, all_of_them=False)
        parts = parts[:1] if first_alone else parts
        self._sharded.discard_gradients()
        with self._sharded.outputs_for_loss():
            return self._train(parts, loss_scale)

    def _train(self, parts: list[MicroBatch], loss_scale: float) -> StepLoss:
        tally = self._tally = LossTally(self._mesh)
        is_known = self._collect_tokens(parts)
        for index, part in self._each(parts):  # with its statistics in recomputed forwards, too
            self._train_part(part, tally, loss_scale, last=index == len(parts) - 1, micro_batches=len(parts))
        self.whole_batch.forget()
        self._sharded.finish_backward()
        result = self._result(tally)
        if not is_known and self.whole_batch.was_called:
            raise StepAgain
        return result

    def _each(self, parts: list[MicroBatch]) -> Iterator[tuple[int, MicroBatch]]:
        """The micro-batches, each within what its forwards need."""
        if self.numbers is not None:
            self.numbers.begin([part.inputs for part in parts], [part.counts for part in parts])
        for index, part in enumerate(parts):
            if self.numbers is not None:
                self.numbers.place(index)
            with self._statistics_of(part), self.whole_batch.part(index, len(parts), counts=part.counts):
                yield index, part

    def _collect_tokens(self, parts: list[MicroBatch]) -> bool:
        """Finds out by forwards alone what functions of the whole batch need of all micro-batches.

        Returns:
            Whether that is known now. If not, and such a function is called, the results are not final.
        """
        if len(parts) == 1 or not self.whole_batch.was_called:
            return len(parts) == 1
        counts, buffers = [], BufferValues(self._sharded.all_modules())
        counting = MeansWithoutGraphs() if self._objective.loss_fn is model_loss else nullcontext()
        with torch.no_grad(), kept_random_state(self._device), self.whole_batch.collecting(), counting:
            for _, part in self._each(parts):
                counts.append(self._count_of(part))
        buffers.restore()
        self.whole_batch.weigh(counts)
        return True

    def _count_of(self, part: MicroBatch) -> torch.Tensor:
        return self._loss(part)[1]

    def _result(self, tally: LossTally, *, trains: bool = True) -> StepLoss:
        """What the micro-batches of a step, or of an evaluation, have added up to."""
        return StepLoss(tally.mean(), tally.correction() if trains else None, tally.count())

    def _statistics_of(self, part: MicroBatch) -> AbstractContextManager[None]:
        """Around forwards of a micro-batch: a sample that stands in is in no batch statistic."""
        return nullcontext() if part.counts else ignored_in_statistics(self._sharded.model)

    def _train_part(
        self, part: MicroBatch, tally: LossTally, loss_scale: float, *, last: bool, micro_batches: int
    ) -> None:
        self._sharded.begin_micro_batch(last)
        loss_sum, count = self._loss(part)
        check_has_gradient(loss_sum)
        tally.add(loss_sum, count, micro_batches=micro_batches)
        if last:
            tally.start_total()
        assert tally.normalizer is not None
        # The loss is a sum over the data ranks divided by a global count, and so must the gradient be.
        scaled = loss_sum * (loss_scale / tally.normalizer)
        self._sharded.begin_backward(scaled)
        with engines_backward():
            scaled.backward()
        self._sharded.finish_micro_batch()

    def evaluate(self, inputs: Any, targets: Any, *, micro_batches: int | None = None) -> StepLoss:
        self._same_batch.check("evaluate", inputs, targets)
        parts = self.batches.split_for_evaluation(inputs, targets, micro_batches or 1)
        with self._sharded.outputs_for_loss():
            return self._evaluate(parts)

    def _evaluate(self, parts: list[MicroBatch]) -> StepLoss:
        tally, is_known = LossTally(self._mesh), self._collect_tokens(parts)
        for _, part in self._each(parts):
            self._evaluate_part(part, tally, micro_batches=len(parts))
        self.whole_batch.forget()
        if not is_known and self.whole_batch.was_called:
            return self._evaluate(parts)
        tally.start_total()
        return self._result(tally, trains=False)

    def _evaluate_part(self, part: MicroBatch, tally: LossTally, *, micro_batches: int) -> None:
        tally.add(*self._loss(part), micro_batches=micro_batches)

    def predict(self, inputs: Any, *, compare: Any, read: Read | None = None, targets: Any = None) -> Any:
        if compare is not None:
            self._same_batch.check("predict", compare, None)
        for_loss = nullcontext() if read is None else self._sharded.outputs_for_loss()
        with for_loss, self._sharded.sequences.active():
            output = self._output(to_device(inputs, self._device))
            if read is not None:
                output = read(widen_output(output), to_device(targets, self._device))
                self._sharded.loss_is_over()
            output = self._sharded.sequences.whole(output)
        return widen_output(output)

    def run(self, given: Any, read: Callable[[Any], None]) -> None:
        args, kwargs = given
        if self.numbers is not None:
            self.numbers.begin([given], [True], first=0)
            self.numbers.place(0)
        context = autocast(self._plan.precision, self._device)
        with self._sharded.outputs_for_loss(), self._sharded.sequences.active(), context:
            read(self._sharded.model(*args, **kwargs))
            self._sharded.loss_is_over()

    def _loss(self, part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        part = part.on_device(self._device)
        with self._sharded.sequences.active():
            if part.counts:
                loss = self._objective(self._output(part.inputs), part.inputs, part.targets)
            else:
                loss = self._objective.of_none(self._output(part.inputs), part.targets, part.none)
            loss = self._sharded.sequences.whole(loss)
        self._sharded.loss_is_over()  # the output is no longer needed here
        return loss

    def _output(self, inputs: Any) -> Any:
        with autocast(self._plan.precision, self._device), explained_forward(self._sharded.model, inputs):
            return call_model(self._sharded.model, inputs)
