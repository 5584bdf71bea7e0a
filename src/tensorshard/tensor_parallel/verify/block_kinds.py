"""Which blocks of a model are alike, so that what is found for one of them holds for the others."""

import enum
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.torch_private.modules import own_buffers, own_parameters

# Attributes of every module. ``training`` is one of them; blocks are examined in evaluation.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.memory_format)
# The depth to which objects in attributes (a config, say) are compared.
_DEPTH = 6
_Attribute = tuple[str, str]
"""A module's name in its block, and an attribute's in the module."""


def block_kinds(units: Mapping[str, nn.Module], calls: Mapping[str, BlockCall]) -> dict[str, int]:
    """A number for each block that was called, by its name: blocks with the same number are alike.

    Blocks that are alike have the same modules with the same shapes and attributes (plain values, and what configs hold
    of them), were called with the same shapes, and ran the same operations with the same numbers. Attributes may differ
    if they only tell the block's place in its list (``layer_idx``, a name with that number in it, a rate that grows
    from layer to layer). If a block computes something else because of them, its operations differ.
    """
    describe = _Descriptions()
    by_place = _attributes_by_place({name: units[name] for name in calls})
    numbers: dict[Hashable, int] = {}
    kinds: dict[str, int] = {}
    for name, call in calls.items():
        owner, _, place = name.rpartition(".")
        block = describe.block(units[name], place, by_place.get(owner, frozenset()))
        kinds[name] = numbers.setdefault((block, _described_call(call)), len(numbers))
    return kinds


def group_equal_blocks(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Names of blocks, in groups that :func:`block_kinds` would find alike if they were called in the same way."""
    describe = _Descriptions()
    by_place = _attributes_by_place(blocks)
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for name, block in blocks.items():
        owner, _, place = name.rpartition(".")
        groups[describe.block(block, place, by_place.get(owner, frozenset()))].append(name)
    return list(groups.values())


def describe_module(module: nn.Module) -> Hashable:
    """Classes, shapes and attributes of all modules in `module`, in nested tuples; equal for modules built alike."""
    return _Descriptions().block(module, "", frozenset())


def _described_call(call: BlockCall) -> Hashable:
    leaves = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensor_leaves((call.args, call.kwargs)))
    return leaves, call.operations


class _Descriptions:
    """Hashable descriptions of blocks. An object that several of them hold, such as a config, is described once."""

    def __init__(self) -> None:
        self._known: dict[int, Hashable] = {}
        self._kept: list[Any] = []  # so that no other object gets their ids

    def block(self, block: nn.Module, place: str, left_out: frozenset[_Attribute]) -> Hashable:
        """The description of the block at `place` of its list, without the attributes `left_out`."""

        def attribute(value: Any) -> Hashable:
            if isinstance(value, str):
                value = re.sub(r"\d+", lambda match: "*" if match[0] == place else match[0], value)
            return self._of(value)

        return tuple(
            (
                name,
                type(module),
                tuple((key, tuple(p.shape)) for key, p in own_parameters(module).items()),
                tuple((key, tuple(b.shape), b.dtype) for key, b in own_buffers(module).items()),
                tuple((key, attribute(value)) for key, value in _attributes(module) if (name, key) not in left_out),
            )
            for name, module in block.named_modules()
        )

    def _of(self, value: Any, depth: int = _DEPTH) -> Hashable:
        if value is None or isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, torch.Tensor):
            return type(value), tuple(value.shape), value.dtype
        if depth == 0 or isinstance(value, nn.Module):
            return (type(value),)
        if isinstance(value, Mapping):
            return type(value), tuple((self._of(k, depth - 1), self._of(v, depth - 1)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(self._of(item, depth - 1) for item in value)
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self._of(item, depth - 1) for item in value)
        if callable(value) and not isinstance(value, type):
            return self._function(value, depth)
        return self._object(value, depth)

    def _function(self, function: Callable[..., Any], depth: int) -> Hashable:
        if isinstance(function, functools.partial):
            return functools.partial, self._of((function.func, function.args, function.keywords), depth - 1)
        code = getattr(function, "__code__", None)  # functions that each block makes for itself share their code
        if code is None:
            return type(function), getattr(function, "__qualname__", "")
        return code, self._of(getattr(function, "__defaults__", None), depth - 1)

    def _object(self, value: Any, depth: int) -> Hashable:
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = (type(value),)  # in case it holds itself
            self._known[id(value)] = (type(value), self._of(getattr(value, "__dict__", {}), depth - 1))
        return self._known[id(value)]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in vars(module).items() if key not in _OF_EVERY_MODULE)


def _attributes_by_place(blocks: Mapping[str, nn.Module]) -> dict[str, frozenset[_Attribute]]:
    """For each list of blocks, by its name, the numbers in them that only tell a block's place in it."""
    seen: dict[str, dict[_Attribute, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, block in blocks.items():
        owner, _, place = name.rpartition(".")
        if place.isdigit():
            for inner, module in block.named_modules():
                for key, value in _attributes(module):
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        seen[owner][inner, key].append((int(place), value))
    return {
        owner: frozenset(attribute for attribute, values in numbers.items() if _follows_place(values))
        for owner, numbers in seen.items()
    }


def _follows_place(values: list[tuple[int, float]]) -> bool:
    """Whether numbers grow or fall evenly from place to place. Each comes with its block's place.

    Two numbers always do. They count if they differ by as much as their places.
    """
    if len(values) < 2:
        return False
    (first, start), (second, following) = values[:2]
    slope = (following - start) / (second - first)
    if slope == 0 or (len(values) == 2 and slope != 1):
        return False
    return all(abs(start + slope * (place - first) - value) <= 1e-6 * abs(slope) for place, value in values)
