"""Tokens to experts, and lookups in tables."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

_EMBEDDING = Signature(
    lambda input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False: 0
)
_GROUPED = Signature(lambda a, b, offs=None, bias=None, out_dtype=None: 0)
_GROUPED_NAMES = {"mat_a": "a", "mat_b": "b", "input": "a", "weight": "b", "mat2": "b", "self": "a"}


@rule("embedding")
def embedding(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table. (``torch.embedding`` has the table first.)"""
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return NotImplemented
    call = _EMBEDDING.bind(args, kwargs)
    if call is None or call["max_norm"] is not None or call["scale_grad_by_freq"]:
        return NotImplemented
    ids, weight = call["input"], call["weight"]
    if not isinstance(ids, SequenceTensor) or isinstance(weight, SequenceTensor):
        return NotImplemented
    return ids.like(func(ids.local, weight, padding_idx=call["padding_idx"], sparse=call["sparse"]))


@rule("one_hot")
def one_hot(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One of a known number of classes."""
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    x = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    if classes == -1 or not isinstance(x, SequenceTensor):
        return NotImplemented
    return x.like(func(x.local, classes))


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def grouped_mm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Rows that are sorted by expert, times each expert's matrix. Each rank multiplies its own rows."""
    call = _GROUPED.bind(args, {_GROUPED_NAMES.get(key, key): value for key, value in kwargs.items()})
    if call is None or call["bias"] is not None or not isinstance(call["offs"], torch.Tensor):
        return NotImplemented
    a, b, offsets = call["a"], call["b"], call["offs"]
    if not isinstance(a, SequenceTensor) or a.ndim != 2 or a.split_dim != 0:
        return NotImplemented
    if isinstance(b, SequenceTensor) or isinstance(offsets, SequenceTensor):
        return NotImplemented
    if not all((np.diff(a.sequence.positions(rank)) > 0).all() for rank in range(a.group.size)):
        return NotImplemented
    mine = a.sequence.positions(a.group.rank)
    own = torch.from_numpy(np.searchsorted(mine, offsets.cpu().numpy())).to(offsets.device, offsets.dtype)
    options = {} if call["out_dtype"] is None else {"out_dtype": call["out_dtype"]}
    return a.like(func(a.local, b, offs=own, **options))
