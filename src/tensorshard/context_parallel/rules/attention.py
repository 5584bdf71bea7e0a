"""Attention: the queries stay, keys and values come, with this rank's own rows of the mask."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import arange  # torch.arange itself is replaced while a group is active
from torch.nn.attention.bias import causal_lower_right

from tensorshard.context_parallel.context_group import ContextGroup
from tensorshard.context_parallel.exchanges import fetch, tie
from tensorshard.context_parallel.layout_changes import gathered, part_of
from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.rules.contractions import Letters, batch_letters, contract
from tensorshard.context_parallel.rules.random_numbers import attention_dropout
from tensorshard.context_parallel.sequence_layout import PositionLists, SequenceLayout
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.torch_private.autograd import are_saved_tensors_hooked

_CALL = Signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: 0
)
_ROWS = 512
"""Causal attention is computed for so many queries at a time, each time with the keys up to the last of them."""


@rule("scaled_dot_product_attention")
def attention(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``F.scaled_dot_product_attention``."""
    call = _CALL.bind(args, kwargs)
    if call is None:
        return NotImplemented
    q, k, v, mask, is_causal = (call.pop(key) for key in ("query", "key", "value", "attn_mask", "is_causal"))
    dropout = call.pop("dropout_p")
    if dropout:
        return _composed(q, k, v, mask, dropout, is_causal, **call)
    if isinstance(q, SequenceTensor) and q.split_dim == q.ndim - 2:
        if is_causal:
            return _causal(func, q, k, v, call)
        rows = None if mask is None else _rows_of_mask(mask, q)
        if q.group.refetches and _are_alike(k, v) and not are_saved_tensors_hooked():
            return _refetching(func, q, k, v, rows, call)
        whole_k, whole_v = _whole_keys(k, v)
        return q.like(func(q.local, whole_k, whole_v, attn_mask=rows, **call))
    if call["enable_gqa"]:
        return NotImplemented
    letters: list[Letters] = [
        [*batch_letters(q, 2), "m", "d"],
        [*batch_letters(k, 2), "n", "d"],
        [*batch_letters(v, 2), "n", "e"],
    ]
    letters.append([] if mask is None else [*batch_letters(mask, 2), None if mask.shape[-2] == 1 else "m", "n"])
    result: Letters = [*(f"b{i}" for i in range(q.ndim, 2, -1)), "m", "e"]
    return contract(
        func,
        [q, k, v, mask],
        letters,
        result,
        lambda q, k, v, mask: func(q, k, v, attn_mask=mask, is_causal=is_causal, **call),
        False,
    )


def _rows_of_mask(mask: torch.Tensor, q: SequenceTensor) -> torch.Tensor:
    has_rows = mask.ndim >= 2 and mask.shape[-2] == q.shape[-2] > 1
    return part_of(mask, mask.ndim - 2 if has_rows else None, q.sequence, "attention mask", q.group)


def _are_alike(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether keys and values can travel in one message."""
    return (
        isinstance(k, SequenceTensor)
        and isinstance(v, SequenceTensor)
        and k.split_dim == v.split_dim == k.ndim - 2
        and k.shape[:-1] == v.shape[:-1]
        and k.sequence.key == v.sequence.key
        and k.dtype == v.dtype
    )


def _whole_keys(k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not _are_alike(k, v):
        return gathered(k, "attention"), gathered(v, "attention")
    both = torch.cat([k.local, v.local], -1)
    whole = fetch(both, k.split_dim, k.sequence, None, "attention", k.group)
    return whole.split([k.shape[-1], v.shape[-1]], -1)  # type: ignore[return-value]


def _causal(func: Callable[..., Any], q: SequenceTensor, k: Any, v: Any, call: dict[str, Any]) -> Any:
    """Each run of queries attends to the keys up to its last."""
    group, rank = q.group, q.group.rank
    keys = k.shape[-2]
    ends = [min(keys, int(runs[:, 1].max()) if len(runs) else 1) for runs in q.sequence.runs]
    wanted = PositionLists([np.array([[0, end]]) for end in ends])
    if _are_alike(k, v):
        both = torch.cat([k.local, v.local], -1)
        both = fetch(both, k.split_dim, k.sequence, wanted, "attention", group)
        k, v = both.split([k.shape[-1], v.shape[-1]], -1)
    else:
        k, v = (gathered(t, "attention").narrow(-2, 0, ends[rank]) for t in (k, v))
    if not q.sequence.sizes[rank]:
        return q.like(tie(q.local.new_empty(*q.local.shape[:-1], v.shape[-1]), q.local, k, v))
    outs = []
    runs = q.sequence.runs[rank]
    if len(runs) > 4 * (1 + q.sequence.sizes[rank] // _ROWS):  # scattered positions
        allowed = _scattered_mask(q.sequence, rank, ends[rank], q.dtype, q.device)
        return q.like(func(q.local, k, v, attn_mask=allowed, **call))
    at = 0
    for start, stop in _row_blocks(runs):
        rows = q.local.narrow(-2, at, stop - start)
        at += stop - start
        end = min(stop, keys)
        mask, is_square = _block_mask(start, stop, keys, q.local)
        outs.append(func(rows, k[..., :end, :], v[..., :end, :], attn_mask=mask, is_causal=is_square, **call))
    return q.like(outs[0] if len(outs) == 1 else torch.cat(outs, -2))


def _row_blocks(runs: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    for start, stop in runs:
        if start == 0:  # the kernel's own causal mask is right for these
            yield 0, int(stop)
            continue
        for begin in range(int(start), int(stop), _ROWS):
            yield begin, min(begin + _ROWS, int(stop))


def _block_mask(start: int, stop: int, keys: int, q: torch.Tensor) -> tuple[Any, bool]:
    """The mask of queries ``start:stop`` for the keys before `stop`, and whether it is the kernel's own causal one."""
    if start == 0:
        return None, True
    if start + 1 >= keys:  # every query sees all keys
        return None, False
    if q.device.type == "cuda" and stop <= keys:
        return causal_lower_right(stop - start, stop), False
    widest = max(stop, keys)
    template = _causal_template(1 << (widest - 1).bit_length(), q.dtype, q.device)
    first = template.shape[1] - _ROWS - start
    return template[: stop - start, first : first + min(stop, keys)], False


@lru_cache(8)
def _causal_template(keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A mask of which the mask of every block of rows is a slice, so that all layers keep the same memory."""
    hidden = arange(keys + _ROWS, device=device) > keys + arange(_ROWS, device=device)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


@lru_cache(4)
def _scattered_mask(
    layout: SequenceLayout, rank: int, end: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Which keys this rank's queries see; one mask for all layers."""
    positions = torch.from_numpy(layout.positions(rank)).to(device)
    hidden = positions[:, None] < arange(end, device=device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


def _composed(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Attention in single operations, so that the random numbers of a whole tensor of weights can be drawn."""
    if enable_gqa or (is_causal and not isinstance(q, SequenceTensor)):
        return NotImplemented
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    scores = (q * factor) @ (k.transpose(-2, -1) * factor)
    if is_causal:
        rows = arange(q.shape[-2], device=q.device)
        mask = rows[:, None] >= arange(k.shape[-2], device=q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return attention_dropout(torch.softmax(scores, -1), dropout) @ v


def _refetching(
    func: Callable[..., Any], q: SequenceTensor, k: SequenceTensor, v: SequenceTensor, mask: Any, call: dict[str, Any]
) -> Any:
    """Attention of which backward fetches the keys and values again, instead of keeping those of all ranks."""
    both = torch.cat([k.local, v.local], -1)
    kept, dim, layout, group = both.detach(), k.split_dim, k.sequence, k.group
    whole = fetch(both, dim, layout, None, "attention", group)
    memory, again = whole.untyped_storage().data_ptr(), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != memory:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if not again:
            again.append(_fetch_again(kept, dim, layout, group))
        return again[0].as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        whole_k, whole_v = whole.split([k.shape[-1], v.shape[-1]], -1)
        return q.like(func(q.local, whole_k, whole_v, attn_mask=mask, **call))


def _fetch_again(kept: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup) -> torch.Tensor:
    with torch.no_grad():
        return fetch(kept, dim, layout, None, "attention again", group)
