"""Normalizations: local over features; over positions, with the statistics of the whole sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_GROUP_NORM = Signature(lambda input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: 0)
_BATCH_NORM = Signature(
    lambda input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5: 0
)


@rule("layer_norm", "rms_norm")
def layer_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Over the last dimensions."""
    x = args[0]
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape")
    if not isinstance(x, SequenceTensor) or shape is None or x.split_dim >= x.ndim - len(shape):
        return NotImplemented
    if any(isinstance(arg, SequenceTensor) for arg in (*args[1:], *kwargs.values())):
        return NotImplemented
    return x.like(func(x.local, *args[1:], **kwargs))


@rule("group_norm")
def group_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Over groups of channels and all positions."""
    call = _GROUP_NORM.bind(args, kwargs)
    if call is None or not isinstance(call["input"], SequenceTensor) or call["input"].split_dim < 2:
        return NotImplemented
    x, weight, bias = call["input"], call["weight"], call["bias"]
    shape = [1, -1] + [1] * (x.ndim - 2)
    y: Any = x.unflatten(1, (call["num_groups"], -1))
    dims = list(range(2, y.ndim))
    y = y - y.mean(dims, True)
    y = (y * ((y * y).mean(dims, True) + call["eps"]).rsqrt()).flatten(1, 2)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


@rule("batch_norm")
def batch_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Over the batch and all positions. Running statistics are updated equally on all ranks."""
    call = _BATCH_NORM.bind(args, kwargs)
    if call is None or not isinstance(call["input"], SequenceTensor) or call["input"].split_dim == 1:
        return NotImplemented
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if not call["training"]:
        return x.like(func(x.local, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"}))
    shape, dims = [1, -1] + [1] * (x.ndim - 2), [dim for dim in range(x.ndim) if dim != 1]
    count = x.numel() // x.shape[1]
    if count < 2:
        return NotImplemented  # torch's own error
    y: Any = x if x.dtype not in (torch.bfloat16, torch.float16) else x.float()
    mean = y.mean(dims)
    var = ((y - mean.view(shape)) ** 2).mean(dims)
    if call["running_mean"] is not None:
        with torch.no_grad():
            momentum = call["momentum"]
            call["running_mean"].lerp_(mean.detach().to(call["running_mean"].dtype), momentum)
            unbiased = var.detach() * count / (count - 1)
            call["running_var"].lerp_(unbiased.to(call["running_var"].dtype), momentum)
    y = (y - mean.view(shape)) * (var + call["eps"]).rsqrt().view(shape)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return y.to(x.dtype)
