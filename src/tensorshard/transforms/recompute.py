"""Recomputation (activation checkpointing) of a model's blocks (Chen et al. 2016)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tensorshard.modules.forwards import Forward, Role, wrap_forward
from tensorshard.modules.running_statistics import buffers_of, modules_with_statistics
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
        norms = modules_with_statistics(block)
        contexts = partial(_contexts, norms, mode == "selective") if norms or mode == "selective" else None
        # A module of its own would put its name into every parameter's; checkpoints would then depend on the plan.
        wrap_forward(block, Role.RECOMPUTATION, partial(_recomputed, contexts))


def _recomputed(contexts: Any, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    extra = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)


def _contexts(norms: list[nn.Module], selective: bool) -> tuple[Any, Any]:
    """What surrounds the first forward, and what surrounds its repetition in backward.

    Args:
        norms: those whose buffers a forward changes.
    """
    first, again = (nullcontext(), nullcontext())
    if selective:
        first, again = create_selective_checkpoint_contexts(_keep_costly)
    if not norms:
        return first, again
    changed = buffers_of(norms)
    before: list[torch.Tensor] = []
    return _first(changed, before, first), _repetition(changed, before, again)


@contextmanager
def _first(changed: list[torch.Tensor], before: list[torch.Tensor], inner: Any) -> Iterator[None]:
    """Notes what the buffers are `before` the forward."""
    before[:] = [buffer.clone() for buffer in changed]
    with inner:
        yield


@contextmanager
def _repetition(changed: list[torch.Tensor], before: list[torch.Tensor], inner: Any) -> Iterator[None]:
    """A repeated forward starts from the same buffers as the first, and must not count its batch a second time."""
    kept = [buffer.clone() for buffer in changed]
    _write(changed, before)
    try:
        with inner:
            yield
    finally:
        _write(changed, kept)


@torch.no_grad()
def _write(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def _keep_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
