"""The logits of a linear layer, represented by its input and weight, and what can be computed of them a tile at a
time.

Also here: logits of which each rank has a shard of the classes: deferred logits that a cross entropy takes as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.layers.arguments import check_indices
from tensorshard.layers.split_linear import parallel_linear
from tensorshard.loss.formulas import CrossEntropySpec
from tensorshard.loss.logits.deferred_logits import (
    MINUS,
    OVER,
    PLUS,
    TANH,
    TIMES,
    DeferredLogits,
    Form,
    Gradients,
    Rule,
    Source,
    defer,
)
from tensorshard.loss.loss_arguments import ClassShard
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy
from tensorshard.loss.tiled_loss import Extras, head_loss, loss_with_gradients
from tensorshard.loss.tiles import Precision, head_tiles, largest_logits
from tensorshard.loss.two_passes import HeadSpec, choose_keep


@dataclass(frozen=True)
class LinearLogits(Form):
    """softcap * tanh((scale * features @ weight.T + bias) / softcap) + shift, not computed. Without a softcap, there is
    no tanh.

    Args:
        features: of the shape of the logits, with the features in the dimension of the classes.
        class_dim: that dimension, counted from the front.
        weight: [V, D]: this rank's rows.
        bias: [V] or None.
        class_shard: which classes these are, and which ranks have the others.
        at_once: whether a loss's gradients are computed in forward. They are as large as the weight, so this is off
            where several forwards come before the first backward.
        normalized: whether the log-softmax of these logits is meant.
    """

    features: torch.Tensor
    class_dim: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    class_shard: ClassShard
    scale: float = 1.0
    softcap: float | None = None
    shift: float = 0.0
    at_once: bool = True
    normalized: bool = False

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        return self.features

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.features.shape
        return (*shape[: self.class_dim], self.class_shard.classes, *shape[self.class_dim + 1 :])

    @property
    def requires_grad(self) -> bool:
        tensors = (self.features, self.weight, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @property
    def token_shape(self) -> torch.Size:
        """The shape of the logits without the dimension of the classes."""
        return torch.Size([size for dim, size in enumerate(self.features.shape) if dim != self.class_dim])

    # -- operations that do not compute them --

    def sources(self) -> tuple[torch.Tensor | None, ...]:
        return self.features, self.weight, self.bias

    def laid_out(self, tensor: torch.Tensor, class_dim: int) -> "LinearLogits":
        return replace(self, features=tensor, class_dim=class_dim)

    def detached(self) -> "LinearLogits":
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, features=self.features.detach(), weight=self.weight.detach(), bias=bias)

    def cast(self, before: torch.dtype, dtype: torch.dtype) -> "LinearLogits | None":
        return self if torch.promote_types(before, dtype) == dtype else None  # a narrower type would round the logits

    def changed(self, func: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype) -> "LinearLogits | None":
        if self.normalized:
            return None
        if func in TANH:
            return replace(self, softcap=1.0) if not args and self.softcap is None and self.shift == 0 else None
        if len(args) != 1:
            return None
        (other,) = args
        if not isinstance(other, int | float):
            return self.plus_bias(other) if func in PLUS else None
        if func in TIMES:
            return self.times(float(other))
        if func in OVER and other != 0:
            return self.times(1.0 / other)
        if func in PLUS:
            return replace(self, shift=self.shift + float(other))
        return replace(self, shift=self.shift - float(other)) if func in MINUS else None

    def times(self, factor: float) -> "LinearLogits | None":
        """`factor` times these logits; None if they would have to be computed for that."""
        if self.softcap is not None and not factor > 0:
            return None
        bias = None if self.bias is None else self.bias * factor
        softcap = None if self.softcap is None else self.softcap * factor
        return replace(self, scale=self.scale * factor, bias=bias, softcap=softcap, shift=self.shift * factor)

    def plus_bias(self, other: Any) -> "LinearLogits | None":
        """These logits with a number added for each class of all ranks; None if `other` is something else, or if they
        were capped before."""
        if not isinstance(other, torch.Tensor) or isinstance(other, DeferredLogits):
            return None
        last = self.class_dim == len(self.shape) - 1
        if not last or other.numel() != self.class_shard.classes or other.shape[-1:] != self.shape[-1:]:
            return None
        if other.ndim > len(self.shape) or self.softcap is not None or other.dtype != self.weight.dtype:
            return None
        own = other.reshape(-1).narrow(0, self.class_shard.start, len(self.weight))
        return replace(self, bias=own if self.bias is None else self.bias + own)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """A hook that looks at no gradient only needs to run when backward begins. Any other gets the logits' gradient,
        so they are computed."""
        if getattr(hook, "takes_gradient", True) or not self.features.requires_grad:
            return NotImplemented
        return self.features.register_hook(hook)

    # -- results --

    def full(self, dtype: torch.dtype) -> torch.Tensor:
        features = self.features.movedim(self.class_dim, -1)
        features = features if self.scale == 1.0 else features * self.scale
        if self.class_shard.group is None:
            logits = F.linear(features, self.weight, self.bias)
        else:
            part = parallel_linear(features, self.weight, self.bias, 1, self.class_shard.group)
            logits = collectives.gather(part, -1, self.class_shard.group, size=self.class_shard.classes)
        logits = self._capped(logits.to(dtype))
        logits = logits if self.shift == 0 else logits + self.shift
        logits = logits.log_softmax(-1) if self.normalized else logits
        return logits.movedim(-1, self.class_dim)

    def gradients(self, dtype: torch.dtype) -> Gradients:
        detached = self.detached()
        return lambda needed, grad: detached.gradients_by(lambda form: form.full(dtype), needed, grad)

    def gradients_by(
        self, function: "Callable[[LinearLogits], torch.Tensor]", needed: Sequence[bool], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of features, weight and bias through `function` of these logits, which is computed again.

        Args:
            needed: which of the three gradients are needed.
            grad: the gradient of the result of `function`.
        """
        with torch.enable_grad():
            leaves = [
                None if t is None else t.detach().requires_grad_(need)
                for t, need in zip(self.sources(), needed, strict=False)
            ]
            features, weight, bias = leaves
            assert features is not None and weight is not None
            result = function(replace(self, features=features, weight=weight, bias=bias))
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        gradients = iter(torch.autograd.grad(result, wanted, grad))
        return tuple(next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves)

    def loss(self, targets: torch.Tensor, class_weight: torch.Tensor | None, spec: CrossEntropySpec) -> Any:
        """The cross entropy of `targets`, whose shape is that of the logits without the classes, and the optional
        outputs.

        Raises:
            IndexError: a target is outside the classes.
        """
        check_indices(targets, spec.classes, "target", "classes", spec.ignore_index)
        spec = replace(spec, softcap=self.softcap)
        features, bias, precision = self._flat(), self.bias, self._precision()
        keep = choose_keep(None, features, self.weight, bias, None, self.softcap)
        head = HeadSpec(spec, self.class_shard.start, self.class_shard.group, precision, keep=keep)
        targets = targets.reshape(-1)
        if class_weight is not None:
            class_weight = class_weight.to(precision.wide)
        scalar = spec.reduction != "none" and not spec.return_lse and not spec.return_token_accuracy
        if scalar and self.at_once and self.requires_grad:
            features = features if self.scale == 1.0 else features * self.scale
            return loss_with_gradients(features, self.weight, targets, bias, class_weight, head)
        head = replace(head, scale=self.scale)
        loss, lse, accuracy = head_loss(features, self.weight, targets, bias, class_weight, head, Extras())
        return spec.result(loss, lse, accuracy, self.token_shape)

    def log_sum_exp(self) -> torch.Tensor:
        """The log-sum-exp over the classes, of the shape of the logits without the classes; differentiable."""
        ignored = torch.zeros(self.token_shape, dtype=torch.long, device=self.features.device)
        spec = CrossEntropySpec(self.class_shard.classes, ignore_index=0, reduction="sum", return_lse=True)
        lse = self.loss(ignored, None, spec).lse
        return lse + self.shift if self.shift else lse

    def largest(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits and their classes, along a last dimension; without gradients."""
        features = self._flat().detach()
        tiles = head_tiles(features, self.weight, self.bias, normalize=False, scale=self.scale)
        values, classes = largest_logits(tiles, k, self.class_shard.start, self.class_shard.group, self.softcap)
        values = values + self.shift if self.shift else values
        return values.view(*self.token_shape, k), classes.view(*self.token_shape, k)

    def pick(self, classes: torch.Tensor) -> torch.Tensor:
        """The logits of `classes` [..., k], of which this rank has all; differentiable."""
        flat, columns = self._flat() * self.scale, classes.reshape(-1, classes.size(-1))
        logits = torch.bmm(self.weight[columns], flat[:, :, None]).squeeze(2)
        logits = logits if self.bias is None else logits + self.bias[columns]
        return self._capped(logits).view(classes.shape)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _flat(self) -> torch.Tensor:
        return self.features.movedim(self.class_dim, -1).reshape(-1, self.features.size(self.class_dim))

    def _precision(self) -> Precision:
        """Products have the type of the tensors, as in a linear layer. Everything else is wider."""
        dtype = self.features.dtype
        return Precision(dtype, torch.float64 if dtype == torch.float64 else torch.float32)


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
