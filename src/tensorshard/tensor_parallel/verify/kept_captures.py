"""Shares runs of one model between searches for several numbers of ranks, so that each run is made once."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tensorshard.tensor_parallel.verify.block_calls import Capture, capture_calls
from tensorshard.tensor_parallel.verify.block_kinds import describe_module
from tensorshard.torch_private.pytree import tree_flatten

Captures = dict[Hashable, Capture]

_kept: list[Captures] = []


@contextmanager
def captures_kept(captures: Captures) -> Iterator[None]:
    """Inside, :func:`captured` takes the runs that it finds in `captures`, and adds the others to them.

    All models inside have to be the same one, or copies of it: others may differ in ways that no description shows.
    """
    _kept.append(captures)
    try:
        yield
    finally:
        _kept.pop()


def captured(model: nn.Module, blocks: Iterable[str], inputs: Any) -> Capture:
    """As :func:`capture_calls`. Inside of :func:`captures_kept`, a run is not repeated."""
    names = list(blocks)
    if not _kept:
        return capture_calls(model, names, inputs)
    key = (
        describe_module(model),
        tuple((name, p.dtype, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)),
        tuple(names),
        _described(inputs),
    )
    if key not in _kept[-1]:
        _kept[-1][key] = capture_calls(model, names, inputs)
    found = _kept[-1][key]
    return replace(found, calls=dict(found.calls))  # callers leave out the calls of what they cannot examine


def _described(inputs: Any) -> Hashable:
    leaves, spec = tree_flatten(inputs)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
