"""Logits of which each rank has a shard of the classes: deferred logits that a cross entropy takes as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.loss.logits.deferred_logits import DeferredLogits, Form, Gradients, Rule, Source, defer
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy


@dataclass(frozen=True)
class Shard(Form):
    """This rank's shard of logits.

    Args:
        tensor: a plain tensor.
        class_dim: the dimension along which it is cut, counted from the front.
        classes: of all ranks.
        group: the ranks that have the shards.
    """

    tensor: torch.Tensor
    class_dim: int
    classes: int
    group: dist.ProcessGroup

    has_values = True

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        return (*shape[: self.class_dim], self.classes, *shape[self.class_dim + 1 :])

    def sources(self) -> tuple[torch.Tensor | None, ...]:
        return (self.tensor,)

    def laid_out(self, tensor: torch.Tensor, class_dim: int) -> "Shard":
        return replace(self, tensor=tensor, class_dim=class_dim)

    def detached(self) -> "Shard":
        return replace(self, tensor=self.tensor.detach())

    def cast(self, before: torch.dtype, dtype: torch.dtype) -> "Shard":
        if torch.promote_types(self.tensor.dtype, dtype) == dtype:
            # A wider type adds no information: the shard stays as it is, and fewer bytes travel if it is gathered.
            return self
        return replace(self, tensor=self.tensor.to(dtype))

    def changed(self, func: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> "Shard | None":
        if not all(isinstance(value, int | float) for value in args):
            return None
        return replace(self, tensor=func(self.tensor.to(dtype), *args))

    def full(self, dtype: torch.dtype) -> torch.Tensor:
        return collectives.gather(self.tensor, self.class_dim, self.group, size=self.classes).to(dtype)

    def gradients(self, dtype: torch.dtype) -> Gradients:
        dim, group, narrow = self.class_dim, self.group, self.tensor.dtype  # and not the shard's memory

        def own_part(needed: Sequence[bool], grad: torch.Tensor) -> tuple[torch.Tensor]:
            part = collectives.scatter(grad, dim, group, grad_scale=1.0)
            return (set_mark(part, None).to(narrow),)

        return own_part

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """The hook gets the gradient of this rank's shard."""
        return self.tensor.register_hook(hook)


def split_logits(
    shard: torch.Tensor, dim: int, classes: int, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> DeferredLogits:
    """Makes the tensor of which this rank has `shard`, without gathering it.

    Args:
        shard: this rank's shard along `dim`, as :func:`tensorshard.distributed.scatter` cuts it.
        classes: elements of the full tensor along `dim`.
        group: the ranks that have the shards.
        dtype: of the full tensor: the shard's by default, else a wider one.
    """
    return defer(Shard(shard, dim % shard.ndim, classes, group), dtype or shard.dtype, Source(_RULES))


def _cross_entropy(func: Rule, logits: DeferredLogits, target: Any, *args: Any, **kwargs: Any) -> Any:
    form: Shard = logits.form
    takes_classes = isinstance(target, torch.Tensor) and not target.is_floating_point()
    if form.class_dim != min(1, len(form.shape) - 1) or not takes_classes:
        return NotImplemented
    mark = ParallelMark(form.class_dim, form.classes, form.group)
    return parallel_cross_entropy(set_mark(form.tensor.view_as(form.tensor), mark), target, *args, **kwargs)


_RULES: dict[Any, Rule] = {F.cross_entropy: _cross_entropy, parallel_cross_entropy: _cross_entropy}
