"""A model with a few of its equal blocks. What a step of all of them takes follows from steps of two such models."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from tensorshard.modules.blocks import find_blocks
from tensorshard.tensor_parallel.verify.block_kinds import built_alike

KEPT = (3, 4)
"""How many equal blocks the two models keep."""

_WORTH_IT = 12  # equal blocks, from which on two short models are run sooner than the whole one


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
    """The names of the blocks that are built alike, of the list that has the most of them; none if they are few."""
    lists: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, block in find_blocks(model).items():
        lists[name.rpartition(".")[0]][name] = block
    groups = [group for blocks in lists.values() for group in built_alike(blocks)]
    most = max(groups, key=len, default=[])
    return tuple(most) if len(most) >= _WORTH_IT else ()
