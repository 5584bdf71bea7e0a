"""Logits that are not computed, in a tensor that looks like the computed ones.

A cross entropy does not need the logits: it can be computed a tile at a time. Other code may need them. So within a
step a model's output layer returns a tensor of the logits' shape that only keeps the layer's input and weight. Layout
changes, scales, caps and casts of it are noted, and a loss takes tiles. Any other operation computes the logits, once.
From then on everything is as if they had existed from the beginning: views share memory, and gradients are those of all
uses.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensorshard.loss.deferred_tensor import DeferredTensor, Rule
from tensorshard.loss.logits.linear_logits import LinearLogits
from tensorshard.torch_private.dispatch import make_wrapper_tensor

Note = Callable[[str, bool], None]
"""Called at each use of logits, with the name of the operation and whether it computed them."""


class Source:
    """One call of an output layer, and all tensors that stand for its logits or for what was made of them.

    Args:
        rules: for the operations that need not compute them.
        note: called at each use.
    """

    def __init__(self, rules: Mapping[Any, Rule], note: Note) -> None:
        self.rules = rules
        self._note = note
        self.computed = False
        self.tiled = False
        self._members: list[weakref.ref[PendingLogits]] = []

    def add(self, member: "PendingLogits") -> None:
        self._members.append(weakref.ref(member))

    def take_tiles(self, by: str) -> None:
        """Called when the operation `by` computes its result a tile at a time."""
        self.tiled = True
        self._note(by, False)

    def compute(self, by: str) -> None:
        """Computes all tensors of this source that still exist: from now on an operation may write to memory that they
        share."""
        if self.computed:
            return
        self.computed = True
        self._note(by, True)
        for reference in self._members:
            member = reference()
            if member is not None:
                member.full()

    def is_reachable(self) -> bool:
        """Whether a tensor of this source exists that is not computed."""
        return not self.computed and any(reference() is not None for reference in self._members)


class PendingLogits(DeferredTensor):
    """Logits, or the result of noted operations on them, that are not computed.

    Attributes:
        linear: the logits, represented by the layer's input and weight.
        normalized: whether this is their log-softmax.
        source: the call of the output layer.
        seen_as: the type that this tensor shows.
    """

    linear: LinearLogits
    normalized: bool
    source: Source
    seen_as: torch.dtype
    _made: Callable[[], torch.Tensor]
    _with_grad: bool
    _full: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        linear: LinearLogits,
        dtype: torch.dtype,
        normalized: bool,
        source: Source,
        made: Callable[[], torch.Tensor] | None,
        grad: bool,
    ) -> "PendingLogits":
        self = make_wrapper_tensor(cls, linear.shape, dtype, linear.features.device)
        self.linear, self.normalized, self.source, self.seen_as = linear, normalized, source, dtype
        self._made = made or (lambda: linear.compute(dtype))
        self._with_grad = grad
        self._full = None
        source.add(self)
        return self

    def full(self) -> torch.Tensor:
        """The computed logits. They are computed at the first call."""
        if self._full is None:
            with torch.set_grad_enabled(self._with_grad):
                self._full = self._made()
        return self._full

    def before_full(self, func: Rule) -> None:
        if func is torch.autograd.grad and self.source.tiled and not self.source.computed:
            raise RuntimeError(
                "the gradient of logits was asked for, and a loss took these logits a tile at a time, so that nothing "
                "of it has gone through them. Call logits.retain_grad() before the loss, or use "
                "Plan(logits='whole')"
            )
        self.source.compute(name_of(func))

    def rule(self, func: Rule) -> Rule | None:
        return None if self.source.computed else self.source.rules.get(func)

    def classes_at(self, dim: Any) -> bool:
        """Whether `dim` is the dimension of the classes."""
        return isinstance(dim, int) and dim % len(self.linear.shape) == self.linear.class_dim


def make_pending(
    linear: LinearLogits,
    dtype: torch.dtype,
    normalized: bool,
    source: Source,
    made: Callable[[], torch.Tensor] | None = None,
) -> PendingLogits:
    """A tensor that stands for the logits of `linear`, or for their log-softmax, and shows the type `dtype`.

    Args:
        made: computes them; None: `linear` does.
    """
    about = (linear, dtype, normalized, source, made, torch.is_grad_enabled())
    return _Tied.apply(linear.features, linear.weight, linear.bias, about)


class _Tied(torch.autograd.Function):
    """Connects a tensor that stands for logits to the layer's input and weight in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, about: tuple[Any, ...]
    ) -> PendingLogits:
        linear, dtype, normalized, *_ = about
        ctx.set_materialize_grads(False)
        ctx.linear, ctx.about = linear.detached(), (dtype, normalized)
        return PendingLogits(*about)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None, None
        dtype, normalized = ctx.about

        def logits(linear: LinearLogits) -> torch.Tensor:
            computed = linear.compute(dtype)
            return computed.log_softmax(linear.class_dim) if normalized else computed

        return *gradients_by(logits, ctx.linear, ctx.needs_input_grad, grads[0]), None


def gradients_by(
    function: Callable[[LinearLogits], torch.Tensor],
    linear: LinearLogits,
    needed: tuple[bool, ...],
    grad: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of features, weight and bias through `function` of the logits, which is computed again.

    Args:
        needed: which of the three gradients are needed.
        grad: the gradient of the result of `function`.
    """
    given = (linear.features, linear.weight, linear.bias)
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(given, needed, strict=False)]
        features, weight, bias = leaves
        assert features is not None and weight is not None
        result = function(linear.with_tensors(features, weight, bias))
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad))
    return tuple(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)


def derived(
    logits: PendingLogits,
    linear: LinearLogits,
    func: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    normalized: bool | None = None,
) -> Any:
    """The result of `func` on `logits`: logits of `linear`. If it has to be computed, ``func(logits, *args,
    **kwargs)``."""
    return make_pending(
        linear,
        dtype or logits.seen_as,
        logits.normalized if normalized is None else normalized,
        logits.source,
        lambda: func(logits.full(), *args, **kwargs),
    )


def name_of(func: Any) -> str:
    """The name of `func` for messages."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)
