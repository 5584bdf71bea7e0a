"""What a style of a tensor-parallel table is, and the styles of layers: one class each.

A class has the style's name and options, and the layouts that it asks for. What it does to a module is in
:mod:`tensorshard.tensor_parallel.apply.apply_table`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import nn

from tensorshard.common.words import kind_of
from tensorshard.tensor_parallel.table.layer_kinds import SplittableLayer, as_splittable
from tensorshard.tensor_parallel.table.layouts import Layout

_CLASS_NAMES = {
    "linear": "an nn.Linear, or an unmodified nn.Conv1d, 2d or 3d, or nn.ConvTranspose1d, 2d or 3d of one group",
    "embedding": "an nn.Embedding",
    "head": "a ParallelLinearCrossEntropy",
}


@dataclass(frozen=True)
class Style:
    """The right-hand side of one entry of a table.

    Attributes:
        name: what a table calls it.
        usage: what its parentheses take, for messages.
        always_right: whether it is right wherever the layer is called as a module, so that the code around needs no
            check by numbers.
    """

    name: ClassVar[str]
    usage: ClassVar[str] = "no options"
    always_right: ClassVar[bool] = False

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        """The style with `options`, as they stand in a table in parentheses; None if they are wrong or missing."""
        return None if options else cls()

    def __str__(self) -> str:
        options: list[object] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is True:
                options.append(field.name)
            elif value != field.default:
                options += value if isinstance(value, tuple) else [value]
        return f"{self.name}({', '.join(map(str, options))})" if options else self.name

    @property
    def sums_gradients(self) -> bool:
        """Whether each rank has only a part of the gradients of what the style names, so they have to be summed."""
        return False

    @property
    def sums_output_gradients(self) -> bool:
        """The same for the gradients of the output of a row or gathered layer: each rank continues on its own."""
        return False

    def layouts(self, name: str, module: nn.Module, size: int) -> dict[str, Layout]:
        """Layouts on `size` ranks of the parameters and buffers that `module` itself holds, unless they are replicated.

        Args:
            name: the module's name in the model, for messages.

        Raises:
            ValueError: the style does not suit the module, or it cannot be split over so many ranks.
        """
        return {}

    def parameter_layout(self, name: str, parameter: torch.Tensor) -> Layout:
        """The layout of a parameter that a table names itself.

        Raises:
            ValueError: the style does not suit it.
        """
        raise ValueError(
            f"{name} is a parameter, which can be 'slice(dim)', 'gather(dim)' or 'replicate', not {self.name!r}"
        )


def numbers_in(options: Sequence[str], least: int) -> tuple[int, ...]:
    """The whole numbers in `options`; none if one of them is something else, or smaller than `least`."""
    valid = all(option.isdecimal() and int(option) >= least for option in options)
    return tuple(map(int, options)) if valid else ()


# -- layers --


@dataclass(frozen=True)
class LayerStyle(Style):
    """Splits the weight of a layer.

    Attributes:
        layer_kinds: the kinds of layers that it is for.
        splits_inputs: whether each rank has some of the inputs (for an embedding: of the rows), and the output is
            summed over the ranks. Else each rank computes some of the outputs.
    """

    layer_kinds: ClassVar[tuple[str, ...]] = ("linear", "convolution")
    splits_inputs: ClassVar[bool] = False

    def layouts(self, name: str, module: nn.Module, size: int) -> dict[str, Layout]:
        layer = as_splittable(module)
        if layer is None or layer.kind not in self.layer_kinds:
            is_head = layer is not None and layer.kind == "head"
            raise ValueError(
                f"{name} is {kind_of(module)}, which cannot be {self.name!r}: that is for "
                f"{_CLASS_NAMES[self.layer_kinds[0]]}{'; it can be classes' if is_head else ''}"
            )
        if self.sums_output_gradients and not layer.is_plain_linear:
            raise ValueError(f"{name} is {kind_of(module)}, which cannot be {str(self)!r}: that is for an nn.Linear")
        if self.splits_inputs:
            return {"weight": Layout(layer.input_dim, (layer.inputs,))}
        parts = self.output_parts(name, layer, size)
        return {"weight": Layout(layer.output_dim, parts), "bias": Layout(0, parts)}

    def output_parts(self, name: str, layer: SplittableLayer, size: int) -> tuple[int, ...]:
        """The parts that the outputs of `layer` consist of. Each part is split over `size` ranks."""
        return (layer.outputs,)

    def _check_sum(self, name: str, layer: SplittableLayer, parts: Sequence[int]) -> None:
        if sum(parts) != layer.outputs:
            raise ValueError(
                f"{name} has {layer.outputs} output features, and the parts of {self} add up to {sum(parts)}"
            )


class Column(LayerStyle):
    """Styles of layers after which each rank has features or channels of its own."""

    layer_kinds = ("linear", "convolution", "embedding")


@dataclass(frozen=True)
class Colwise(Column):
    """A linear layer's output features, a convolution's output channels, or an embedding's features, are split."""

    name = "colwise"


@dataclass(frozen=True)
class PackedColwise(Column):
    """As colwise, for several layers fused into one.

    Args:
        sizes: the number of equal parts, or the parts' sizes.
    """

    name = "packed_colwise"
    usage = "a number of equal parts, as in packed_colwise(3), or their sizes, as in packed_colwise(64, 32, 32)"
    sizes: tuple[int, ...]

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        sizes = numbers_in(options, least=1)
        return cls(sizes) if sizes else None

    def output_parts(self, name: str, layer: SplittableLayer, size: int) -> tuple[int, ...]:
        if len(self.sizes) > 1:
            self._check_sum(name, layer, self.sizes)
            return self.sizes
        (count,) = self.sizes
        if layer.outputs % count:
            raise ValueError(
                f"{name} has {layer.outputs} output features, which are not {count} equal parts; give "
                f"the parts' sizes, as in packed_colwise(64, 32, 32)"
            )
        return (layer.outputs // count,) * count


@dataclass(frozen=True)
class ColwiseShared(Column):
    """As colwise, for key and value layers that have fewer heads than there are ranks.

    Each rank holds a part of a head, and gathers the rest from the ranks that use the same head.

    Args:
        heads: number of key-value heads.
        sizes: output features of queries, keys and values, if they are fused into one layer.
    """

    name = "colwise_shared"
    usage = (
        "the number of key-value heads, as in colwise_shared(2), and for a fused layer the sizes of its queries, keys "
        "and values, as in colwise_shared(2, 64, 16, 16)"
    )
    heads: int
    sizes: tuple[int, ...] = ()

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        numbers = numbers_in(options, least=1)
        return cls(numbers[0], numbers[1:]) if len(numbers) in (1, 4) else None

    def output_parts(self, name: str, layer: SplittableLayer, size: int) -> tuple[int, ...]:
        if layer.kind != "linear":
            kind = "an embedding" if layer.kind == "embedding" else f"a {layer.kind}"
            raise ValueError(f"{name} is {kind}, which cannot be {str(self)!r}: that is for a linear layer")
        parts = self.sizes or (layer.outputs,)
        if len(parts) == 3 and parts[1] != parts[2]:
            raise ValueError(
                f"{name}: {self} says {parts[1]} features of keys and {parts[2]} of values; they must be equal"
            )
        self._check_sum(name, layer, parts)
        self._check_heads(name, parts[-2:], size)
        return parts

    def _check_heads(self, name: str, widths: Sequence[int], size: int) -> None:
        """Refuses heads that the ranks cannot share evenly. `widths` are those of keys and values in the layer."""
        heads = self.heads
        if heads % size and size % heads:
            raise ValueError(
                f"{name} has {heads} key-value heads, which {size} ranks cannot share evenly: tp must be a multiple of "
                f"{heads}, or divide it"
            )
        for width in widths:
            if width % heads:
                raise ValueError(f"{name} has {width} key or value features, which are not {heads} equal heads")
            if heads < size and width % size:
                raise ValueError(
                    f"{name} has {heads} key-value heads of {width // heads} features each, which the {size // heads} "
                    f"ranks that share one cannot divide; lower tp"
                )


@dataclass(frozen=True)
class FullOutput(LayerStyle):
    """Styles of split linear layers and convolutions whose output is full.

    Args:
        sum_grad: for a linear layer whose output each rank's own activations meet, so that its gradients are summed.
    """

    usage = "sum_grad or nothing"
    sum_grad: bool = False

    @classmethod
    def from_options(cls, options: list[str]) -> Self | None:
        return cls(bool(options)) if options in ([], ["sum_grad"]) else None

    @property
    def sums_output_gradients(self) -> bool:
        return self.sum_grad


@dataclass(frozen=True)
class ColwiseGather(FullOutput):
    """The output features or channels are split, and the output is gathered."""

    name = "colwise_gather"
    always_right = True


@dataclass(frozen=True)
class Rowwise(FullOutput):
    """The input features or channels are split, and the output is summed over the ranks."""

    name = "rowwise"
    splits_inputs = True


@dataclass(frozen=True)
class Vocab(LayerStyle):
    """An embedding's rows are split, and its output is summed over the ranks."""

    name = "vocab"
    always_right = True
    layer_kinds = ("embedding",)
    splits_inputs = True


@dataclass(frozen=True)
class Classes(LayerStyle):
    """The classes of a ``ParallelLinearCrossEntropy`` are split, and its loss is that of all."""

    name = "classes"
    always_right = True
    layer_kinds = ("head",)
