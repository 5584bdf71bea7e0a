"""Random numbers: every rank draws those of the whole tensor and keeps its own, so that they are the same for any
number of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tensorshard.context_parallel.exchanges import take
from tensorshard.context_parallel.layout_changes import cut_for
from tensorshard.context_parallel.rule_table import Signature, name_of, rule, writes
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_DROPOUT = Signature(lambda input, p=0.5, training=True, inplace=False: 0)
_TORCH_DROPOUT = Signature(lambda input, p, train: 0)


@rule("dropout")
def dropout(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Each position has its own random zeros."""
    call = _TORCH_DROPOUT.bind(args, kwargs) if "train" in kwargs else _DROPOUT.bind(args, kwargs)
    if call is None or call.get("inplace") or name_of(func) != "dropout":
        return NotImplemented
    x, p = call["input"], call["p"]
    if not call.get("training", call.get("train")) or p == 0:
        return x
    if not isinstance(x, SequenceTensor) or not 0 < p < 1:
        return NotImplemented
    return x * cut_for(_draw_noise(x, p), x.split_dim, x.sequence, x.group)


def _draw_noise(x: SequenceTensor, p: float) -> torch.Tensor:
    """What torch multiplies a whole tensor by: 0, or 1 / (1 - p)."""
    shape, dtype, device = x.shape, x.dtype, x.device
    noise: torch.Tensor = x.group.draw(lambda: torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p))
    return noise.div_(1 - p)


@rule("alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout", "rrelu")
def other_dropouts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Drawn and computed on whole tensors."""
    name = name_of(func)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 and name != "rrelu" else None))
    if training is False and name != "rrelu" and isinstance(args[0], SequenceTensor):
        return args[0]
    return NotImplemented


@rule("rand_like", "randn_like", "randint_like")
def like(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """New random numbers of the same shape."""
    x = args[0]
    if not isinstance(x, SequenceTensor):
        return NotImplemented
    shape, dtype, device = x.shape, x.dtype, x.device
    whole = x.group.draw(lambda: func(torch.empty(shape, dtype=dtype, device=device), *args[1:], **kwargs))
    return cut_for(whole, x.split_dim, x.sequence, x.group)


@rule("bernoulli", "normal", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal", "multinomial")
def drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Written in place: drawn whole. Others fall back, where all ranks draw the same whole tensor."""
    x = args[0]
    if not writes(name_of(func)) or not isinstance(x, SequenceTensor):
        return NotImplemented
    if any(isinstance(arg, torch.Tensor) for arg in (*args[1:], *kwargs.values())):
        return NotImplemented
    shape, dtype, device = x.shape, x.dtype, x.device
    whole = x.group.draw(lambda: func(torch.empty(shape, dtype=dtype, device=device), *args[1:], **kwargs))
    with torch.no_grad():
        x.local.copy_(take(whole, x.split_dim, x.sequence.index(x.group.rank)))
    return x


def attention_dropout(weights: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout of attention's weights."""
    return F.dropout(weights, p, training=True)
