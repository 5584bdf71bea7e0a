"""Logits whose classes are split over a group, in a tensor that looks like the full logits.

A loss does not need the classes of other ranks, but other code may. So the output layer of a model returns its own
shard as a tensor of the full shape. Layout changes, casts and scaling are done to the shard, and a cross entropy takes
the shard. For any other operation, the shards are gathered to the full tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.loss import layout_rules
from tensorshard.loss.deferred_tensor import (
    DETACHES,
    MOVES,
    RESHAPES,
    TYPE_CASTS,
    DeferredTensor,
    Rule,
    type_asked_for,
)
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy
from tensorshard.torch_private.dispatch import make_wrapper_tensor
from tensorshard.torch_private.tensors import tensor_version


class SplitLogits(DeferredTensor):
    """This rank's shard of a tensor, under the shape of the full one. Made by :func:`split_logits`.

    An operation that needs the full tensor is a collective: every rank of the group must call it. A hook that is
    registered on this tensor gets the gradient of this rank's shard.

    Attributes:
        shard: a plain tensor. Its type may be narrower than the `dtype` of this tensor.
        class_dim: the dimension along which it is cut, counted from the front.
        group: the ranks that hold the shards.
    """

    shard: torch.Tensor
    class_dim: int
    group: dist.ProcessGroup
    _shape: tuple[int, ...]
    _dtype: torch.dtype
    _aliases: "_Aliases"

    @staticmethod
    def __new__(
        cls,
        shard: torch.Tensor,
        class_dim: int,
        classes: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        aliases: "_Aliases",
    ) -> "SplitLogits":
        shape = (*shard.shape[:class_dim], classes, *shard.shape[class_dim + 1 :])
        self = make_wrapper_tensor(cls, shape, dtype, shard.device)
        self.shard, self.class_dim, self.group = shard, class_dim, group
        self._shape, self._dtype, self._aliases = shape, dtype, aliases
        return self

    @property
    def classes(self) -> int:
        """Number of classes of all ranks."""
        return self._shape[self.class_dim]

    def full(self) -> torch.Tensor:
        """The full tensor, a plain one, gathered once. A collective of the group."""
        gathered = self._aliases.full_of(self)
        if gathered is None:
            with torch.enable_grad():  # a later caller may need its graph
                joined = collectives.gather(self.shard, self.class_dim, self.group, size=self.classes)
                gathered = joined.to(self._dtype)
            self._aliases.gathered(self, gathered)
        return gathered

    def rule(self, func: Rule) -> Rule | None:
        """The function that does `func` to the shard; None if `func` needs the full tensor."""
        if self._aliases.modified(self) or (func in _OF_VIEWS and self._aliases.full_of(self) is not None):
            return None
        return _OF_VIEWS.get(func) or _OF_VALUES.get(func)


def split_logits(
    shard: torch.Tensor, dim: int, classes: int, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> SplitLogits:
    """Makes the tensor of which this rank has `shard`, without gathering it.

    Args:
        shard: this rank's shard along `dim`, as :func:`tensorshard.distributed.scatter` cuts it.
        classes: elements of the full tensor along `dim`.
        group: the ranks that hold the shards.
        dtype: of the full tensor: the shard's by default, else a wider one.
    """
    return _Full.apply(shard, dim % shard.ndim, classes, group, dtype or shard.dtype, _Aliases())


class _Full(torch.autograd.Function):
    """Connects the full tensor to its shard in autograd's graph: the shard gets its part of the full gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, *about: Any) -> SplitLogits:
        ctx.dim, _, ctx.group, *_ = about
        ctx.dtype = shard.dtype
        return SplitLogits(shard, *about)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shard = collectives.scatter(grads[0], ctx.dim, ctx.group, grad_scale=1.0)
        return set_mark(shard, None).to(ctx.dtype), None, None, None, None, None


class _Aliases:
    """Views of one full tensor: an in-place operation on one of them changes all.

    A gathered tensor may be modified, directly or through a view. The shard is then out of date.
    """

    def __init__(self) -> None:
        # A shard, the full tensor that was gathered from it, and the version of that tensor at the time.
        self._gathered: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def gathered(self, logits: SplitLogits, full: torch.Tensor) -> None:
        self._gathered.append((logits.shard, full, tensor_version(full)))

    def full_of(self, logits: SplitLogits) -> torch.Tensor | None:
        """The full tensor of `logits`, if it was gathered before."""
        self.modified(logits)
        return next((full for shard, full, _ in self._gathered if shard is logits.shard), None)

    def modified(self, logits: SplitLogits) -> bool:
        """Whether the full tensor of `logits` was modified, so that its shard is out of date.

        Raises:
            RuntimeError: the full tensor of another view was modified, and `logits` does not have the change.
        """
        own = False
        for shard, full, version in self._gathered:
            if tensor_version(full) != version:
                if shard is not logits.shard:
                    raise RuntimeError(
                        "logits that are split over tensor-parallel ranks were modified in place, and are read "
                        "through a view taken before or after: write to a clone() of them, or take views of that"
                    )
                own = True
        return own


def _like(logits: SplitLogits, shard: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Any:
    """A view of `logits`, of which this rank has `shard`."""
    dim = logits.class_dim if dim is None else dim
    return _Full.apply(shard, dim, logits.classes, logits.group, dtype or logits._dtype, logits._aliases)


def _copied(logits: SplitLogits, shard: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    return split_logits(shard, logits.class_dim, logits.classes, logits.group, dtype)


def _reshape(func: Rule, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    new = layout_rules.reshaped(func, logits._shape, logits.class_dim, args, kwargs)
    if new is None:
        return NotImplemented
    shape, dim = new
    shape[dim] = logits.shard.size(logits.class_dim)
    return _like(logits, logits.shard.reshape(shape), dim)


def _move(func: Rule, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    dim = layout_rules.moved(func, len(logits._shape), logits.class_dim, args, kwargs)
    return NotImplemented if dim is None else _like(logits, func(logits.shard, *args, **kwargs), dim)


def _index(func: Rule, logits: SplitLogits, index: Any) -> Any:
    new = layout_rules.indexed(index, logits._shape, logits.class_dim)
    return NotImplemented if new is None else _like(logits, logits.shard[new[0]], new[1])


def _contiguous(func: Rule, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    return _like(logits, func(logits.shard, *args, **kwargs))


def _cast(func: Rule, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    dtype = type_asked_for(func, args, kwargs)
    if dtype is None:
        return NotImplemented
    if dtype == logits._dtype:
        return logits
    if torch.promote_types(logits.shard.dtype, dtype) == dtype:
        # A wider type adds no information: the shard stays as it is, and fewer bytes travel if it is gathered.
        return _copied(logits, logits.shard, dtype)
    return _copied(logits, logits.shard.to(dtype))


def _scale(func: Rule, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    if kwargs or not all(isinstance(value, int | float) for value in args):
        return NotImplemented
    return _copied(logits, func(logits.shard.to(logits._dtype), *args))


def _detach(func: Rule, logits: SplitLogits) -> Any:
    return _like(logits, logits.shard.detach())


def _register_hook(func: Rule, logits: SplitLogits, hook: Callable[[torch.Tensor], Any]) -> Any:
    return logits.shard.register_hook(hook)


def _cross_entropy(func: Rule, logits: SplitLogits, target: Any, *args: Any, **kwargs: Any) -> Any:
    takes_classes = isinstance(target, torch.Tensor) and not target.is_floating_point()
    if logits.class_dim != min(1, len(logits._shape) - 1) or not takes_classes:
        return NotImplemented
    mark = ParallelMark(logits.class_dim, logits.classes, logits.group)
    return parallel_cross_entropy(set_mark(logits.shard.view_as(logits.shard), mark), target, *args, **kwargs)


_T: Any = torch.Tensor
# Operations whose result is a view of the full tensor, once that exists.
_OF_VIEWS: dict[Any, Rule] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(DETACHES, _detach),
    _T.contiguous: _contiguous,
    _T.__getitem__: _index,
}
_OF_VALUES: dict[Any, Rule] = {
    **dict.fromkeys(TYPE_CASTS, _cast),
    **dict.fromkeys((_T.mul, _T.div, _T.true_divide, _T.__mul__, _T.__rmul__, _T.__truediv__, _T.neg, _T.tanh), _scale),
    **dict.fromkeys((torch.mul, torch.div, torch.true_divide, torch.neg, torch.tanh, _T.__neg__), _scale),
    **dict.fromkeys((_T.clone, torch.clone), _scale),
    _T.register_hook: _register_hook,
    F.cross_entropy: _cross_entropy,
    parallel_cross_entropy: _cross_entropy,
}
