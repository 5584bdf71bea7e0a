"""Recomputation (activation checkpointing) of a model's blocks (Chen et al. 2016)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tensorshard.torch_private.modules import NormBase
from tensorshard.torch_private.operators import ATTENTION_KERNELS

_aten = torch.ops.aten

# What "selective" keeps: the results that cost the most arithmetic a byte. All else is cheap to compute again.
_COSTLY = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
    }
    | ATTENTION_KERNELS
)


def apply_recompute(blocks: Iterable[nn.Module], mode: str) -> None:
    """Makes each block compute its activations again in backward.

    Args:
        blocks: modules whose forward is replaced on the instance; names, parameters and hooks stay as they are.
        mode: "none", "selective" or "full", as in :class:`tensorshard.Plan`.
    """
    if mode == "none":
        return
    for block in blocks:
        norms = [module for module in block.modules() if isinstance(module, NormBase)]
        contexts = partial(_contexts, norms, mode == "selective") if norms or mode == "selective" else None
        # A module of its own would put its name into every parameter's; checkpoints would then depend on the plan.
        block.forward = partial(_recomputed, block.forward, contexts)  # type: ignore[method-assign]


def _recomputed(forward: Any, contexts: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    extra = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)


def _contexts(norms: list[NormBase], selective: bool) -> tuple[Any, Any]:
    """What surrounds the first forward, and what surrounds its repetition in backward."""
    first, again = (nullcontext(), nullcontext())
    if selective:
        first, again = create_selective_checkpoint_contexts(_keep_costly)
    return first, _repetition(norms, again)


@contextmanager
def _repetition(norms: list[NormBase], inner: Any) -> Iterator[None]:
    """A repeated forward must not count its batch twice in the running statistics."""
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        with inner:
            yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _keep_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
