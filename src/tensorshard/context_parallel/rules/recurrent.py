"""Recurrent layers: a rank after the other, the state handed on. In both directions: split over the batch instead."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import stack_ranks, take, tie
from tensorshard.context_parallel.layout_changes import part_of
from tensorshard.context_parallel.layouts import elsewhere
from tensorshard.context_parallel.rule_table import rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.torch_private.pytree import tree_tensors


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``input, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first``."""
    if kwargs or len(args) != 9 or not isinstance(args[0], SequenceTensor) or args[0].ndim != 3:
        return NotImplemented
    x, state, rest = args[0], args[1], list(args[2:])
    dropout, is_training, is_bidirectional, batch_first = rest[3:]
    given = list(state) if isinstance(state, tuple | list) else [state]
    if x.split_dim != (1 if batch_first else 0) or any(isinstance(each, SequenceTensor) for each in given):
        return NotImplemented
    if dropout and is_training:
        return NotImplemented
    if not is_bidirectional and x.sequence.is_ordered and x.sequence.is_full_everywhere:
        return _in_stages(func, x, given, isinstance(state, tuple | list), rest)
    return _over_batch(func, x, given, isinstance(state, tuple | list), rest)


def _in_stages(
    func: Callable[..., Any], x: SequenceTensor, states: list[torch.Tensor], is_many: bool, rest: list[Any]
) -> Any:
    """Each rank gets the state of the one before it."""
    group, passed, out = x.group, list[torch.Tensor](), None
    weights = [weight for weight in tree_tensors(rest) if weight.requires_grad]
    for rank in range(group.size):
        if rank == group.rank:
            out, *new = func(x.local, tuple(states) if is_many else states[0], *rest)
        else:  # the same graph on every rank, so that backward makes the same exchanges
            new = [tie(torch.zeros_like(state), x.local, state, *weights) for state in states]
        states = [stack_ranks(state, "recurrent state", group)[rank] for state in new]
        passed += states
    assert out is not None
    return (x.like(tie(out, *passed)), *states)


def _over_batch(
    func: Callable[..., Any], x: SequenceTensor, states: list[torch.Tensor], is_many: bool, rest: list[Any]
) -> Any:
    """Each rank has all positions of some sequences of the batch."""
    group, dim = x.group, 1 - x.split_dim
    if x.shape[dim] < group.size:
        return NotImplemented
    layout = elsewhere(x.shape[dim], group.size)
    own = [take(state, 1, layout.index(group.rank)) for state in states]
    local = part_of(x, dim, layout, "recurrent", group)
    out, *new = func(local, tuple(own) if is_many else own[0], *rest)
    out = part_of(SequenceTensor(out, dim, layout, group), x.split_dim, x.sequence, "recurrent", group)
    return (x.like(out), *(SequenceTensor(state, 1, layout, group) for state in new))
