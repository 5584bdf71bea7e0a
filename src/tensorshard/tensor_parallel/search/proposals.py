"""The ways in which a region might be split, the likeliest first."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import nn

from tensorshard.tensor_parallel.search.dataflow import Dataflow, Region
from tensorshard.tensor_parallel.table.channelwise import Channelwise, as_channelwise
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_multihead_attention
from tensorshard.tensor_parallel.table.styles import (
    CHANNELS,
    COLWISE,
    COLWISE_GATHER_INTO,
    HEADS,
    RESHAPE_SIZES,
    ROWWISE,
    ROWWISE_INTO,
    SUM_GRADIENTS,
    Style,
)
from tensorshard.tensor_parallel.verify.channels_check import computes_by_channel

# At most so many attributes are divided at once, and so many ways tried: what needs more has never been seen.
_MOST_ATTRIBUTES = 3
_MOST_TRIES = 600
# Where there are convolutions: each try costs more, and what more would find has never been seen either.
_MOST_ATTRIBUTES_OF_CONVOLUTIONS = 2
_MOST_TRIES_OF_CONVOLUTIONS = 48


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
    feature, and thus sliced. Modules in between that compute channel by channel do so for each rank's channels, in all
    of these ways.

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
    modules = channelwise_modules(block, region, size)
    between = between_styles(block, region, modules)
    arguments_by_head = list(_arguments_by_head(region, flow, inputs, size, provided))
    most_attributes, most_tries = _MOST_ATTRIBUTES, _MOST_TRIES
    if has_convolutions(block, region):
        most_attributes, most_tries = _MOST_ATTRIBUTES_OF_CONVOLUTIONS, _MOST_TRIES_OF_CONVOLUTIONS
        between.reverse()  # what has a value per channel is per channel
    tries = 0
    for chosen in _ways_to_divide(divisible, (owner_of(region), RESHAPE_SIZES), most_attributes):
        ways = [(slicing, chosen) for slicing in slicings]
        ways += [({}, (*chosen, cut)) for cut in _cut_arguments(region, flow, chosen, numbers, provided)]
        ways += [({}, (*chosen, cut)) for cut in arguments_by_head]
        for packing, (slicing, divided), extra in product(packings, ways, between):
            tries += 1
            if tries > most_tries:
                return
            rows = dict.fromkeys(region.rows, ROWWISE)
            channels = _channel_styles(block, packing, modules)
            styles = {**packing, **rows, **extra, **channels, **divide_styles(divided)}
            entering = enter_styles(block, region, styles)
            if entering:
                yield Proposal({**styles, **entering}, slicing)
            yield Proposal(styles, slicing)


def enter_styles(block: nn.Module, region: Region, styles: Mapping[str, Style]) -> dict[str, Style]:
    """How `styles` change where full outputs of other layers are computed with in `region`.

    The gradients of these outputs are added over the ranks once, for all that is made of them: column layers that read
    them leave theirs as they are. Empty if there are no such layers, or one that cannot be treated so.
    """
    layers = {name: as_splittable(module) for name, module in block.named_modules() if name in region.entered}
    if not all(layer is not None and layer.kind == "linear" and not layer.own_forward for layer in layers.values()):
        return {}
    changed = {name: ROWWISE_INTO if name in region.rows else COLWISE_GATHER_INTO for name in layers}
    for name in region.fed if changed else ():
        layer, style = as_splittable(block.get_submodule(name)), styles[name]
        if layer is None or layer.kind != "linear" or layer.output_dim != 0 or len(style.sizes) > 1:
            return {}
        changed[name] = Style("slice", (0, *style.sizes))
    return changed


def _ways_to_divide(
    attributes: list[tuple[str, str]], reshapes: tuple[str, str], most: int
) -> Iterator[tuple[tuple[str, str], ...]]:
    """None of the `attributes`, each, what the forward reshapes to by itself and with each, then two, ... `most`."""
    for count in range(most + 1):
        if count == 2:
            yield (reshapes,)
            yield from ((attribute, reshapes) for attribute in attributes)
        yield from combinations(attributes, count)


def owner_of(region: Region) -> str:
    """The module whose forward calls the region's columns."""
    return region.columns[0].rpartition(".")[0]


def has_convolutions(block: nn.Module, region: Region) -> bool:
    """Whether a convolution is among the layers of `region`."""
    layers = [as_splittable(block.get_submodule(name)) for name in (*region.columns, *region.rows)]
    return any(layer is not None and layer.kind == "convolution" for layer in layers)


def channelwise_modules(block: nn.Module, region: Region, size: int) -> dict[str, Channelwise]:
    """Those of `region` that compute channel by channel, the channels being its columns' or parts of them.

    Among linear layers these are norms alone: what else has a value per feature is cut one parameter at a time.
    """
    widths: set[int] = set()
    if has_convolutions(block, region):
        widths = {width // parts for width in _widths(block, region) for parts in (1, 2, 3)}
    found = {}
    for name in region.channelwise:
        module = block.get_submodule(name)
        described = as_channelwise(module)
        if described is None or not (described.surely or described.inputs in widths):
            continue
        if computes_by_channel(module, size):
            found[name] = described
    return found


def _channel_styles(block: nn.Module, packing: dict[str, Style], modules: dict[str, Channelwise]) -> dict[str, Style]:
    """Styles of `modules`: those that are as wide as a packed column are packed as it is."""
    parts = {}
    for name, style in packing.items():
        layer = as_splittable(block.get_submodule(name))
        if layer is not None and len(style.sizes) == 1:
            parts[layer.outputs] = style.sizes[0]
    return {
        name: Style("channels", (parts[found.inputs],)) if found.inputs in parts else CHANNELS
        for name, found in modules.items()
    }


def _widths(block: nn.Module, region: Region) -> set[int]:
    return {layer.outputs for name in region.columns if (layer := as_splittable(block.get_submodule(name)))}


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
    chosen = [pair for pair in chosen if pair in values]
    met = {index for index in region.inputs if index not in provided}
    for owner, name in chosen:
        for key, argument in flow.arguments.get(owner, {}).items():
            if argument.origins & met:
                for dim, length in enumerate(argument.shape):
                    if length and length % values[owner, name] == 0:
                        yield owner, f"input.{key}.{dim}/{name}"


def _arguments_by_head(
    region: Region,
    flow: Dataflow,
    inputs: list[torch.Tensor],
    size: int,
    provided: Container[int],
) -> Iterator[tuple[str, str]]:
    """Arguments of the owning module that may have an entry for each head of which it knows no number.

    These are learned ones (a bias of relative positions, say): a mask is mostly one for all heads.
    """
    learned = {index for index in region.inputs if index not in provided and inputs[index].requires_grad}
    owner = owner_of(region)
    for key, argument in flow.arguments.get(owner, {}).items():
        if argument.origins & learned:
            for dim, length in enumerate(argument.shape[:-2]):
                if length > 1 and length % size == 0:
                    yield owner, f"input.{key}.{dim}"


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


def between_styles(block: nn.Module, region: Region, channelwise: Container[str] = ()) -> list[dict[str, Style]]:
    """Styles of the parameters between columns and rows: whole, else cut where they have a value per feature or head.

    Features are those of a column, or of a half or a third of one that is packed. Only a parameter beside the layers is
    taken to have values per head: what norms hold is of one head.

    Args:
        channelwise: modules whose parameters are left out.
    """
    names = [name for name in region.between if name.rpartition(".")[0] not in channelwise]
    parameters = dict(block.named_parameters())
    whole = dict.fromkeys(names, SUM_GRADIENTS)
    widths = _widths(block, region)
    ways = [whole]
    for parts in (1, 2, 3):
        if parts > 1 and not any(size * parts in widths for name in names for size in parameters[name].shape):
            continue
        cut = {name: style for name in names if (style := _cut_by_width(parameters[name].shape, widths, parts))}
        ways.append({**whole, **cut})
    if has_convolutions(block, region):
        return [way for index, way in enumerate(ways) if way not in ways[:index]]
    owners = {layer.rpartition(".")[0] for layer in (*region.columns, *region.rows)}
    by_head = {
        name: Style("slice", (dim,))
        for name in names
        if name.rpartition(".")[0] in owners
        for dim, heads in reversed(list(enumerate(parameters[name].shape)))
        if heads > 1 and heads not in widths and any(width % heads == 0 for width in widths)
    }
    ways.append({**whole, **by_head})
    return [way for index, way in enumerate(ways) if way not in ways[:index]]


def _cut_by_width(shape: torch.Size, widths: Container[int], parts: int) -> Style | None:
    """How a parameter is cut along the first dimension with a value per feature of a column of so many `parts`."""
    for dim, length in enumerate(shape):
        if parts > 1 and length * parts in widths:
            return Style("slice", (dim,))
        if length in widths:
            return Style("slice", (dim,) if parts == 1 else (dim, parts))
    return None


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
