"""Embeddings with their own forward, split by vocabulary. Only the lookup changes; the rest of the forward stays.

Such a forward may scale what it looks up, or make the indices itself (positions with an offset). It calls
``torch.nn.functional.embedding``, mostly through its base class. Only that call becomes the split lookup.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.layers.split_embedding import parallel_embedding
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.torch_private.modules import own_parameters


def split_own_lookups(module: nn.Module, num_embeddings: int, group: dist.ProcessGroup) -> None:
    """Makes the forward of `module` look up rows in a table of `num_embeddings`, of which this rank holds a part."""
    wrap_forward(module, Role.SPLIT_LAYER, partial(_forward, module, num_embeddings, group))


def _forward(
    module: nn.Module, num_embeddings: int, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    def lookup(
        input: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        if weight is not own_parameters(module)["weight"]:
            return F.embedding(input, weight, *options)
        return parallel_embedding(input, weight, *options, num_embeddings, 0, group)

    with _Lookups(lookup):
        return forward(*args, **kwargs)


class _Lookups(TorchFunctionMode):
    """Replaces ``torch.nn.functional.embedding`` by another function."""

    def __init__(self, lookup: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._lookup = lookup

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._lookup if func is F.embedding else func)(*args, **(kwargs or {}))
