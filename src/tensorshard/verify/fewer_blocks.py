"""Which of a model's equal blocks a small copy of it keeps, and the model without the others."""

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tensorshard.model.blocks import find_blocks
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.verify.block_kinds import group_equal_blocks

COUNTS_LAYERS = re.compile(
    r"(^|_)((n|num)_)?((hidden|encoder|decoder|transformer|attention)_)?(layers?|blocks?|depth)$"
)
"""Names of attributes that hold how many blocks there are."""


class BlockList:
    """A list of a model's blocks.

    Attributes:
        name: of the list in the model.
        blocks: all of its blocks, by their names in the model, in order.
        groups: the names of blocks that are built alike, and whose parameters are trained or frozen alike.
    """

    def __init__(self, name: str, blocks: Mapping[str, nn.Module]) -> None:
        self.name = name
        self.blocks = dict(blocks)
        self.groups = list(_groups(blocks))

    def first_of_each(self, least: int) -> int:
        """How many of the first blocks have one of each group, `least` blocks at least if there are so many."""
        names = list(self.blocks)
        each = max(min(names.index(name) for name in group) + 1 for group in self.groups)
        return min(len(names), max(each, least))


def _groups(blocks: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    for alike in group_equal_blocks(blocks):
        trained: dict[Hashable, list[str]] = defaultdict(list)
        for name in alike:
            trained[tuple(parameter.requires_grad for parameter in blocks[name].parameters())].append(name)
        yield from trained.values()


def block_lists(model: nn.Module) -> list[BlockList]:
    """The lists that hold the blocks of `model`."""
    lists: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, block in find_blocks(model).items():
        lists[name.rpartition(".")[0]][name] = block
    return [BlockList(name, blocks) for name, blocks in lists.items()]


def blocks_needed(plan: Plan, blocks: int) -> int:
    """How many blocks a small model needs: `blocks`, and one for each stage of a pipeline and one more, so that the
    stages are not equal."""
    return blocks if plan.pp == 1 else max(blocks, plan.pp * plan.stages_per_rank + 1)


def kept_blocks(lists: list[BlockList], needed: int, blocks: int) -> frozenset[str]:
    """The names of the blocks to keep: the first `blocks` of each group, and more of the largest groups if these are
    fewer than `needed`."""
    groups = [group for each in lists for group in each.groups]
    counts = [min(blocks, len(group)) for group in groups]
    while sum(counts) < needed:
        growing = max(range(len(groups)), key=lambda i: len(groups[i]) - counts[i], default=None)
        if growing is None or counts[growing] == len(groups[growing]):
            break
        counts[growing] += 1
    return frozenset(name for group, count in zip(groups, counts, strict=True) for name in group[:count])


def leave_out_blocks(model: nn.Module, lists: list[BlockList], kept: frozenset[str], *, counts: bool) -> None:
    """Takes the blocks that are not `kept` out of `model`; those after them move up.

    Args:
        counts: whether attributes that hold the number of blocks get the new number, too.
    """
    changed: dict[int, int] = {}
    for each in lists:
        left = [name for name in each.blocks if name in kept]
        if len(left) == len(each.blocks):
            continue
        owner = model.get_submodule(each.name)
        wanted = {name.rpartition(".")[2] for name in left}
        own = {name.rpartition(".")[2] for name in each.blocks}
        members = [(key, child) for key, child in owner.named_children() if key in wanted or key not in own]
        if all(key.isdigit() for key, _ in members):
            members = [(str(place), child) for place, (_, child) in enumerate(members)]
        for key in list(dict(owner.named_children())):
            delattr(owner, key)
        for key, child in OrderedDict(members).items():
            owner.add_module(key, child)
        changed[len(each.blocks)] = max(len(left), changed.get(len(each.blocks), 0))
    if counts:
        for module in model.modules():
            if not type(module).__module__.startswith("torch."):
                _set_counts(vars(module), changed)
                config = vars(module).get("config")
                if hasattr(config, "__dict__"):
                    _set_counts(vars(config), changed)


def _set_counts(attributes: dict[str, Any], changed: Mapping[int, int]) -> None:
    for name, value in attributes.items():
        if type(value) is int and value in changed and COUNTS_LAYERS.search(name):
            attributes[name] = changed[value]


def unmatched_names(model: nn.Module, plan: Plan) -> list[str]:
    """The names and globs of modules in `plan` that no module of `model` has."""
    named = [*(plan.pp_split or []), *(plan.pp_units or []), *(plan.tp_plan or {})]
    if isinstance(plan.shard_units, list):
        named += plan.shard_units
    modules = [name for name, _ in model.named_modules()]
    modules += [name for name, _ in model.named_parameters()]  # a table may name parameters
    return [pattern for pattern in named if not any(fnmatchcase(name, pattern) for name in modules)]


def describe_kept(lists: list[BlockList], left: Mapping[str, int]) -> list[str]:
    """Sentences that say how many blocks of each list there are.

    Args:
        left: the number of blocks of each list, by its name.
    """
    sizes = Counter({each.name: len(each.blocks) for each in lists})
    fewer = {name: count for name, count in left.items() if count < sizes[name]}
    total = sum(sizes.values())
    if not fewer:
        return [f"all {total} blocks"] if total else []
    said = f"{sum(left.values())} of {total} blocks"
    if len(lists) > 1:
        said += " (" + ", ".join(f"{count} of {sizes[name]} in {name}" for name, count in left.items()) + ")"
    return [said]
