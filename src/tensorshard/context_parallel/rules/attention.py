"""Attention: the queries stay, and keys and values come, with this rank's own rows of the mask. Or, where less is sent
so, each rank gets all positions of some heads (Jacobs et al., DeepSpeed Ulysses, 2023)."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import arange  # torch.arange itself is replaced while a group is active

from tensorshard.context_parallel.context_group import active
from tensorshard.context_parallel.exchanges import fetch, stack_ranks, take, tie, turn
from tensorshard.context_parallel.layout_changes import gathered, part_of
from tensorshard.context_parallel.layouts import PositionLists, SequenceLayout, elsewhere
from tensorshard.context_parallel.ring_attention import ring_attention, rounds
from tensorshard.context_parallel.rule_table import Signature, rule
from tensorshard.context_parallel.rules.contractions import Letters, batch_letters, contract
from tensorshard.context_parallel.rules.pointwise import attention_dropout
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.torch_private.attention import has_partial_attention
from tensorshard.torch_private.autograd import are_saved_tensors_hooked
from tensorshard.torch_private.fake_tensors import fake_device
from tensorshard.torch_private.tensors import tensor_version

_CALL = Signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: 0
)
_ROWS = 512
"""Causal attention is computed for so many queries at a time, each time with the keys up to the last of them."""
_MESSAGE = 256 << 10
"""Keys and values come in rounds where those of a rank have at least so many bytes."""
_SPARED = 64 << 20
"""Where blocks are recomputed, they come in rounds if this spares so many bytes."""
_RUNS = 8
"""A rank whose queries are in more runs than this gets all keys, whatever the mask shows."""
_MASKS = 2
"""Of so many masks it is remembered which keys they show: models have one for each kind of layer."""
_NEARLY_ALL = 0.9
"""All keys are gathered where a mask shows more than this part of them to the ranks."""


@rule("scaled_dot_product_attention")
def attention(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``F.scaled_dot_product_attention``."""
    call = _CALL.bind(args, kwargs)
    if call is None:
        return NotImplemented
    q, k, v, mask, is_causal = (call.pop(key) for key in ("query", "key", "value", "attn_mask", "is_causal"))
    q, k, v = (_as_autocast(each) for each in (q, k, v))
    dropout = call.pop("dropout_p")
    if dropout:
        return _composed(q, k, v, mask, dropout, is_causal, **call)
    if isinstance(q, SequenceTensor) and q.split_dim == q.ndim - 2:
        if _heads_send_less(q, k, v, mask):
            return _over_heads(func, q, k, v, gathered(mask, "attention mask"), is_causal, call)
        if is_causal:
            q.group.causal_calls += 1
        if mask is None and (ring := _ring(q, k, v, is_causal, call)):
            both = torch.cat([k.local, v.local], -1)
            return q.like(ring_attention(q.local, both, ring, call["scale"], q.group))
        if is_causal:
            return _causal(func, q, k, v, call)
        if mask is None:
            return q.like(_with_keys(lambda k, v: func(q.local, k, v, **call), q, k, v))
        rows, seen = _rows_and_keys(mask, q, k)
        return q.like(_with_keys(lambda k, v: func(q.local, k, v, attn_mask=rows, **call), q, k, v, seen))
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


def _as_autocast(x: Any) -> Any:
    """`x` in the type that autocast would give it, before it is sent and a kernel is chosen."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    is_cast = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def _rows_of_mask(mask: torch.Tensor, q: SequenceTensor) -> torch.Tensor:
    has_rows = mask.ndim >= 2 and mask.shape[-2] == q.shape[-2] > 1
    return part_of(mask, mask.ndim - 2 if has_rows else None, q.sequence, "attention mask", q.group)


def _rows_and_keys(mask: torch.Tensor, q: SequenceTensor, k: Any) -> tuple[torch.Tensor, PositionLists | None]:
    """This rank's rows of the mask, for the keys that it shows each rank; None in their place for all keys."""
    rows = _rows_of_mask(mask, q)
    keys, runs = k.shape[-2], max(len(each) for each in q.sequence.runs)
    layouts = [x.sequence for x in (q, k, mask) if isinstance(x, SequenceTensor)]
    if (
        runs > _RUNS
        or mask.shape[-2:] != (q.shape[-2], keys)
        or not isinstance(k, SequenceTensor)
        or not all(layout.is_full_everywhere for layout in layouts)
        or fake_device(rows) is not None
        or rows.is_meta
    ):
        return rows, None
    activation = active()
    known = {} if activation is None else activation.seen_keys
    # All ranks find a mask here, or none does: they compute the same, and none has an empty part.
    local = mask.local if isinstance(mask, SequenceTensor) else mask
    key = (local.data_ptr(), local.shape, local.stride(), tensor_version(local), q.sequence, k.sequence)
    if key not in known:
        while len(known) >= _MASKS:
            del known[next(iter(known))]
        known[key] = local.detach(), _seen_keys(rows.detach(), q, keys, runs)  # no other mask takes its memory
    seen = known[key][1]
    return rows if seen is None else take(rows, -1, seen.index(q.group.rank)), seen


def _seen_keys(rows: torch.Tensor, q: SequenceTensor, keys: int, runs: int) -> PositionLists | None:
    """For each rank and each of its runs of queries, the keys from the first to the last that the mask shows to one of
    them. A collective. None if that is nearly all of them, or if a query sees none and so, perhaps, all alike."""
    shown = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min
    sees_none = ~shown.any(-1).all()
    if shown.ndim > 2:
        shown = shown.any(tuple(range(shown.ndim - 2)))
    bounds = torch.zeros(runs, 2, dtype=torch.long, device=rows.device)
    at = 0
    for index, (start, stop) in enumerate(q.sequence.runs[q.group.rank]):
        of_key = shown[at : at + stop - start].any(0).to(torch.uint8)  # argmax takes no bool
        at += stop - start
        bounds[index, 0], bounds[index, 1] = of_key.argmax(), keys - of_key.flip(0).argmax()
    if rows.dtype != torch.bool:
        bounds[0].copy_(torch.where(sees_none, bounds.new_tensor([0, keys]), bounds[0]))
    wanted = []
    for own in stack_ranks(bounds, "attention: which keys a mask shows", q.group).cpu().numpy():
        seen = np.zeros(keys, bool)
        for first, end in own:
            seen[first:end] = True
        wanted.append(np.flatnonzero(seen))
    if sum(map(len, wanted)) > _NEARLY_ALL * keys * q.group.size:
        return None
    return PositionLists.of_positions(wanted)


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


def _with_keys(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    q: SequenceTensor,
    k: Any,
    v: Any,
    wanted: PositionLists | None = None,
) -> torch.Tensor:
    """``compute(keys, values)``, with those that each rank wants; None for all.

    Where the group says so, backward fetches them again, instead of keeping those of all ranks.
    """
    group = q.group
    if not _are_alike(k, v):
        whole_k, whole_v = gathered(k, "attention"), gathered(v, "attention")
        if wanted is not None:
            whole_k, whole_v = (take(whole, -2, wanted.index(group.rank)) for whole in (whole_k, whole_v))
        return compute(whole_k, whole_v)
    both = torch.cat([k.local, v.local], -1)
    seen = fetch(both, k.split_dim, k.sequence, wanted, "attention", group)
    parts = [k.shape[-1], v.shape[-1]]
    if not (group.refetches and seen.requires_grad) or are_saved_tensors_hooked():
        return compute(*seen.split(parts, -1))
    kept, dim, layout = both.detach(), k.split_dim, k.sequence
    memory, again = seen.untyped_storage().data_ptr(), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != memory:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else again[0].as_strided(*packed)

    @torch.no_grad()
    def fetch_again(_: torch.Tensor) -> None:
        again[:] = [fetch(kept, dim, layout, wanted, "attention again", group)]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = compute(*seen.split(parts, -1))
    # By hooks, so that every rank makes the same exchanges, whatever its operators have kept.
    out.register_hook(fetch_again)
    seen.register_hook(lambda _: again.clear())
    return out


def _heads_send_less(q: SequenceTensor, k: Any, v: Any, mask: Any) -> bool:
    """Whether exchanging positions for heads, and back, sends at most as much as gathering keys and values."""
    if not _are_alike(k, v) or k.sequence.key != q.sequence.key or not 3 <= k.ndim == q.ndim:
        return False
    if mask is not None and not (mask.shape[-2:-1] == (1,) and (mask.ndim < 3 or mask.shape[-3] == 1)):
        return False  # every rank would need all rows
    queries, keys, size = q.shape[-3], k.shape[-3], q.group.size
    if keys % size or queries % keys or q.shape[:-3] != k.shape[:-3]:
        return False
    gathered_features = keys * (k.shape[-1] + v.shape[-1])
    return queries * (q.shape[-1] + v.shape[-1]) + gathered_features <= size * gathered_features


def _over_heads(
    func: Callable[..., Any],
    q: SequenceTensor,
    k: SequenceTensor,
    v: SequenceTensor,
    mask: Any,
    is_causal: bool,
    call: dict[str, Any],
) -> Any:
    """Each rank gets all positions of its heads: queries, keys and values in one exchange, the result in another."""
    group, heads = q.group, k.shape[-3]
    per_key = q.shape[-3] // heads
    rows = q.local.unflatten(-3, (heads, per_key)).transpose(-3, -2).flatten(-2)
    parts = [rows, k.local, v.local]
    at, positions = q.ndim - 3, q.ndim - 2
    own = turn(
        torch.cat(parts, -1), positions, q.sequence, at, elsewhere(heads, group.size), "attention over heads", group
    )
    rows, keys, values = own.split([part.shape[-1] for part in parts], -1)
    queries = rows.unflatten(-1, (per_key, q.shape[-1])).transpose(-3, -2).flatten(-4, -3)
    out = func(queries, keys, values, attn_mask=mask, is_causal=is_causal, **call)
    layout = elsewhere(heads * per_key, group.size)
    return q.like(turn(out, at, layout, positions, q.sequence, "attention over heads", group))


def _ring(q: SequenceTensor, k: Any, v: Any, is_causal: bool, call: dict[str, Any]) -> list[Any] | None:
    """The rounds of ring attention; None where keys and values are gathered at once.

    Rounds need no masks, so their kernels are faster, and hold less. They cost a message for each other rank, and in
    backward they come again, also where recomputation has just gathered all.
    """
    if not _are_alike(k, v) or not q.ndim == k.ndim == 4 or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    part = 2 * k.shape.numel() * k.dtype.itemsize // q.group.size
    if part < _MESSAGE or (not q.group.refetches and part * (q.group.size - 2) < _SPARED):
        return None
    fits = q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0 and q.dtype == k.dtype
    if not fits or not (call["enable_gqa"] or q.shape[1] == k.shape[1]):
        return None
    if not has_partial_attention(q.device, q.dtype, q.shape[-1]) or (is_causal and q.sequence.key != k.sequence.key):
        return None
    return rounds(q.sequence, k.sequence, q.group.rank, is_causal, q.group.neighbours)


def _causal(func: Callable[..., Any], q: SequenceTensor, k: Any, v: Any, call: dict[str, Any]) -> Any:
    """Each run of queries attends to the keys up to its last."""
    rank, keys = q.group.rank, k.shape[-2]
    ends = [min(keys, int(runs[:, 1].max()) if len(runs) else 1) for runs in q.sequence.runs]
    runs = q.sequence.runs[rank]

    def compute(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not len(runs):
            return tie(q.local.new_empty(*q.local.shape[:-1], v.shape[-1]), q.local, k, v)
        if len(runs) > 4 * (1 + q.sequence.sizes[rank] // _ROWS):  # scattered positions
            allowed = _scattered_mask(q.sequence, rank, ends[rank], q.dtype, q.device)
            return func(q.local, k, v, attn_mask=allowed, **call)  # type: ignore[no-any-return]
        outs, at = [], 0
        for start, stop in _row_blocks(runs):
            rows = q.local.narrow(-2, at, stop - start)
            at += stop - start
            end = min(stop, keys)
            mask, is_square = _block_mask(start, stop, keys, q.local)
            outs.append(func(rows, k[..., :end, :], v[..., :end, :], attn_mask=mask, is_causal=is_square, **call))
        return outs[0] if len(outs) == 1 else torch.cat(outs, -2)

    return q.like(_with_keys(compute, q, k, v, PositionLists([np.array([[0, end]]) for end in ends])))


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
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes half a second

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
    if mask is None:
        return attention_dropout(torch.softmax(scores, -1), dropout) @ v
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)  # queries that see no key: torch's attention returns zeros
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return attention_dropout(weights, dropout) @ v
