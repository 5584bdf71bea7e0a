"""Kernels of attention that also return the logarithm of each query's sum, so that results over parts can be merged."""

from typing import Any

import torch

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def has_partial_attention(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether :func:`attend_to_part` has a kernel for heads of `width`: on CUDA for types of 16 bits alone.

    Why: attention over parts of the keys needs a kernel that tells its sums.

    Checked: torch 2.13 and 2.15; the kernel of CUDA on fake tensors alone.

    Public way: none that also runs on CPUs (flex_attention returns the sums, and needs a compiler to be fast).
    """
    return device.type == "cpu" or (device.type == "cuda" and dtype in _HALF and width % 8 == 0 and width <= 256)


def attend_to_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Attention over some keys: what it gives, the logarithms of the sums [*, heads, queries], what backward needs.

    Why: results over parts of the keys are merged by their sums.

    Checked: torch 2.13 and 2.15; the kernel of CUDA on fake tensors alone.

    Public way: as for :func:`has_partial_attention`.
    """
    if query.device.type == "cpu":
        out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, sums, None
    out, sums, *rest = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    return out, sums, tuple(rest[:6])


def partial_attention_gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    rest: Any,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the query, and of some keys and values. `out` and `sums` are over all keys.

    Why: as for :func:`attend_to_part`.

    Checked: torch 2.13 and 2.15; the kernel of CUDA on fake tensors alone.

    Public way: as for :func:`has_partial_attention`.
    """
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, sums, 0.0, is_causal, scale=scale
        )
    cumulated_queries, cumulated_keys, most_queries, most_keys, seed, offset = rest
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, query, key, value, out, sums, cumulated_queries, cumulated_keys, most_queries, most_keys, 0.0, is_causal,
        seed, offset, scale=scale,
    )  # fmt: skip
