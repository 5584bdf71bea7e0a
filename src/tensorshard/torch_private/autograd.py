"""Asking whether backward is running, and steering it."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, _engine_run_backward


def is_in_backward() -> bool:
    """Whether the caller runs inside of a backward pass, as recomputation does.

    Why: code that is recomputed in backward runs outside of the forward of ``DistributedDataParallel``.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return torch._C._current_graph_task_id() != -1


def current_backward() -> int:
    """A number of the backward pass that the caller runs in. One that runs within another has its own; -1 for none.

    Why: a backward within a backward adds to gradients that may be added to again.

    Checked: torch 2.13.

    Public way: none.
    """
    return torch._C._current_graph_task_id()


def are_saved_tensors_hooked() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` is on.

    Why: such hooks tell recomputation with ``use_reentrant=False``, which sets them, from recomputation with True.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def call_after_backward(callback: Callable[[], None]) -> None:
    """Makes the backward that is running call `callback` when it is over.

    Why: ZeRO 0 to 2 wait for reductions that are still under way, no matter who called backward.

    Checked: torch 2.11 and 2.13.

    Public way: a call after ``backward()``, if the training loop is one's own.
    """
    Variable._execution_engine.queue_callback(callback)


def accumulate_from(
    edges: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    *,
    keep_graph: bool,
) -> None:
    """Runs backward from `edges`, and adds to the gradients of `parameters` only, which are leaves.

    Why: pipeline schedules that split a backward compute the parameters' gradients later, from nodes in the middle of
    the graph.

    Checked: torch 2.11 and 2.13.

    Public way: ``torch.autograd.backward(edges, gradients, inputs=parameters)``, from torch 2.13 on; that of 2.11
    refuses edges of the nodes of a custom ``autograd.Function``.
    """
    _engine_run_backward(
        tuple(edges),
        tuple(gradients),
        keep_graph,
        False,
        tuple(parameters),
        allow_unreachable=True,
        accumulate_grad=True,
    )
