"""Extrapolates what a deep model takes from the same with 3 and 4 of its equal blocks, and the tables of such models.

Memory is the largest of several sums, each of which grows linearly with the blocks, and so do the parts of a step's
time. So both lines are lower bounds of the full estimate, and near it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from tensorshard.common.dotted_names import is_inside
from tensorshard.model.blocks import find_blocks
from tensorshard.tensor_parallel.table.table import TensorTable, VerifiedTable
from tensorshard.tensor_parallel.verify.block_kinds import group_equal_blocks

KEPT = (3, 4)
"""How many equal blocks the two models keep: the second one more than the first."""

_WORTH_IT = 12  # with at least so many equal blocks, running two short models is faster than running the full one


@dataclass(frozen=True)
class FewerBlocks:
    """Builds a model, and leaves some of its blocks out.

    Args:
        build: makes the whole model. left_out: names of blocks.
    """

    build: Callable[[], nn.Module]
    left_out: tuple[str, ...]

    def __call__(self) -> nn.Module:
        model = self.build()
        for name in self.left_out:
            owner, _, key = name.rpartition(".")
            nn.Module.__delattr__(model.get_submodule(owner), key)
        return model


def equal_blocks(model: nn.Module) -> tuple[str, ...]:
    """The names of the largest group of blocks that are built alike and in one list; none if they are few."""
    lists: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, block in find_blocks(model).items():
        lists[name.rpartition(".")[0]][name] = block
    groups = [group for blocks in lists.values() for group in group_equal_blocks(blocks)]
    most = max(groups, key=len, default=[])
    return tuple(most) if len(most) >= _WORTH_IT else ()


def extrapolate(few: float, more: float, blocks: Sequence[str]) -> float:
    """The value for a model with all equal `blocks`, on the line through those for the two numbers of `KEPT` blocks."""
    return more + (len(blocks) - KEPT[1]) * (more - few)


def without_blocks(table: VerifiedTable, blocks: Sequence[str], kept: int) -> VerifiedTable:
    """The table of a model with the first `kept` of its equal `blocks`. The last one that is kept takes the sequence
    split of the full model's last block, which gathers the parts of a sequence."""
    left_out = blocks[kept:]

    def is_there(name: str) -> bool:
        return not is_inside(name, left_out)

    sequence = {name: split for name, split in table.sequence.items() if is_there(name)}
    if blocks[-1] in table.sequence:
        sequence[blocks[kept - 1]] = table.sequence[blocks[-1]]
    shared = [names for names in table.shared_inputs if all(map(is_there, names))]
    return replace(
        table, shared_inputs=shared, sequence=sequence, not_random=frozenset(filter(is_there, table.not_random))
    )


def with_all_blocks(table: VerifiedTable, blocks: Sequence[str], kept: int) -> VerifiedTable | None:
    """The table of the full model, from one that was found for a model with the first `kept` of its equal `blocks`;
    None if these were not split alike. Its shares of split parameters are those of the short model.

    Every block that was left out is split like the second one: the first and the last one may also cut and gather
    sequences.
    """
    like, last = blocks[1], blocks[kept - 1]
    styles = [
        {name.removeprefix(block): style for name, style in table.plan.entries.items() if is_inside(name, [block])}
        for block in blocks[:kept]
    ]
    if any(one != styles[1] for one in styles):
        return None
    entries = dict(table.plan.entries)
    shared, not_random = list(table.shared_inputs), set(table.not_random)
    for block in blocks[kept:]:
        entries |= {block + name: style for name, style in styles[1].items()}
        shared += [
            tuple(_renamed(name, like, block) for name in names)
            for names in table.shared_inputs
            if all(is_inside(name, [like]) for name in names)
        ]
        not_random |= {_renamed(name, like, block) for name in table.not_random if is_inside(name, [like])}
    sequence = dict(table.sequence)
    if like in sequence and last in sequence:
        sequence |= dict.fromkeys(blocks[kept - 1 : -1], sequence[like]) | {blocks[-1]: sequence[last]}
    elif like in sequence or last in sequence:
        return None
    return replace(
        table,
        plan=TensorTable(entries),
        shared_inputs=shared,
        sequence=sequence,
        not_random=frozenset(not_random),
    )


def _renamed(name: str, block: str, other: str) -> str:
    """The name in `other` of what `name` is in `block`."""
    return other + name.removeprefix(block)
