"""Forward and backward of ``loss_fn(model, batch)``, which calls the model as often as it likes, by any method."""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.world import world
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.last_batch import MicroBatch
from tensorshard.engine.loss import LossTally, Objective, check_has_gradient
from tensorshard.engine.loss_terms import LossOfTerms, MetricTotals, number_of_samples, read_loss
from tensorshard.engine.manual_forwards import ManualForwards
from tensorshard.engine.measures import standing_in
from tensorshard.engine.step import StepAgain, StepLoss, WholeModelStepRunner
from tensorshard.model.batches import unclear_list
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.patches import replaced

logger = logging.getLogger("tensorshard")

LossOfModel = Callable[[Any, Any], Any]


class NeedsGradientError(RuntimeError):
    """A loss function differentiates where no gradients are computed."""


class LossWithModelRunner(WholeModelStepRunner):
    """This rank runs all of a loss function that is given the model.

    The model's forwards are those of a loop of one's own (:mod:`.manual_forwards`), so that other methods of it, calls
    of its parts, several calls and derivatives by inputs are what they are there. A batch is any nest of tensors.

    Args:
        forwards: the user's, of the model.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        objective: Objective,
        device: torch.device,
        *,
        forwards: ManualForwards,
    ) -> None:
        super().__init__(sharded, plan, mesh, objective, device)
        self._loss_fn: LossOfModel = objective.loss_fn
        self._forwards = forwards
        self._means = objective.means
        self._metrics = MetricTotals(mesh, device)
        self._counts: torch.Tensor | None = None  # of the terms, over the step that is made once more
        self._warned = False
        # Whether the next micro-batch says if the loss takes a gradient by the weights, which is that of a part of the
        # batch. A compiler would compile again without the mode.
        self._looks = not plan.compile and (mesh.dp_size > 1 or plan.micro_batches > 1)

    def train(self, inputs: Any, targets: Any, loss_scale: float, *, first_alone: bool = False) -> StepLoss:
        batch = one_batch(inputs, targets)
        self._same_batch.check("step", batch, None)
        self._check_list(batch)
        parts = self.batches.split_nest(batch, self._plan.micro_batches)
        self._metrics.begin()
        self._sharded.discard_gradients()
        with self._sharded.outputs_for_loss():
            return self._train(parts[:1] if first_alone else parts, loss_scale)

    def _check_list(self, batch: Any) -> None:
        """Refuses a list that may be of samples, of which the data ranks have different numbers."""
        if self._mesh.dp_size == 1 or (entries := unclear_list(batch)) is None:
            return
        everyone: list[Any] = [entries] * self._mesh.dp_size
        dist.all_gather_object(everyone, entries, group=self._mesh.dp_group)
        if len(set(everyone)) > 1:
            raise ValueError(
                f"the data ranks were given lists of {', '.join(map(str, everyone))} tensors of one shape. If these "
                f"are samples, how much each rank's mean counts depends on their number, which nothing else says: put "
                f"a tensor with a row for each sample beside the list, as labels are"
            )

    def _train_part(
        self, part: MicroBatch, tally: LossTally, loss_scale: float, *, last: bool, micro_batches: int
    ) -> None:
        loss = self._terms(part)
        check_has_gradient(loss.sums)
        self._metrics.add(loss.shown)
        tally.add(loss.sums, loss.counts, micro_batches=micro_batches)
        # Backwards within the loss function, by inputs say, are over: the next one is that of the micro-batch.
        self._sharded.begin_micro_batch(last, shown=True)
        if last:
            tally.start_total()
        assert tally.normalizer is not None
        if self._counts is not None:
            tally.normalizer = torch.where(self._counts == 0, 1.0, self._counts) * self._mesh.degrees["cp"]
        total = (loss.sums * (loss_scale / tally.normalizer)).sum()
        self._sharded.begin_backward(total)
        with self._forwards.backwards.by_engine():
            total.backward()
        self._sharded.finish_micro_batch()

    def evaluate(self, inputs: Any, targets: Any, *, micro_batches: int | None = None) -> StepLoss:
        batch = one_batch(inputs, targets)
        self._same_batch.check("evaluate", batch, None)
        self._check_list(batch)
        with self._sharded.outputs_for_loss():
            return self._evaluate(self.batches.split_nest(batch, micro_batches or 1, evenly=False))

    def _evaluate(self, parts: list[MicroBatch]) -> StepLoss:
        self._metrics.begin()
        return super()._evaluate(parts)

    def _evaluate_part(self, part: MicroBatch, tally: LossTally, *, micro_batches: int) -> None:
        loss = self._terms(part)
        tally.add(loss.sums, loss.counts, micro_batches=micro_batches)
        self._metrics.add(loss.shown)

    def _count_of(self, part: MicroBatch) -> torch.Tensor:
        return self._terms(part).counts

    def _terms(self, part: MicroBatch) -> LossOfTerms:
        batch = part.on_device(self._device).inputs
        sequences = self._sharded.sequences
        with sequences.active(), self._forwards.in_loss(), nullcontext() if part.counts else standing_in():
            try:
                with self._looking_for_derivatives() if self._looks and torch.is_grad_enabled() else nullcontext():
                    call = self._loss_fn if self.numbers is None else partial(self.numbers.loss_of_model, self._loss_fn)
                    returned = sequences.whole(call(self._sharded.model, batch))
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
                raise NeedsGradientError(
                    "loss_fn differentiates, and engine.evaluate computes without gradients: put `with "
                    "torch.enable_grad():` around the calls of the model that are differentiated, and around "
                    "torch.autograd.grad"
                ) from error
        loss = read_loss(returned, batch, self._device)
        if self._means is not None and torch.is_grad_enabled() and part.counts:
            self._means.note_loss(loss.sums.sum(), number_of_samples(batch))
            if loss.mean is not None:
                self._means.note(loss.mean, loss.samples)
        self._sharded.loss_is_over()
        return loss if part.counts else loss.of_none()

    @contextmanager
    def _looking_for_derivatives(self) -> Iterator[None]:
        self._looks = False
        parameters = {id(parameter) for parameter in self._sharded.model.parameters()}
        by_weights = False

        def noting(grad: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(grad)
            def noted(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal by_weights
                of = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
                by_weights |= any(id(one) in parameters for one in of)
                return grad(outputs, of, *args, **kwargs)

            return noted

        # A mode of torch's would stand between user code and what parameters show.
        with replaced(torch.autograd, "grad", noting):
            yield
        if by_weights and self._mesh.rank == 0:
            logger.warning(
                "loss_fn takes a gradient by the weights, which is that of one micro-batch of one data rank: the loss "
                "depends on the number of ranks and micro-batches. For a gradient of the whole batch take a loop of "
                "your own, as docs/your-own-loop.md does for sharpness-aware steps"
            )

    def _result(self, tally: LossTally, *, trains: bool = True) -> StepLoss:
        """The loss of all terms, each of which has its own global count."""
        means, counts = tally.mean(), tally.count()
        correction = self._one_correction(tally.correction(), counts) if trains else None
        metrics = self._metrics.totals("step" if trains else "evaluate")
        return StepLoss(means.sum(), correction, counts, terms=means, metrics=metrics)

    def _one_correction(self, corrections: torch.Tensor | None, counts: torch.Tensor) -> torch.Tensor | None:
        """The factor that gradients still need. All terms must share it: their gradients are added up already.

        Raises:
            StepAgain: on every rank. They do not, and now the `counts` of the whole step are known.
            ValueError: on every rank. The counts are others than the first time.
        """
        known, self._counts = self._counts, None
        if corrections is None or len(corrections) == 1:
            return None if corrections is None else corrections[0]
        if _is_one(world().known(corrections, [1.0] * len(corrections))):
            return corrections[0]
        if known is not None:
            raise ValueError(
                "the numbers that the terms of loss_fn count changed when the same step was made again: let them "
                "depend on the batch alone, or set micro_batches=1"
            )
        self._counts = counts
        if not self._warned and self._mesh.rank == 0:
            logger.warning(
                "the terms of loss_fn count numbers that differ between micro-batches, each in its own way: such a "
                "step is made twice, since the first pass finds out what each is a mean over. micro_batches=1, or "
                "terms that count the same (samples, say), take one pass"
            )
        self._warned = True
        raise StepAgain

    def abandon(self) -> None:
        counts = self._counts
        super().abandon()
        self._counts = counts if isinstance(sys.exception(), StepAgain) else None


def one_batch(inputs: Any, targets: Any) -> Any:
    """The batch of a loss function that takes one: `inputs`, or the pair if there are `targets`."""
    return inputs if targets is None else (inputs, targets)


def _is_one(factors: list[float]) -> bool:
    return all(math.isclose(factor, factors[0], rel_tol=1e-12) for factor in factors)
