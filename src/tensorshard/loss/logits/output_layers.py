"""Which layers return logits that are not computed, and when.

Every linear layer outside of the model's blocks may be the model's output layer. The use of its output shows which one
is: a loss takes it in tiles. If something else needs the output computed, the layer computes it from then on.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import shard_range
from tensorshard.layers.arguments import autocast
from tensorshard.loss.formulas import CrossEntropySpec
from tensorshard.loss.logits.deferred_logits import DeferredLogits, Note, Rule, Source, defer, derived, name_of
from tensorshard.loss.logits.linear_logits import LinearLogits
from tensorshard.loss.loss_arguments import ClassShard
from tensorshard.loss.split_cross_entropy import parallel_cross_entropy
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.model.whole_sequences import is_part

# Results that are computed from a linear layer's logits a tile at a time: cross entropies, log-sum-exps, top k.


def _cross_entropy(
    func: Rule,
    logits: DeferredLogits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` of logits, or ``F.nll_loss`` of their log-softmax, which has no smoothing."""
    is_nll = func is F.nll_loss
    legacy = size_average is not None or reduce is not None
    if legacy or logits.form.normalized != is_nll or (is_nll and label_smoothing):
        return NotImplemented
    if not _takes_classes(logits, target) or not _takes_weights(logits, weight):
        return NotImplemented
    spec = CrossEntropySpec(logits.form.class_shard.classes, ignore_index, label_smoothing, reduction=reduction)
    logits.source.take_tiles(name_of(func))
    return logits.form.loss(target, weight, spec).to(logits.seen_as)


def _takes_classes(logits: DeferredLogits, target: Any) -> bool:
    """Whether `target` has a class for each sample of logits, along whose second dimension the classes are."""
    linear = logits.form
    second = linear.class_dim == min(1, len(linear.shape) - 1)
    if not second or not isinstance(target, torch.Tensor) or isinstance(target, DeferredLogits):
        return False
    is_integer = not target.is_floating_point() and target.dtype != torch.bool
    return is_integer and target.shape == linear.token_shape and target.device == logits.device and target.numel() > 0


def _takes_weights(logits: DeferredLogits, weight: torch.Tensor | None) -> bool:
    """Whether `weight` is none, or a weight for each class. torch's own error says what else is wrong."""
    return weight is None or (not weight.requires_grad and list(weight.shape) == [logits.form.class_shard.classes])


def _log_softmax(
    func: Rule, logits: DeferredLogits, dim: Any = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # torch.log_softmax has its dtype argument at this position
        dtype = _stacklevel
    dtype = dtype or logits.seen_as
    if logits.form.normalized or not logits.classes_at(dim) or logits.form.cast(logits.seen_as, dtype) is None:
        return NotImplemented
    form = replace(logits.form, normalized=True)
    return derived(logits, form, torch.log_softmax, (), {"dim": dim, "dtype": dtype}, dtype)


def _gather(func: Rule, logits: DeferredLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    """The log-probability of one class a token, for policy gradients and sequence scores."""
    linear = logits.form
    one = isinstance(index, torch.Tensor) and list(index.shape) == [
        1 if d == linear.class_dim else size for d, size in enumerate(linear.shape)
    ]
    if kwargs or not logits.form.normalized or not one or not logits.classes_at(dim) or index.numel() == 0:
        return NotImplemented
    spec = CrossEntropySpec(linear.class_shard.classes, ignore_index=-1, reduction="none")
    logits.source.take_tiles(name_of(func))
    losses = linear.loss(index.squeeze(linear.class_dim), None, spec).to(logits.seen_as)
    return -losses.unsqueeze(linear.class_dim)


def _our_cross_entropy(func: Rule, logits: DeferredLogits, target: Any, *args: Any, **kwargs: Any) -> Any:
    """``parallel_cross_entropy``, which has more options than torch's own."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    refused = [given.pop(name, None) for name in ("size_average", "reduce", "group", "softcap")]
    weight, linear = given.pop("weight", None), logits.form
    if any(value is not None for value in refused) or linear.normalized or linear.shift:
        return NotImplemented
    if not _takes_classes(logits, target) or not _takes_weights(logits, weight):
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    return linear.loss(target, weight, CrossEntropySpec(linear.class_shard.classes, **given))


def _log_sum_exp(func: Rule, logits: DeferredLogits, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, tuple | list) else []
    alone = len(dims) == 1 and logits.classes_at(dims[0])
    if kwargs or not alone or logits.form.normalized or logits.form.token_shape.numel() == 0:
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    result = logits.form.log_sum_exp().to(logits.seen_as)
    return result.unsqueeze(logits.form.class_dim) if keepdim else result


def _argmax(func: Rule, logits: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.classes_at(dim) or logits.form.token_shape.numel() == 0:
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    classes = logits.form.largest(1)[1].movedim(-1, logits.form.class_dim)
    return classes if keepdim else classes.squeeze(logits.form.class_dim)


def _topk(func: Rule, logits: DeferredLogits, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    linear = logits.form
    fits = isinstance(k, int) and 0 < k <= linear.class_shard.classes and linear.token_shape.numel() > 0
    if not fits or not largest or logits.form.normalized or not logits.classes_at(dim):
        return NotImplemented
    if logits.requires_grad and torch.is_grad_enabled() and linear.class_shard.group is not None:
        return NotImplemented
    logits.source.take_tiles(name_of(func))
    values, classes = linear.largest(k)
    if logits.requires_grad and torch.is_grad_enabled():
        values = _Picked.apply(linear.features, linear.weight, linear.bias, linear, values, classes)
    moved = [result.movedim(-1, linear.class_dim) for result in (values.to(logits.seen_as), classes)]
    return torch.return_types.topk(moved)  # type: ignore[attr-defined, arg-type]


def _max(func: Rule, logits: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.classes_at(dim):
        return NotImplemented
    largest = _topk(func, logits, 1, dim)
    if largest is NotImplemented:
        return NotImplemented
    results = largest if keepdim else [result.squeeze(logits.form.class_dim) for result in largest]
    return torch.return_types.max(list(results))  # type: ignore[attr-defined, arg-type]


class _Picked(torch.autograd.Function):
    """The logits of some classes of each token, which were computed before."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: LinearLogits,
        values: torch.Tensor,
        classes: torch.Tensor,
    ) -> torch.Tensor:
        ctx.linear = linear.detached()
        ctx.save_for_backward(classes)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (classes,) = ctx.saved_tensors
        gradients = ctx.linear.gradients_by(lambda linear: linear.pick(classes), ctx.needs_input_grad, grads[0])
        return *gradients, None, None, None


_T: Any = torch.Tensor

TILED: dict[Any, Rule] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _cross_entropy,
    parallel_cross_entropy: _our_cross_entropy,
    **dict.fromkeys((_T.log_softmax, torch.log_softmax, F.log_softmax), _log_softmax),
    **dict.fromkeys((_T.gather, torch.gather), _gather),
    **dict.fromkeys((_T.logsumexp, torch.logsumexp), _log_sum_exp),
    **dict.fromkeys((_T.argmax, torch.argmax), _argmax),
    **dict.fromkeys((_T.topk, torch.topk), _topk),
    **dict.fromkeys((_T.max, torch.max), _max),
}
"""Operations whose results are computed from one tile of logits at a time, and their rules."""


FEWEST_CLASSES = 8192
"""With fewer classes, "auto" computes logits: they are no larger than other activations."""

SMALLEST_BYTES = 32 << 20
""""auto" computes logits of fewer bytes."""

SMALLEST_SHARE = 1 / 16
""""auto" computes logits that take less than this share of the bytes of the model's states on this rank."""


def defer_linear(linear: LinearLogits, note: Note) -> tuple[DeferredLogits, Source]:
    """A tensor that stands for the logits of `linear`, and the source that knows all tensors made from it.

    Args:
        note: called at each use.
    """
    source = Source(TILED, note)
    return defer(linear, linear.features.dtype, source), source


@dataclass
class OutputLayer:
    """A linear layer that may be a model's last.

    Args:
        name: in the model.
        transposed: whether its weight is [inputs, outputs].
        classes: of all ranks.
        group: the tensor-parallel ranks that the classes are split over, or None.
        refused: why its logits are always computed; None if they need not be.
    """

    name: str
    module: nn.Module
    transposed: bool
    classes: int
    group: dist.ProcessGroup | None = None
    refused: str | None = None
    # The uses of its outputs so far.
    tiled_by: set[str] = field(default_factory=set)
    computed_by: set[str] = field(default_factory=set)
    size: tuple[int, int] = (0, 0)  # of the last logits: tokens, and bytes in fp32 on this rank
    is_whole: bool = False  # whether its logits are computed at once from now on

    def note(self, name: str, computed: bool) -> None:
        (self.computed_by if computed else self.tiled_by).add(name)

    def linear(self, features: torch.Tensor, at_once: bool) -> LinearLogits | None:
        """Its logits for `features`, not computed; None if they should be computed."""
        weight, bias = self.module.weight, self.module.bias
        assert isinstance(weight, torch.Tensor)
        given = (features, weight) if bias is None else (features, weight, bias)
        if any(isinstance(tensor, DeferredLogits | DTensor) for tensor in given) or features.numel() == 0:
            return None
        features, weight, bias = autocast(features, weight, bias)  # type: ignore[arg-type, assignment]
        if self.transposed:
            weight = weight.t()
        if features.dtype != weight.dtype or features.size(-1) != weight.size(1):
            return None
        start = 0
        if self.group is not None:
            start, width = shard_range(self.classes, self.group.size(), self.group.rank())
            if width != len(weight):
                return None
        shard = ClassShard(start, self.classes, self.group)
        return LinearLogits(features, features.ndim - 1, weight, bias, shard, at_once=at_once)  # type: ignore[arg-type]


class OutputLogits:
    """Decides whether a model's output layers return logits that are not computed.

    They may do so within a step or an evaluation. Elsewhere the use of a model's output is not known.

    Args:
        mode: as in :class:`tensorshard.Plan`.
        layers: those that may be output layers.
        state_bytes: bytes of weights, gradients and optimizer states on a rank, the same number on every rank.
        at_once: as in :class:`LinearLogits`.
    """

    def __init__(
        self, mode: str = "whole", layers: Iterable[OutputLayer] = (), state_bytes: int = 0, *, at_once: bool = True
    ) -> None:
        self._mode = mode
        self._layers = [layer for layer in layers if mode != "auto" or layer.classes >= FEWEST_CLASSES]
        self._state_bytes = state_bytes
        self._at_once = at_once
        self._active = False
        self._sources: list[Source] = []
        for layer in self._layers:
            if layer.refused is None:
                wrap_forward(layer.module, Role.UNCOMPUTED_LOGITS, partial(self._forward, layer))

    @contextmanager
    def pending(self) -> Iterator[None]:
        """A context in which output layers may return logits that are not computed."""
        for layer in self._layers:  # not during a step: recomputation must do what forward did
            seen = layer.computed_by
            layer.is_whole = bool(seen) and (self._mode == "auto" or not layer.tiled_by)
        before, self._active = self._active, True
        try:
            yield
        finally:
            self._active = before
            self._sources.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether there are logits that are not computed and may still be needed."""
        return any(source.is_reachable() for source in self._sources)

    def compute_pending(self) -> None:
        """Called after the loss, before backward and before weights change: computes the logits that are still referred
        to."""
        for source in self._sources:
            if source.is_reachable():
                source.compute("something that kept them after the loss")
        self._sources.clear()

    def _forward(self, layer: OutputLayer, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        wanted = self._active and not layer.is_whole and len(args) == 1 and not kwargs
        if not wanted or not isinstance(args[0], torch.Tensor):
            return forward(*args, **kwargs)
        sequence: Any = args[0] if is_part(args[0]) else None
        features = args[0] if sequence is None else sequence.local
        splits_features = sequence is not None and sequence.split_dim == sequence.ndim - 1
        linear = layer.linear(features, self._at_once) if self._pays(layer, features) and not splits_features else None
        if linear is None:
            return forward(*args, **kwargs)
        logits, source = defer_linear(linear, layer.note)
        self._sources.append(source)
        return logits if sequence is None else sequence.like(logits)

    def _pays(self, layer: OutputLayer, features: torch.Tensor) -> bool:
        tokens = features.numel() // max(1, features.size(-1))
        ranks = 1 if layer.group is None else layer.group.size()
        layer.size = tokens, 4 * tokens * layer.classes // ranks
        if self._mode == "tiled":
            return True
        bound = max(SMALLEST_BYTES, SMALLEST_SHARE * self._state_bytes)
        return layer.size[1] >= bound

    # -- description --

    def describe(self) -> str | None:
        """What was chosen for each layer that may be the output layer, and why; None if the plan says "whole"."""
        if self._mode == "whole":
            return None
        fewest = f"{FEWEST_CLASSES:,} outputs or more" if self._mode == "auto" else "outputs"
        sentences = [self._sentence(layer) for layer in self._layers]
        sentences = sentences or [f"whole: no linear layer outside of the model's blocks has {fewest}"]
        return "\n".join(f"logits         {sentence}" for sentence in sentences)

    def _sentence(self, layer: OutputLayer) -> str:
        if layer.refused is not None:
            return f"{layer.name}: whole: {layer.refused}"
        tokens, size = layer.size
        if not tokens:
            return f"{layer.name}: {self._to_be_decided()}"
        what = f"{tokens:,} x {layer.classes:,} logits of {size / 1e6:.1f} MB"
        by = " and ".join(sorted(layer.computed_by))
        if layer.computed_by and not layer.tiled_by:
            return f"{layer.name}: whole ({what}): {by} needs them, and no loss that takes tiles does"
        if layer.computed_by and self._mode == "auto":
            return f"{layer.name}: whole ({what}): {by} needs them, beside a loss that takes tiles"
        if layer.tiled_by:
            beside = f"; computed for {by} all the same" if by else ""
            return f"{layer.name}: tiled ({what} are not held){beside}"
        if self._mode == "auto":
            return f"{layer.name}: whole ({what}): {self._bound()}"
        return f"{layer.name}: tiled ({what}), of which nothing was used"

    def _to_be_decided(self) -> str:
        if self._mode == "tiled":
            return "tiled, where the loss takes tiles"
        return f"the first batch decides: {self._bound()}"

    def _bound(self) -> str:
        share = SMALLEST_SHARE * self._state_bytes
        if share > SMALLEST_BYTES:
            return f"tiled from {share / 1e6:.0f} MB on, 1/16 of the rank's weights, gradients and optimizer states"
        return f"tiled from {SMALLEST_BYTES / 1e6:.0f} MB on"
