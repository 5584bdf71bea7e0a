"""Ways to split attention whose keys and values have fewer heads than there are ranks."""

from collections.abc import Iterator
from itertools import combinations, product

from torch import nn

from tensorshard.tensor_parallel.search.dataflow import Dataflow, Region
from tensorshard.tensor_parallel.search.proposals import (
    Proposal,
    between_styles,
    divide_styles,
    has_convolutions,
    owned_numbers,
)
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_multihead_attention
from tensorshard.tensor_parallel.table.layer_styles import ColwiseShared, Style
from tensorshard.tensor_parallel.table.styles import COLWISE, ROWWISE

_MOST_ATTRIBUTES = 3
_MOST_TRIES = 400


def shared_proposals(block: nn.Module, region: Region, flow: Dataflow, size: int) -> Iterator[Proposal]:
    """Ways to split `region` over `size` ranks, several of which share each key-value head.

    The ways differ in: the number of key-value heads; which attributes of the owning modules are divided, and by how
    much (heads by the number of ranks, query heads of one key-value head by the ranks that share it, key-value heads by
    their number); and, for a fused layer, the sizes of keys and values.
    """
    if is_multihead_attention(block.get_submodule(region.columns[0])) or has_convolutions(block, region):
        return
    numbers = owned_numbers(region, flow)
    between = between_styles(block, region)
    counts = sorted(n for n in range(1, size) if size % n == 0)
    known = {value for _, _, value in numbers}
    counts.sort(key=lambda n: n not in known and n != 1)  # those that a module has as an attribute come first
    rows = dict.fromkeys(region.rows, ROWWISE)
    tries = 0
    for heads in counts:
        packings = list(_packings(block, region, heads, size, known))
        options = list(_options(numbers, heads, size)) if packings else []
        for count in range(_MOST_ATTRIBUTES + 1):
            for chosen in combinations(options, count):
                if len({(owner, option.partition("/")[0]) for owner, option in chosen}) < count:
                    continue  # this would divide one attribute twice
                for packing, extra in product(packings, between):
                    tries += 1
                    if tries > _MOST_TRIES:
                        return
                    yield Proposal({**packing, **rows, **extra, **divide_styles(chosen)}, {})


def _options(numbers: list[tuple[str, str, int]], heads: int, size: int) -> Iterator[tuple[str, str]]:
    for owner, name, value in numbers:
        for ways in dict.fromkeys((size, size // heads, heads)):
            if ways > 1 and value % ways == 0:
                yield owner, name if ways == size else f"{name}/{ways}"


def _packings(block: nn.Module, region: Region, heads: int, size: int, numbers: set[int]) -> Iterator[dict[str, Style]]:
    """Styles of the columns: those narrower than the widest share heads; in a fused one, its end does."""
    described = {name: as_splittable(block.get_submodule(name)) for name in region.columns}
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
