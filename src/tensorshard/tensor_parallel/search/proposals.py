"""The ways in which a region might be split, the likeliest first."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import nn

from tensorshard.tensor_parallel.search.dataflow import Dataflow, Region
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_multihead_attention
from tensorshard.tensor_parallel.table.styles import COLWISE, HEADS, RESHAPE_SIZES, ROWWISE, SUM_GRADIENTS, Style

# At most so many attributes are divided at once, and so many ways tried: what needs more has never been seen.
_MOST_ATTRIBUTES = 3
_MOST_TRIES = 600


@dataclass(frozen=True)
class Proposal:
    """One way to split a region.

    Args:
        styles: of modules and parameters, by their names in the block.
        sliced_inputs: tensor inputs of the block that would have to come split, and along which dimension.
    """

    styles: dict[str, Style]
    sliced_inputs: dict[int, int]


def proposals(
    block: nn.Module,
    region: Region,
    flow: Dataflow,
    inputs: list[torch.Tensor],
    size: int,
    *,
    provided: Container[int] = (),
) -> Iterator[Proposal]:
    """Ways to split `region` over `size` ranks.

    What varies: the attributes of the owning modules that are divided (none, then one, two, three of those that their
    forward reads); whether the sizes are that it reshapes to; into how many parts the columns are packed; whether a
    per-head input of the block comes split, or is cut where it is used; and whether a parameter in between is per
    feature, and thus sliced.

    Args:
        inputs: the block's tensor inputs. provided: those, by their indices, that come out of other blocks.
    """
    if is_multihead_attention(block.get_submodule(region.columns[0])):
        yield Proposal({region.columns[0]: HEADS, **dict.fromkeys(region.rows, ROWWISE)}, {})
        return
    numbers = owned_numbers(region, flow)
    divisible = [(owner, name) for owner, name, value in numbers if value % size == 0]
    packings = list(_packings(block, region, sorted({value for _, _, value in numbers})))
    slicings = _input_slicings(region, inputs, size, provided)
    between = between_styles(block, region)
    tries = 0
    for count in range(_MOST_ATTRIBUTES + 1):
        for chosen in combinations(divisible, count):
            ways = [(slicing, chosen) for slicing in slicings]
            ways += [({}, (*chosen, cut)) for cut in _cut_arguments(region, flow, chosen, numbers, provided)]
            if count < _MOST_ATTRIBUTES:
                ways.append(({}, (*chosen, (owner_of(region), RESHAPE_SIZES))))
            for packing, (slicing, divided), extra in product(packings, ways, between):
                tries += 1
                if tries > _MOST_TRIES:
                    return
                rows = dict.fromkeys(region.rows, ROWWISE)
                yield Proposal({**packing, **rows, **extra, **divide_styles(divided)}, slicing)


def owner_of(region: Region) -> str:
    """The module whose forward calls the region's columns."""
    return region.columns[0].rpartition(".")[0]


def divide_styles(chosen: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """One style a module, from pairs of modules and what is to be divided of them."""
    options: dict[str, list[str]] = {}
    for owner, option in chosen:
        options.setdefault(owner, []).append(option)
    return {owner: Style("divide", names=tuple(names)) for owner, names in options.items()}


def _cut_arguments(
    region: Region,
    flow: Dataflow,
    chosen: Iterable[tuple[str, str]],
    numbers: list[tuple[str, str, int]],
    provided: Container[int],
) -> Iterator[tuple[str, str]]:
    """Arguments of a module that may have an entry for each of the heads that it divides, as options of it."""
    values = {(owner, name): value for owner, name, value in numbers}
    met = {index for index in region.inputs if index not in provided}
    for owner, name in chosen:
        for key, argument in flow.arguments.get(owner, {}).items():
            if argument.origins & met:
                for dim, length in enumerate(argument.shape):
                    if length and length % values[owner, name] == 0:
                        yield owner, f"input.{key}.{dim}/{name}"


def owned_numbers(region: Region, flow: Dataflow) -> list[tuple[str, str, int]]:
    """The whole numbers that the modules around the region's layers read: (module, attribute, value)."""
    owners: dict[str, None] = {}
    for layer in (*region.rows, *region.columns):
        owners[layer.rpartition(".")[0]] = None
    for layer in (*region.rows, *region.columns):
        owner = layer.rpartition(".")[0]
        while owner:
            owner = owner.rpartition(".")[0]
            owners.setdefault(owner)
    return [(owner, name, value) for owner in owners for name, value in flow.numbers.get(owner, {}).items()]


def _packings(block: nn.Module, region: Region, numbers: list[int]) -> Iterator[dict[str, Style]]:
    """Styles of the columns: unpacked, 2 or 3 equal parts, then query, key and value by the numbers of their
    heads."""
    yield dict.fromkeys(region.columns, COLWISE)
    outputs = {name: layer.outputs for name in region.columns if (layer := as_splittable(block.get_submodule(name)))}
    linear = [name for name in region.columns if not isinstance(block.get_submodule(name), nn.Embedding)]
    for parts in (2, 3):
        if all(outputs[name] % parts == 0 for name in linear):
            packed = dict.fromkeys(linear, Style("packed_colwise", (parts,)))
            yield {**dict.fromkeys(region.columns, COLWISE), **packed}
    if len(linear) == 1:
        products = {a * b for a in numbers for b in numbers}
        for keys in sorted(products, reverse=True):
            queries = outputs[linear[0]] - 2 * keys
            if queries in products and queries != keys:
                packed = {linear[0]: Style("packed_colwise", (queries, keys, keys))}
                yield {**dict.fromkeys(region.columns, COLWISE), **packed}


def between_styles(block: nn.Module, region: Region) -> list[dict[str, Style]]:
    """Styles of the parameters between columns and rows: whole, else those with a value per feature cut."""
    whole = dict.fromkeys(region.between, SUM_GRADIENTS)
    widths = {layer.outputs for name in region.columns if (layer := as_splittable(block.get_submodule(name)))}
    parameters = dict(block.named_parameters())
    cut = {
        name: Style("slice", (dim,))
        for name in region.between
        for dim, width in reversed(list(enumerate(parameters[name].shape)))
        if width in widths
    }
    return [whole, {**whole, **cut}] if cut else [whole]


def _input_slicings(
    region: Region, inputs: list[torch.Tensor], size: int, provided: Container[int]
) -> list[dict[int, int]]:
    """None, or one floating-point input from another block that the region applies to its activations, per head
    perhaps."""
    found: list[dict[int, int]] = [{}]
    for index in region.inputs:
        tensor = inputs[index]
        if tensor.is_floating_point() and index in provided:
            found += [{index: dim} for dim in range(tensor.ndim - 1) if tensor.shape[dim] % size == 0]
    return found
