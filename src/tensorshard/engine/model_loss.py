"""``ts.model_loss``: the loss that the model itself has computed, as models of transformers do of their labels."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tensorshard.common.kinds import kind_of
from tensorshard.torch_private.autograd import means_of

_MEAN_OVER = "_tensorshard_mean_over"


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
