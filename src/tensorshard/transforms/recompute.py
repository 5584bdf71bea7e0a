"""Recomputation (activation checkpointing) of a model's blocks (Chen et al. 2016)."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tensorshard.modules.buffer_values import BufferValues, Exchanged
from tensorshard.modules.forwards import Forward, Role, wrap_forward
from tensorshard.torch_private.compilation import is_making_graph
from tensorshard.torch_private.modules import buffer_names
from tensorshard.transforms.costly_results import COSTLY, KeepsCostly, KeptResults, TakesKept


def _keep_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(blocks: Iterable[nn.Module], mode: str) -> None:
    """Makes each block compute its activations again in backward.

    Args:
        blocks: modules whose forward is replaced on the instance; names, parameters and hooks stay as they are.
        mode: "none", "selective" or "full", as in :class:`tensorshard.Plan`.
    """
    if mode == "none":
        return
    for block in blocks:
        holders = [module for module in block.modules() if buffer_names(module)]
        selective = mode == "selective"
        contexts = _make_contexts(holders, selective) if holders or selective else None
        # A wrapping module would put its name into every parameter's name; checkpoints would then depend on the plan.
        wrap_forward(block, Role.RECOMPUTATION, partial(_recomputed, contexts))


def _recomputed(contexts: Any, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if contexts is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _make_contexts(holders: list[nn.Module], selective: bool) -> Callable[[], tuple[Any, Any]]:
    """Makes the function that returns two contexts: one for the first forward, one for its repetition in backward.

    It is a plain function, since torch.compile accepts no other.
    """

    def contexts() -> tuple[Any, Any]:
        # Inside a compiled graph nothing is changed in place, so a policy is enough. If a compiled block's code is cut
        # into several graphs, it is recomputed outside of them.
        if is_making_graph():
            return create_selective_checkpoint_contexts(_keep_costly if selective else _keep_nothing)
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if selective:
            results = KeptResults()
            first, again = KeepsCostly(results), TakesKept(results)
        call = _FirstForward(holders, first)
        return call, _Repetition(call, again)

    return contexts


class _FirstForward:
    """Surrounds the first forward of a call, and keeps the old values of the buffers that it changes.

    The repetition sees these old values, and leaves the block's own buffers alone. So what a forward changes (running
    statistics, counters, averages, a codebook), in place or by assigning another tensor, is changed once.

    Args:
        holders: the block's modules that have buffers.
        inner: another context to enter around the forward.
    """

    def __init__(self, holders: list[nn.Module], inner: AbstractContextManager[Any]) -> None:
        self._holders = holders
        self._inner = inner
        self.before: BufferValues | None = None

    def __enter__(self) -> None:
        self.before = BufferValues(self._holders)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self.before is not None
        self.before.forget_unchanged()
        return self._inner.__exit__(*error)


class _Repetition:
    """Surrounds the forward when it is computed again in backward."""

    def __init__(self, call: _FirstForward, inner: AbstractContextManager[Any]) -> None:
        self._call = call
        self._inner = inner
        self._exchanged: Exchanged | None = None

    def __enter__(self) -> None:
        assert self._call.before is not None
        self._exchanged = self._call.before.exchange()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self._exchanged is not None
        self._exchanged.undo()
        return self._inner.__exit__(*error)
