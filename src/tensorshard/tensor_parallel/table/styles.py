"""The styles of a tensor-parallel table for parameters and modules, one class each; and all styles by name."""

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.tensor_parallel.table.layer_kinds import channel_layouts, is_multihead_attention, signature_of
from tensorshard.tensor_parallel.table.layer_styles import (
    Classes,
    Colwise,
    ColwiseGather,
    ColwiseShared,
    PackedColwise,
    Rowwise,
    Style,
    Vocab,
    numbers_in,
)
from tensorshard.tensor_parallel.table.layouts import REPLICATED, Layout
from tensorshard.torch_private.modules import own_parameters

# -- parameters, or modules with all that they hold --


@dataclass(frozen=True)
class Replicate(Style):
    """Full on every rank.

    Args:
        gradients: "sum_grad" where each rank applies it to activations of its own, so that its gradients are summed;
            "divided" where it is added to each rank's part of a sum, so that it is divided by their number, too.
    """

    name = "replicate"
    usage = "sum_grad or divided or nothing"
    always_right = True
    gradients: str = ""

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        return cls(*options) if options in ([], ["sum_grad"], ["divided"]) else None

    @property
    def sums_gradients(self) -> bool:
        return bool(self.gradients)

    def parameter_layout(self, name: str, parameter: torch.Tensor) -> Layout:
        return REPLICATED


@dataclass(frozen=True)
class Cut(Style):
    """Styles of parameters that are cut along a dimension, `dim`."""

    dim: int

    def layouts(self, name: str, module: nn.Module, size: int) -> dict[str, Layout]:
        prefix = f"{name}." if name else ""
        return {key: self.parameter_layout(prefix + key, p) for key, p in own_parameters(module).items()}

    def _cut(self, name: str, parameter: torch.Tensor, parts: int) -> Layout:
        if self.dim >= parameter.ndim:
            raise ValueError(f"{name} has {parameter.ndim} dimensions, and {self} asks for dimension {self.dim}")
        length = parameter.shape[self.dim]
        if length % parts:
            raise ValueError(
                f"{name} has {length} elements along dimension {self.dim}, which are not {parts} equal parts"
            )
        return Layout(self.dim, (length // parts,) * parts)


@dataclass(frozen=True)
class Slice(Cut):
    """Each rank has a slice and computes with it: for what works element by element on split features.

    Args:
        parts: number of equal parts along the dimension. Each is cut.
    """

    name = "slice"
    usage = "one dimension, as in slice(0), and a number of parts if not 1"
    parts: int = 1

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        numbers = numbers_in(options, least=0)
        return cls(*numbers) if len(numbers) in (1, 2) and numbers[1:] != (0,) else None

    def parameter_layout(self, name: str, parameter: torch.Tensor) -> Layout:
        return self._cut(name, parameter, self.parts)


@dataclass(frozen=True)
class Gather(Cut):
    """Each rank keeps a slice, which is gathered whenever a module is called: memory is split, computation is not.

    Args:
        further_out: 0 if the parameter is read in the forward of its own module, 1 in that of the module around, ...
    """

    name = "gather"
    usage = "one dimension, as in gather(0), and how many modules further out it is read"
    always_right = True
    further_out: int = 0

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        numbers = numbers_in(options, least=0)
        return cls(*numbers) if len(numbers) in (1, 2) else None

    def parameter_layout(self, name: str, parameter: torch.Tensor) -> Layout:
        self.reader(name)
        return self._cut(name, parameter, 1)

    def reader(self, parameter: str) -> str:
        """The name of the module in whose forward `parameter` is gathered.

        Raises:
            ValueError: there is no such module.
        """
        path = parameter.split(".")[:-1]
        if self.further_out > len(path):
            raise ValueError(f"{parameter} has {len(path)} modules around it, and {self} asks for one further out")
        return ".".join(path[: len(path) - self.further_out])


# -- modules --


@dataclass(frozen=True)
class Channels(Style):
    """A module that computes channel by channel, or by groups of channels: each rank has some of them.

    These are batch, group and instance norms, with their running statistics, and grouped and depthwise convolutions.

    Args:
        parts: number of equal parts that the channels consist of. Each is split.
    """

    name = "channels"
    usage = "a number of equal parts, as in channels(2), or nothing"
    parts: int = 1

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        return cls(*numbers_in(options, least=2)) if not options or len(numbers_in(options, least=2)) == 1 else None

    def layouts(self, name: str, module: nn.Module, size: int) -> dict[str, Layout]:
        return channel_layouts(name, module, size, self.parts)


@dataclass(frozen=True)
class Sum(Style):
    """A module whose parameters are sliced so that each rank computes its part of a sum, as of stacked experts.

    Its output is summed over the ranks, and so are the gradients of its inputs.
    """

    name = "sum"


@dataclass(frozen=True)
class Heads(Style):
    """An ``nn.MultiheadAttention``'s heads are split, and with them its packed weights; its ``out_proj`` is rowwise."""

    name = "heads"

    def layouts(self, name: str, module: nn.Module, size: int) -> dict[str, Layout]:
        if not is_multihead_attention(module):
            raise ValueError(
                f"{name} is {kind_of(module)}, which cannot be 'heads': that is for an unmodified "
                f"nn.MultiheadAttention; give the layers of another attention 'colwise' and 'rowwise'"
            )
        assert isinstance(module, nn.MultiheadAttention)
        heads, width = module.num_heads, module.embed_dim
        if heads % size:
            ways = [str(ways) for ways in range(2, heads + 1) if heads % ways == 0]
            raise ValueError(
                f"{name}.num_heads is {heads}, and {heads} heads cannot be divided over {size} ranks; tp can be "
                f"{', '.join(ways) or 'nothing but 1 here'}, or {name} stays whole"
            )
        packed = dict.fromkeys(("in_proj_weight", "in_proj_bias"), Layout(0, (width,) * 3))
        separate = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), Layout(0, (width,)))
        appended = dict.fromkeys(("bias_k", "bias_v"), Layout(2, (width,)))
        return packed | separate | appended


RESHAPE_SIZES = "reshape.sizes"
"""The target of ``divide`` that is no attribute: sizes that a forward takes from its input, which has all features."""
_TARGET = re.compile(r"reshape\.sizes|(config\.)?[^\W\d]\w*(/\d+)?|input\.[^\W\d]\w*\.\d+(/(config\.)?[^\W\d]\w*)?")


@dataclass(frozen=True)
class Divide(Style):
    """Attributes and inputs of a module, such as numbers of heads, are divided by the number of ranks.

    Args:
        targets: what to divide. An attribute; ``config.attribute``; ``attribute/2`` for one that is divided by 2
            instead. ``input.argument.0/attribute`` for an argument of the forward that has, along dimension 0, an entry
            for each head, or for each sample and head: each rank takes those of its heads. The attribute has the number
            of heads. ``input.argument.0`` for one that has an entry for each head. ``reshape.sizes`` for the sizes that
            the forward reshapes and splits to.
    """

    name = "divide"
    usage = (
        "the names of attributes, as in divide(num_heads), which can be divided by 2 or more instead of the number of "
        "ranks, as in divide(num_key_value_groups/2), or inputs, as in divide(input.alibi.0/num_heads), or "
        "divide(reshape.sizes)"
    )
    targets: tuple[str, ...]

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        valid = all(_TARGET.fullmatch(option) for option in options)
        by_one = any((by := option.partition("/")[2]).isdecimal() and int(by) < 2 for option in options)
        return cls(tuple(options)) if options and valid and not by_one else None

    def layouts(self, name: str, module: nn.Module, size: int) -> dict[str, Layout]:
        for target in self.targets:
            if target != RESHAPE_SIZES:
                _check_divides(name, module, target, size)
        return {}


def _check_divides(name: str, module: nn.Module, option: str, size: int) -> None:
    target, _, divisor = option.partition("/")
    if target.startswith("input."):
        argument = target.split(".")[1]
        parameters = signature_of(module).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if argument not in parameters and not takes_any:
            raise ValueError(
                f"{name} ({type(module).__name__}) has no input {argument!r}; its forward takes {', '.join(parameters)}"
            )
        if not divisor:
            return
        target, ways = divisor, size
    else:
        ways = int(divisor) if divisor else size
    owner, key = owner_of(module, target)
    value = getattr(owner, key, None)
    if not isinstance(value, int) or isinstance(value, bool):
        numbers = [k for k, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool)]
        raise ValueError(
            f"{name} ({type(module).__name__}) has no whole number {target!r} to divide; it has "
            f"{', '.join(numbers) or 'none'}"
        )
    if value % ways:
        over = f"over {size} ranks" if ways == size else f"by {ways}"
        raise ValueError(f"{name}.{target} is {value}, which cannot be divided {over}")


def owner_of(module: nn.Module, attribute: str) -> tuple[Any, str]:
    """The object that holds an attribute, such as ``num_heads`` or ``config.num_heads``, and the attribute's name."""
    if attribute.startswith("config."):
        return getattr(module, "config", None), attribute.removeprefix("config.")
    return module, attribute


# -- all styles, and their names --

_LAYER_STYLES = (Colwise, PackedColwise, ColwiseShared, ColwiseGather, Rowwise, Vocab, Classes)
_OTHER_STYLES = (Replicate, Slice, Gather, Channels, Sum, Heads, Divide)
STYLES: Mapping[str, type[Style]] = MappingProxyType({s.name: s for s in (*_LAYER_STYLES, *_OTHER_STYLES)})

COLWISE: Style = Colwise()
COLWISE_GATHER: Style = ColwiseGather()
COLWISE_GATHER_INTO: Style = ColwiseGather(sum_grad=True)
ROWWISE: Style = Rowwise()
ROWWISE_INTO: Style = Rowwise(sum_grad=True)
VOCAB: Style = Vocab()
CLASSES: Style = Classes()
SUM_GRADIENTS: Style = Replicate("sum_grad")
DIVIDED: Style = Replicate("divided")
SUM: Style = Sum()
HEADS: Style = Heads()

_STYLE = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]*)\))?\s*")


def parse_style(text: str) -> Style:
    """The style that `text` spells, such as ``"packed_colwise(3)"``.

    Raises:
        ValueError: the style is unknown (the message names the nearest), or its options are wrong or missing.
    """
    match = _STYLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a style: write a name, or a name with options as in packed_colwise(3)")
    name, inside = match.groups()
    if name not in STYLES:
        near = difflib.get_close_matches(name, STYLES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the styles are {', '.join(STYLES)}"
        raise ValueError(f"{name!r} is not a style; {hint}")
    style = STYLES[name].from_options(
        [option.strip() for option in inside.split(",")] if inside and inside.strip() else []
    )
    if style is None:
        raise ValueError(f"{text!r}: {name} takes {STYLES[name].usage}")
    return style
