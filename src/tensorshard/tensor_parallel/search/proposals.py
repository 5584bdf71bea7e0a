"""The ways in which a region might be split, the most likely first."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import nn

from tensorshard.tensor_parallel.search.dataflow import Dataflow, Region
from tensorshard.tensor_parallel.table.layer_kinds import (
    Channelwise,
    as_channelwise,
    as_splittable,
    is_multihead_attention,
)
from tensorshard.tensor_parallel.table.layer_styles import ColwiseShared, PackedColwise, Style
from tensorshard.tensor_parallel.table.styles import (
    COLWISE,
    COLWISE_GATHER_INTO,
    DIVIDED,
    HEADS,
    RESHAPE_SIZES,
    ROWWISE,
    ROWWISE_INTO,
    SUM,
    SUM_GRADIENTS,
    Channels,
    Divide,
    Slice,
)
from tensorshard.tensor_parallel.verify.layer_checks import computes_by_channel
from tensorshard.torch_private.modules import own_parameters

# The largest number of attributes that are divided at once, and of ways that are tried. No model has needed more.
_MOST_ATTRIBUTES = 3
_MOST_TRIES = 600
# The same if there are convolutions. Each try costs more then, and no model has needed more.
_MOST_ATTRIBUTES_OF_CONVOLUTIONS = 2
_MOST_TRIES_OF_CONVOLUTIONS = 48
_MOST_TRIES_OF_SHARED_HEADS = 400
_MOST_TRIES_OF_EXPERTS = 64


@dataclass(frozen=True)
class Proposal:
    """One way to split a region.

    Args:
        styles: of modules and parameters, by their names in the block.
        sliced_inputs: tensor inputs of the block that would have to come split, each with its dimension.
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

    The ways differ in: the attributes of the owning modules that are divided (none, then one, two, three of those that
    their forward reads); whether the sizes that the forward reshapes to are divided; the number of parts that the
    columns are packed in; whether a per-head input of the block comes split, or is cut where it is used; and whether a
    parameter in between is per feature, and thus sliced. Modules in between that compute channel by channel always do
    so for each rank's channels.

    Args:
        inputs: the block's tensor inputs.
        provided: indices of those that come out of other blocks.
    """
    if is_multihead_attention(block.get_submodule(region.columns[0])):
        yield Proposal({region.columns[0]: HEADS, **dict.fromkeys(region.rows, ROWWISE)}, {})
        return
    numbers = _owned_numbers(region, flow)
    divisible = [(owner, name) for owner, name, value in numbers if value % size == 0]
    packings = list(_with_added(region, _packings(block, region, sorted({value for _, _, value in numbers}))))
    slicings = _input_slicings(region, inputs, size, provided)
    modules = _channelwise_modules(block, region, size)
    between = _between_styles(block, region, modules)
    arguments_by_head = list(_arguments_by_head(region, flow, inputs, size, provided))
    most_attributes, most_tries = _MOST_ATTRIBUTES, _MOST_TRIES
    if _has_convolutions(block, region):
        most_attributes, most_tries = _MOST_ATTRIBUTES_OF_CONVOLUTIONS, _MOST_TRIES_OF_CONVOLUTIONS
        between.reverse()  # here a parameter with a value per channel is most likely to be cut
    tries = 0
    for chosen in _ways_to_divide(divisible, (_owner_of(region, flow), RESHAPE_SIZES), most_attributes):
        ways = [(slicing, chosen) for slicing in slicings]
        ways += [({}, (*chosen, cut)) for cut in _cut_arguments(region, flow, chosen, numbers, provided)]
        ways += [({}, (*chosen, cut)) for cut in arguments_by_head]
        for packing, (slicing, divided), extra in product(packings, ways, between):
            tries += 1
            if tries > most_tries:
                return
            rows = dict.fromkeys(region.rows, ROWWISE)
            channels = _channel_styles(block, packing, modules)
            styles = {**packing, **rows, **extra, **channels, **_divide_styles(divided)}
            entering = _enter_styles(block, region, styles)
            if entering:
                yield Proposal({**styles, **entering}, slicing)
            yield Proposal(styles, slicing)


def _enter_styles(block: nn.Module, region: Region, styles: Mapping[str, Style]) -> dict[str, Style]:
    """How `styles` change if full outputs of other layers are used in `region`.

    The gradients of these outputs are summed over the ranks once. So column layers that read them must not sum theirs.
    Empty if there are no such layers, or one of them cannot be treated so.
    """
    layers = {name: as_splittable(module) for name, module in block.named_modules() if name in region.entered}
    if not all(layer is not None and layer.is_plain_linear for layer in layers.values()):
        return {}
    changed = {name: ROWWISE_INTO if name in region.rows else COLWISE_GATHER_INTO for name in layers}
    for name in region.fed if changed else ():
        layer, style = as_splittable(block.get_submodule(name)), styles[name]
        sizes = style.sizes if isinstance(style, PackedColwise) else (1,)
        if layer is None or layer.kind != "linear" or layer.output_dim != 0 or len(sizes) > 1:
            return {}
        changed[name] = Slice(0, sizes[0])
    return changed


def _ways_to_divide(
    attributes: list[tuple[str, str]], reshapes: tuple[str, str], most: int
) -> Iterator[tuple[tuple[str, str], ...]]:
    """What to divide: nothing; each attribute; `reshapes` alone and with each; then two attributes, up to `most`."""
    for count in range(most + 1):
        if count == 2:
            yield (reshapes,)
            yield from ((attribute, reshapes) for attribute in attributes)
        yield from combinations(attributes, count)


def _owner_of(region: Region, flow: Dataflow) -> str:
    """The module whose forward calls the region's columns."""
    return flow.low_rank.owner_of(region.columns[0])


def _with_added(region: Region, packings: Iterable[dict[str, Style]]) -> Iterator[dict[str, Style]]:
    """`packings`, in which what is added to a column is packed as that column."""
    return ({**packing, **{name: packing[layer] for name, layer in region.added}} for packing in packings)


def _has_convolutions(block: nn.Module, region: Region) -> bool:
    """Whether a convolution is among the layers of `region`."""
    layers = [as_splittable(block.get_submodule(name)) for name in (*region.columns, *region.rows)]
    return any(layer is not None and layer.kind == "convolution" for layer in layers)


def _channelwise_modules(block: nn.Module, region: Region, size: int) -> dict[str, Channelwise]:
    """Those modules of `region` that compute channel by channel, on the channels of its columns or on parts of them.

    Among linear layers only norms count. Other modules with a value per feature are cut one parameter at a time.
    """
    widths: set[int] = set()
    if _has_convolutions(block, region):
        widths = {width // parts for width in _widths(block, region) for parts in (1, 2, 3)}
    modules = {}
    for name in region.channelwise:
        module = block.get_submodule(name)
        described = as_channelwise(module)
        if described is None or not (described.surely or described.inputs in widths):
            continue
        if computes_by_channel(module, size):
            modules[name] = described
    return modules


def _channel_styles(block: nn.Module, packing: dict[str, Style], modules: dict[str, Channelwise]) -> dict[str, Style]:
    """Styles of `modules`. Those that are as wide as a packed column are packed in the same way."""
    parts = {}
    for name, style in packing.items():
        layer = as_splittable(block.get_submodule(name))
        if layer is not None and isinstance(style, PackedColwise) and len(style.sizes) == 1:
            parts[layer.outputs] = style.sizes[0]
    return {name: Channels(parts.get(module.inputs, 1)) for name, module in modules.items()}


def _widths(block: nn.Module, region: Region) -> set[int]:
    return {layer.outputs for name in region.columns if (layer := as_splittable(block.get_submodule(name)))}


def _divide_styles(chosen: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """One style for each module, from pairs of a module and what to divide in it."""
    options: dict[str, list[str]] = {}
    for owner, option in chosen:
        options.setdefault(owner, []).append(option)
    return {owner: Divide(tuple(names)) for owner, names in options.items()}


def _cut_arguments(
    region: Region,
    flow: Dataflow,
    chosen: Iterable[tuple[str, str]],
    numbers: list[tuple[str, str, int]],
    provided: Container[int],
) -> Iterator[tuple[str, str]]:
    """Arguments of a module that may have an entry for each head that it divides, as options of ``divide``."""
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
    """Arguments of the owning module that may have an entry per head, if the module has no attribute for that number.

    These are learned ones (a bias of relative positions, say). A mask is mostly the same for all heads.
    """
    learned = {index for index in region.inputs if index not in provided and inputs[index].requires_grad}
    owner = _owner_of(region, flow)
    for key, argument in flow.arguments.get(owner, {}).items():
        if argument.origins & learned:
            for dim, length in enumerate(argument.shape[:-2]):
                if length > 1 and length % size == 0:
                    yield owner, f"input.{key}.{dim}"


def _owned_numbers(region: Region, flow: Dataflow) -> list[tuple[str, str, int]]:
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
    """Styles of the columns: unpacked, then 2 or 3 equal parts, then query, key and value by their numbers of heads."""
    yield dict.fromkeys(region.columns, COLWISE)
    outputs = {name: layer.outputs for name in region.columns if (layer := as_splittable(block.get_submodule(name)))}
    added = dict(region.added)
    linear = [n for n in region.columns if n not in added and not isinstance(block.get_submodule(n), nn.Embedding)]
    for parts in (2, 3):
        if all(outputs[name] % parts == 0 for name in linear):
            packed = dict.fromkeys(linear, PackedColwise((parts,)))
            yield {**dict.fromkeys(region.columns, COLWISE), **packed}
    if len(linear) == 1:
        products = {a * b for a in numbers for b in numbers}
        for keys in sorted(products, reverse=True):
            queries = outputs[linear[0]] - 2 * keys
            if queries in products and queries != keys:
                packed = {linear[0]: PackedColwise((queries, keys, keys))}
                yield {**dict.fromkeys(region.columns, COLWISE), **packed}


def _between_styles(block: nn.Module, region: Region, channelwise: Container[str] = ()) -> list[dict[str, Style]]:
    """Styles of the parameters between columns and rows: whole, else cut if they have a value per feature or head.

    Features are those of a column, or of a half or a third of one that is packed. Only a parameter outside of the
    layers may have a value per head, since norms hold the values of one head.

    Args:
        channelwise: modules whose parameters are left out.
    """
    names = [name for name in region.between if name.rpartition(".")[0] not in channelwise]
    parameters = dict(block.named_parameters())
    whole: dict[str, Style] = dict.fromkeys(names, SUM_GRADIENTS)
    widths = _widths(block, region)
    ways = [whole]
    for parts in (1, 2, 3):
        if parts > 1 and not any(size * parts in widths for name in names for size in parameters[name].shape):
            continue
        cut = {name: style for name in names if (style := _cut_by_width(parameters[name].shape, widths, parts))}
        ways.append({**whole, **cut})
    if _has_convolutions(block, region):
        return [way for index, way in enumerate(ways) if way not in ways[:index]]
    owners = {layer.rpartition(".")[0] for layer in (*region.columns, *region.rows)}
    by_head: dict[str, Style] = {
        name: Slice(dim)
        for name in names
        if name.rpartition(".")[0] in owners
        for dim, heads in reversed(list(enumerate(parameters[name].shape)))
        if heads > 1 and heads not in widths and any(width % heads == 0 for width in widths)
    }
    ways.append({**whole, **by_head})
    return [way for index, way in enumerate(ways) if way not in ways[:index]]


def _cut_by_width(shape: torch.Size, widths: Container[int], parts: int) -> Style | None:
    """How to cut a parameter along dimension 0 if it has a value per feature of a column of `parts` parts."""
    for dim, length in enumerate(shape):
        if parts > 1 and length * parts in widths:
            return Slice(dim)
        if length in widths:
            return Slice(dim, parts)
    return None


def _input_slicings(
    region: Region, inputs: list[torch.Tensor], size: int, provided: Container[int]
) -> list[dict[int, int]]:
    """Nothing, or one floating-point input from another block that the region may apply to its activations per head."""
    slicings: list[dict[int, int]] = [{}]
    for index in region.inputs:
        tensor = inputs[index]
        if tensor.is_floating_point() and index in provided:
            slicings += [{index: dim} for dim in range(tensor.ndim - 1) if tensor.shape[dim] % size == 0]
    return slicings


# -- attention whose keys and values have fewer heads than there are ranks --


def shared_proposals(block: nn.Module, region: Region, flow: Dataflow, size: int) -> Iterator[Proposal]:
    """Ways to split `region` over `size` ranks, several of which share each key-value head.

    The ways differ in: the number of key-value heads; which attributes of the owning modules are divided, and by how
    much (heads by the number of ranks, query heads of one key-value head by the ranks that share it, key-value heads by
    their number); and, for a fused layer, the sizes of keys and values.
    """
    if is_multihead_attention(block.get_submodule(region.columns[0])) or _has_convolutions(block, region):
        return
    numbers = _owned_numbers(region, flow)
    between = _between_styles(block, region)
    counts = sorted(n for n in range(1, size) if size % n == 0)
    known = {value for _, _, value in numbers}
    counts.sort(key=lambda n: n not in known and n != 1)  # those that a module has as an attribute come first
    rows = dict.fromkeys(region.rows, ROWWISE)
    tries = 0
    for heads in counts:
        packings = list(_with_added(region, _shared_packings(block, region, heads, size, known)))
        options = list(_ways_to_divide_shared(numbers, heads, size)) if packings else []
        for count in range(_MOST_ATTRIBUTES + 1):
            for chosen in combinations(options, count):
                if len({(owner, option.partition("/")[0]) for owner, option in chosen}) < count:
                    continue  # this would divide one attribute twice
                for packing, extra in product(packings, between):
                    tries += 1
                    if tries > _MOST_TRIES_OF_SHARED_HEADS:
                        return
                    yield Proposal({**packing, **rows, **extra, **_divide_styles(chosen)}, {})


def _ways_to_divide_shared(numbers: list[tuple[str, str, int]], heads: int, size: int) -> Iterator[tuple[str, str]]:
    for owner, name, value in numbers:
        for ways in dict.fromkeys((size, size // heads, heads)):
            if ways > 1 and value % ways == 0:
                yield owner, name if ways == size else f"{name}/{ways}"


def _shared_packings(
    block: nn.Module, region: Region, heads: int, size: int, numbers: set[int]
) -> Iterator[dict[str, Style]]:
    """Styles of the columns: those narrower than the widest share heads; in a fused one, its end does."""
    added = dict(region.added)
    described = {name: as_splittable(block.get_submodule(name)) for name in region.columns if name not in added}
    outputs = {name: layer.outputs for name, layer in described.items() if layer and layer.kind == "linear"}
    narrow = [name for name, width in outputs.items() if width < max(outputs.values())]
    columns = dict.fromkeys(region.columns, COLWISE)
    if narrow and all(outputs[name] % size == 0 and outputs[name] % heads == 0 for name in narrow):
        yield {**columns, **dict.fromkeys(narrow, ColwiseShared(heads))}
    if len(outputs) == 1:
        ((name, width),) = outputs.items()
        for keys in sorted({heads * number for number in numbers}, reverse=True):
            queries = width - 2 * keys
            if keys < queries and keys % size == 0 and queries % size == 0:
                yield {**columns, name: ColwiseShared(heads, (queries, keys, keys))}


# -- mixtures of experts with weights stacked into parameters [experts, ...] --


def expert_styles(name: str, module: nn.Module) -> Iterator[dict[str, Style]]:
    """Ways to split the experts of `module`, by names that begin with its own. Every expert's hidden features are cut.

    The weights before these features (gate and up, perhaps packed) are cut to the same number as the weight after them.
    """
    own = {key: p.shape for key, p in own_parameters(module).items()}
    stacked = [shape for shape in own.values() if len(shape) == 3]
    widths = sorted({size for shape in stacked for size in shape[1:]}, reverse=True)
    tries = 0
    for width in widths:
        options = [list(_cuts(shape, width)) for shape in own.values()]
        for styles in product(*options):
            cut = [style for style in styles if isinstance(style, Slice)]
            if len(cut) >= len(stacked):
                tries += 1
                if tries > _MOST_TRIES_OF_EXPERTS:
                    return
                named = zip(own, styles, strict=True)
                yield {name: SUM, **{f"{name}.{key}" if name else key: style for key, style in named}}


def _cuts(shape: torch.Size, width: int) -> Iterator[Style]:
    """Ways to lay out one parameter. The bias of the last layer is added to each rank's part of the sum."""
    for dim, size in list(enumerate(shape))[1:]:
        if size == width:
            yield Slice(dim)
        elif size == 2 * width:
            yield Slice(dim, 2)
            yield Slice(dim)
    if len(shape) < 3:
        yield DIVIDED
        yield SUM_GRADIENTS
