"""Attention by heads: ``nn.MultiheadAttention`` (Shoeybi et al. 2019), and key-value heads that ranks share.

``nn.MultiheadAttention`` reads its weights directly, without calling the layers that hold them, so styles of layers
have no effect. Here its forward is written again for this rank's heads. Arguments and outputs are as documented for the
class.

Key and value layers may have fewer heads than there are ranks (grouped-query and multi-query attention). Megatron-LM
gives each rank a copy of the head that it shares, and adds up the copies' gradients. Here no weight is held twice.
Every rank computes its shard of a head, as of any column layer, and the ranks that use one head gather its features. In
backward each gets the sum of the gradients of its shard. So optimizers, clipping, ZeRO and checkpoints only see a
column layer, and no two ranks compute the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from tensorshard.comm import differentiable as collectives
from tensorshard.comm import primitives
from tensorshard.comm.sharding import shard_range, to_local
from tensorshard.common.never_compiled import never_compiled
from tensorshard.layers.split_linear import parallel_linear
from tensorshard.model.forwards import Role, replace_forward
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs
from tensorshard.tensor_parallel.table.styles import Heads


def split_attention(module: nn.Module, _style: Heads, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes `module` compute this rank's heads. Its ``out_proj`` is called as a row layer."""
    assert isinstance(module, nn.MultiheadAttention)
    replace_forward(module, Role.SPLIT_LAYER, partial(attention_forward, module, group, partial(_column, group)))


def use_layer_calls(model: nn.Module, split: set[str]) -> None:
    """Keeps ``nn.TransformerEncoder`` and its layers from using their fused kernels where something in them is split.

    In inference these kernels read the weights directly, and would take this rank's part for the whole.

    Args:
        split: names of what is split.
    """
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if not any(inner.startswith(prefix) for inner in split):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # stands for an activation that the fused kernel does not support
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


Column = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A column layer as a function of its input, this rank's rows of its weight, and of its bias."""


def _column(
    group: dist.ProcessGroup, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return parallel_linear(input, weight, bias, 1, group)


def attention_forward(
    module: nn.MultiheadAttention,
    group: dist.ProcessGroup,
    column: Column,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``nn.MultiheadAttention.forward`` on this rank's heads: [batch, heads, length, features] throughout.

    Args:
        column: computes queries, keys and values.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("nested tensors were given to an nn.MultiheadAttention that is split; give padded ones")
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True was given without attn_mask; nn.MultiheadAttention needs both")
    batched = query.dim() == 3
    first, heads = shard_range(module.num_heads, group.size(), group.rank())
    q, k, v = (
        _as_heads(part, heads, batched, module.batch_first)
        for part in _project_inputs(module, column, query, key, value)
    )
    hinted = is_causal and key_padding_mask is None and not need_weights  # then the mask is causal
    attends = (q.size(0), module.num_heads, q.size(2), k.size(2))
    mask = None if hinted else _merged_mask(attn_mask, key_padding_mask, attends, slice(first, first + heads), q.dtype)
    k, v, mask = _appended(module, heads, k, v, mask)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=hinted)
    mixed = mixed.transpose(1, 2).flatten(2)
    if not batched:
        mixed = mixed.squeeze(0)
    elif not module.batch_first:
        mixed = mixed.transpose(0, 1)
    output = module.out_proj(mixed)
    if weights is None:
        return output, None
    if average_attn_weights:
        weights = collectives.reduce(weights.sum(1), group) / module.num_heads
    else:
        weights = collectives.gather(weights, 1, group, size=module.num_heads)
    return output, weights if batched else weights.squeeze(0)


def _project_inputs(
    module: nn.MultiheadAttention,
    column: Column,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> list[torch.Tensor]:
    """This rank's features of queries, keys and values. If inputs are one tensor, backward communicates once."""
    bias = None if module.in_proj_bias is None else to_local(module.in_proj_bias)
    if module.in_proj_weight is None:
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return [column(x, to_local(w), b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    weight = to_local(module.in_proj_weight)
    part = weight.size(0) // 3
    together: list[tuple[torch.Tensor, int]] = []
    for input in (query, key, value):
        if together and together[-1][0] is input:
            together[-1] = (input, together[-1][1] + 1)
        else:
            together.append((input, 1))
    projected: list[torch.Tensor] = []
    for input, count in together:
        rows = slice(len(projected) * part, (len(projected) + count) * part)
        output = column(input, weight[rows], None if bias is None else bias[rows])
        projected += output.chunk(count, -1)
    return projected


def _as_heads(projected: torch.Tensor, heads: int, batched: bool, batch_first: bool) -> torch.Tensor:
    if not batched:
        projected = projected.unsqueeze(0)
    elif not batch_first:
        projected = projected.transpose(0, 1)
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _appended(
    module: nn.MultiheadAttention, heads: int, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values with those that ``add_bias_kv`` and ``add_zero_attn`` append. Nothing masks the latter."""
    more: list[tuple[torch.Tensor, torch.Tensor]] = []
    if module.bias_k is not None and module.bias_v is not None:
        more += [(to_local(module.bias_k), to_local(module.bias_v))]
    if module.add_zero_attn:
        zeros = k.new_zeros(heads * k.size(-1))
        more += [(zeros, zeros)]
    for keys, values in more:
        k = torch.cat([k, keys.to(k.dtype).view(1, heads, 1, -1).expand(k.size(0), -1, -1, -1)], 2)
        v = torch.cat([v, values.to(v.dtype).view(1, heads, 1, -1).expand(v.size(0), -1, -1, -1)], 2)
    return k, v, mask if mask is None else F.pad(mask, (0, len(more)))


def _merged_mask(
    attention: torch.Tensor | None,
    padding: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    heads: slice,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The mask to add to the scores of `heads`. `shape` [batch, heads, queries, keys] is that of all ranks' scores."""
    batch, every_head, queries, keys = shape
    if attention is not None:
        if tuple(attention.shape) not in ((queries, keys), (batch * every_head, queries, keys)):
            raise ValueError(
                f"attn_mask has the shape {list(attention.shape)}; it must be {[queries, keys]}, or "
                f"{[batch * every_head, queries, keys]} with one for each sample and head"
            )
        attention = _added(attention, dtype)
        if attention.dim() == 3:
            attention = attention.view(shape)[:, heads]
    if padding is not None:
        if tuple(padding.shape) != (batch, keys) and not (batch == 1 and tuple(padding.shape) == (keys,)):
            raise ValueError(f"key_padding_mask has the shape {list(padding.shape)}; it must be {[batch, keys]}")
        padding = _added(padding, dtype).view(batch, 1, 1, keys)
    if attention is None or padding is None:
        return padding if attention is None else attention
    return attention + padding


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as it is added to scores: a boolean True means not to attend."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise TypeError(f"a mask of type {mask.dtype} was given to nn.MultiheadAttention; it must be bool or floating")
    return mask.to(dtype)


# -- key-value heads that ranks share --


def share_heads(module: nn.Module, heads: int, parts: Sequence[int], group: dist.ProcessGroup) -> None:
    """Makes the column layer `module` return full heads.

    Args:
        heads: number of key (and value) heads. With as many as ranks, nothing is done.
        parts: output features of queries, keys and values, if the layer is fused.
    """
    if heads >= group.size():
        return
    together = group.size() // heads
    local = [part // group.size() for part in parts]
    # A hook, not a forward: column layers that are called together, or on parts of a sequence, have theirs replaced
    # elsewhere.
    module.register_forward_hook(partial(never_compiled(_gather_heads), local, together, group))


def _gather_heads(
    local: Sequence[int], together: int, group: dist.ProcessGroup, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    if not local:
        return _GatherHeads.apply(output, 1, together, group)
    queries, keys, values = local
    shared = output.narrow(-1, queries, keys + values)
    # One message for both: [*, keys or values, features].
    heads = _GatherHeads.apply(shared, 2, together, group)
    return torch.cat([output.narrow(-1, 0, queries), heads], -1)


class _GatherHeads(Function):
    """Gathers the features of a head from the ranks that share it. In backward, gradients are summed and cut.

    The ranks of a head are neighbours. They exchange over the group of all ranks, so no more communicators are needed.
    """

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, packed: int, together: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.packed, ctx.together, ctx.group = packed, together, group
        shards = primitives.exchange_among(shard.expand(together, *shard.shape), together, group)
        return _join_heads(shards, packed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _SumHeads.apply(grads[0], ctx.packed, ctx.together, ctx.group), None, None, None


class _SumHeads(Function):
    """Sums what the ranks of a head have for this rank's shard of it. In backward, the sums are gathered."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, packed: int, together: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.packed, ctx.together, ctx.group = packed, together, group
        return primitives.exchange_among(_cut_heads(heads, packed, together), together, group).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _GatherHeads.apply(grads[0], ctx.packed, ctx.together, ctx.group), None, None, None


def _join_heads(shards: torch.Tensor, packed: int) -> torch.Tensor:
    """[ranks, *, packed * shard] as [*, packed * ranks * shard]."""
    split = shards.unflatten(-1, (packed, -1))
    return split.movedim(0, -2).flatten(-3)


def _cut_heads(heads: torch.Tensor, packed: int, together: int) -> torch.Tensor:
    """Undoes :func:`_join_heads`."""
    return heads.unflatten(-1, (packed, together, -1)).movedim(-2, 0).flatten(-2)
