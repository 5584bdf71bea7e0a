"""Dropout under tensor parallelism: ranks draw the same numbers for values that they share, and others elsewhere.

Tensor-parallel ranks begin with equal generators, so they drop the same elements of what is replicated. Where each rank
has its own heads, features or positions, the generators get a new seed, made of the rank and of a number that is equal
on all ranks. Afterwards they continue where they were. The generators are the only state. So recomputation, which
restores them, draws the same again, and so does a run with the same seed. (Megatron-LM keeps a second generator.)
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.common.never_compiled import never_compiled
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Column, Rowwise, Style
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.styles import Heads, Slice
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily


def split_randomness(
    model: nn.Module,
    blocks: Iterable[str],
    styles: Mapping[str, Style],
    sequence: Mapping[str, SequenceSplit],
    group: dist.ProcessGroup,
) -> None:
    """Makes the ranks of `group` draw different numbers inside of `blocks`, where their activations differ.

    Args:
        blocks: names of the blocks that may make random numbers. If one makes none, this only advances the generators.
        styles: of everything in the model.
        sequence: of the blocks that compute on parts of a sequence. Everything differs there.
    """
    for name in blocks:
        block = model.get_submodule(name)
        region = _Region(block, group)
        split = sequence.get(name)
        if split is None:
            _between_layers(block, f"{name}." if name else "", styles, region)
        else:
            for key in split.whole:  # all ranks compute all of these
                module = block.get_submodule(key)
                wrap_forward(module, Role.RANDOM_STREAM, partial(_outside, region))
        wrap_forward(block, Role.RANDOM_STREAM, partial(_around, region, split is not None))


class _Region:
    """The part of a block in which each rank draws its own numbers."""

    def __init__(self, block: nn.Module, group: dist.ProcessGroup) -> None:
        self._block = block
        self._group = group
        self._outside: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @never_compiled
    def enter(self, *_: Any) -> None:
        if self._outside is not None or not self._block.training:
            return
        with unset_fake_temporarily():
            common = int(torch.randint(2**40, (), device="cpu").item())
            cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            self._outside = (torch.get_rng_state(), cuda)
            torch.manual_seed(common * self._group.size() + self._group.rank())

    @never_compiled
    def leave(self, *_: Any) -> None:
        if self._outside is None:
            return
        with unset_fake_temporarily():
            cpu, cuda = self._outside
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
        self._outside = None


def _between_layers(block: nn.Module, prefix: str, styles: Mapping[str, Style], region: _Region) -> None:
    for key, module in block.named_modules():
        style = styles.get(prefix + key)
        if isinstance(style, Column) or (isinstance(style, Slice) and as_splittable(module) is not None):
            module.register_forward_hook(region.enter)
        elif isinstance(style, Rowwise):
            module.register_forward_pre_hook(region.leave)
        elif isinstance(style, Heads):
            module.register_forward_pre_hook(region.enter)


def _around(region: _Region, everywhere: bool, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if everywhere:
        region.enter()
    try:
        return forward(*args, **kwargs)
    finally:  # recomputation stops a forward by an exception once it has what it needs
        region.leave()


def _outside(region: _Region, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    region.leave()
    try:
        return forward(*args, **kwargs)
    finally:
        region.enter()
