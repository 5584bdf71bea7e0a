"""The loss of a step: what the loss function returned, summed and counted over micro-batches and data ranks.

Also here: ``ts.model_loss``: the loss that the model itself has computed, as models of transformers do of their labels.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tensorshard.comm.collectives import all_reduce_, finish_unasked
from tensorshard.common.words import kind_of
from tensorshard.engine.guards.uneven_means import UnevenMeans
from tensorshard.engine.guards.wrong_batch import explained_loss
from tensorshard.model.batches import batch_size, without_samples
from tensorshard.passes.precision import widen_output
from tensorshard.plan.mesh import Mesh
from tensorshard.torch_private.autograd import means_of

_MEAN_OVER = "_tensorshard_mean_over"


@dataclass(frozen=True)
class Objective:
    """A loss function, with the type and the device of what it gets and returns.

    Args:
        loss_fn: as :func:`tensorshard.parallelize` takes it.
        precision: of the plan; outputs of 16 bits reach `loss_fn` as fp32.
        device: of this rank.
        calling: the context in which `loss_fn` is called.
        means: notes the means of the first step; None to look at none.
        draws: calls ``draws(loss_fn, output, targets)`` so that random numbers do not depend on the plan; None to call
            `loss_fn` itself.
    """

    loss_fn: Callable[[Any, Any], Any]
    precision: str
    device: torch.device
    calling: Callable[[], AbstractContextManager[None]] = nullcontext
    means: UnevenMeans | None = None
    draws: Callable[[Callable[[Any, Any], Any], Any, Any], Any] | None = None

    def __call__(self, output: Any, inputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a (micro-)batch as a sum and the count that it is a sum over.

        Raises:
            TypeError: the loss function returned neither a scalar nor (sum, count).
        """
        output = widen_output(output) if self.precision != "fp32" else output
        with explained_loss(output, targets), self.calling():
            call = self.loss_fn if self.draws is None else partial(self.draws, self.loss_fn)
            result = call(output, targets)
        total, count = sum_and_count(result, self.device, "loss_fn returned", "return")
        samples = batch_size(inputs, targets)
        if self.means is not None and torch.is_grad_enabled():
            self.means.note_loss(total, samples)
        if count is not None:
            return total, count
        if samples == 0:
            raise ValueError(
                "the batch of this rank has no samples, so it has no mean loss; give at least one on every rank, "
                "take the batches of engine.loader(dataset, batch_size), or a loss_fn that returns (sum, count)"
            )
        if self.means is not None and torch.is_grad_enabled():
            self.means.note(total, samples)
        return total * samples, torch.full((), float(samples), device=self.device)  # a kernel, not a copy

    def of_none(self, output: Any, targets: Any, none: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of no samples, where one stood in for them: zero, of a count of zero.

        The loss function is called without samples. So what it gathers from other ranks is theirs alone.

        Args:
            output, targets: of the sample that stood in.
            none: the targets of no samples.
        """
        output = widen_output(output) if self.precision != "fp32" else output
        try:
            total = self._sum(without_samples(output), none)
            works = total.requires_grad or not torch.is_grad_enabled()
        except Exception:  # a maximum of nothing, say
            works = False
        if not works:
            with explained_loss(output, targets):
                total = self._sum(output, targets)
        # The mean of nothing is NaN, but no element of the output has a part in it.
        return total.nan_to_num(0.0, 0.0, 0.0) * 0, torch.zeros((), device=self.device)

    def _sum(self, output: Any, targets: Any) -> torch.Tensor:
        return sum_and_count(self.loss_fn(output, targets), self.device, "loss_fn returned", "return")[0]


def sum_and_count(loss: Any, device: torch.device, what: str, verb: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A loss in one of its two forms: a mean and None, or a sum and the count that it is a sum over.

    Args:
        device: of the count.
        what: where the loss came from, for errors, such as "loss_fn returned".
        verb: what the user must do instead, for errors.

    Raises:
        TypeError: it has neither form.
    """
    if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]) and _is_count(loss[1]):
        total, count = loss
        _check_count(count, what)
        if not isinstance(count, torch.Tensor):
            return _whole(total), torch.full((), float(count), dtype=torch.float32, device=device)
        return _whole(total), count.to(device, torch.float32).detach()
    if not _is_scalar(loss) or loss.is_complex():
        raise TypeError(
            f"{what} {_described(loss)}; it must {verb} a scalar tensor, the mean over the samples, or "
            f"a tuple (sum, count) of a scalar tensor and the number of samples or tokens that it is a sum over"
        )
    return _whole(loss), None


def _whole(loss: torch.Tensor) -> torch.Tensor:
    """A loss that was computed from sharded weights alone, with its value on every rank: it is weighed by samples, of
    which ranks may have different numbers."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


class GlobalLoss:
    """A sum and its count on their way over the data ranks, while backward computes."""

    def __init__(self, loss_sum: torch.Tensor, count: torch.Tensor, mesh: Mesh) -> None:
        self._dtype = loss_sum.dtype
        self._total = torch.stack([loss_sum.detach().double(), count.double()])
        self._work: Any = None
        if mesh.dp_size > 1:
            self._work = all_reduce_(self._total, mesh.dp_group, async_op=True, what="the loss")

    def abandon(self) -> None:
        """Ends the transfer, after the step has failed."""
        work, self._work = self._work, None
        if work is not None:
            finish_unasked(work)

    def total(self) -> torch.Tensor:
        """The sum and the count over the data ranks, in fp64."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total

    def mean(self) -> torch.Tensor:
        """The global mean: a scalar."""
        loss_sum, count = self.total()
        return (loss_sum / _nonzero(count)).to(self._dtype)


class LossTally:
    """Sums and counts of one step, over its micro-batches and the data ranks.

    Attributes:
        normalizer: the number by which backward divides: the global count, if every micro-batch counts as much as the
            first ones; times the ranks of context parallelism, each of which has all of a loss.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sum: torch.Tensor | None = None
        self._count: torch.Tensor | None = None
        self._total: GlobalLoss | None = None
        self.normalizer: torch.Tensor | None = None
        self.parts = 0
        self._expected = 1

    def add(self, loss_sum: torch.Tensor, count: torch.Tensor, *, micro_batches: int) -> None:
        """Counts one of `micro_batches` parts."""
        if self._sum is None or self._count is None:
            self._sum, self._count = loss_sum.detach(), count
            first = count.clone()
            if self._mesh.dp_size > 1:
                all_reduce_(first, self._mesh.dp_group, what="the samples that count")
            self.normalizer = _nonzero(first) * (micro_batches * self._mesh.degrees["cp"])
        else:
            self._sum, self._count = self._sum + loss_sum.detach(), self._count + count
        self.parts += 1
        self._expected = micro_batches

    def start_total(self) -> None:
        """Starts the sum over the data ranks, which goes on while backward computes."""
        assert self._sum is not None and self._count is not None
        self._total = GlobalLoss(self._sum, self._count, self._mesh)

    def abandon(self) -> None:
        """Ends what :meth:`start_total` started, after the step has failed."""
        if self._total is not None:
            self._total.abandon()

    def mean(self) -> torch.Tensor:
        """The global mean loss."""
        assert self._total is not None
        return self._total.mean()

    def count(self) -> torch.Tensor:
        """The global count, in fp64."""
        assert self._total is not None
        return self._total.total()[1]

    def correction(self) -> torch.Tensor | None:
        """The factor that gradients still need, once every micro-batch was counted; None for no factor."""
        if self.parts == self._expected == 1:
            return None
        assert self.normalizer is not None
        return self.normalizer.double() / (_nonzero(self.count()) * self._mesh.degrees["cp"])


def _nonzero(count: torch.Tensor) -> torch.Tensor:
    """`count`, or 1 if nothing was counted: the loss is then zero, and so are the gradients."""
    return torch.where(count == 0, 1.0, count)


def check_has_gradient(loss: torch.Tensor) -> None:
    """Refuses a loss without a gradient.

    Raises:
        ValueError: autograd has no graph of it.
    """
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: what loss_fn returned, or engine.backward was given, does not depend on any "
            "trained parameter. Compute it from the model's output, without .detach(), .item(), torch.tensor(...) or "
            "torch.no_grad()"
        )


def _check_count(count: Any, what: str) -> None:
    """Checks a count that is a Python number. One on a GPU is not read, since that would wait for the GPU."""
    if isinstance(count, Real) and not 0 <= float(count) < math.inf:
        raise ValueError(f"{what} a sum and a count of {count}; the count must be 0 or more, and finite")


def _is_count(value: Any) -> bool:
    return (_is_scalar(value) and not value.is_complex()) or isinstance(value, Real)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {'complex numbers and ' * value.is_complex()}shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {' and '.join(map(_described, value)) or 'nothing'}"
    return repr(value)


def model_loss(output: Any, targets: Any = None) -> Any:
    """The loss in the model's output, as a sum and a count where it is a mean over targets; for ``loss_fn=``.

    Models of transformers compute ``output.loss`` of the ``labels`` among their inputs: a mean over the labels that are
    not -100. Batches differ in how many these are, so a mean over micro-batches and ranks must be weighted by them.
    This finds out how many each mean is over. The result is then that of the whole batch on one process.

    The labels are given to the model, among its other inputs: ``engine.step(batch, batch["labels"])``, where `batch` is
    a dict with ``input_ids``, ``attention_mask`` and ``labels``.

    Args:
        output: what the model returned: with an attribute or a key ``loss``, a scalar.
        targets: not used: the model has had its labels.

    Returns:
        ``(sum, count)`` of a loss that holds one mean over targets: a cross entropy, or a sum divided by a count. Any
        other loss is returned as it is, and counts as a mean over the samples.

    Raises:
        TypeError: the output has no loss.

    Examples:
        >>> logits, labels = torch.zeros(3, 5, requires_grad=True), torch.tensor([1, 2, -100])
        >>> output = {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
        >>> [round(value.item(), 4) for value in ts.model_loss(output)]  # of two labels
        [3.2189, 2.0]
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"loss_fn is ts.model_loss, and the model's output, {kind_of(output)}, has no loss: give the model "
            f"its labels among the inputs, as in engine.step({{'input_ids': tokens, 'labels': labels}}, labels), or "
            f"pass a loss_fn that computes the loss from output and targets"
        )
    means = means_of(loss) if loss.requires_grad else [getattr(loss, _MEAN_OVER, None)]
    if len(means) != 1 or means[0] is None:
        return loss
    count = means[0].to(loss.device)
    # A mean over nothing is NaN.
    return torch.where(count == 0, 0.0, loss) * count, count


class MeansWithoutGraphs(TorchFunctionMode):
    """Inside, the mean of a cross entropy knows how many targets it is over, without a graph that would say so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            _note(result, *args, **(kwargs or {}))
        return result


def _note(
    result: torch.Tensor,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> None:
    """Notes what the result of a call of ``F.cross_entropy`` with these arguments is a mean over."""
    if reduction == "mean" and size_average is None and reduce is None and not target.is_floating_point():
        counts = target != ignore_index
        over = counts.sum() if weight is None else weight[target.where(counts, 0)].where(counts, 0).sum()
        setattr(result, _MEAN_OVER, over)
