"""The checks of a model's blocks, and what of a table belongs to which block."""

from collections.abc import Mapping

from torch import nn

from tensorshard.tensor_parallel.table.styles import Style
from tensorshard.tensor_parallel.verify.block_calls import BlockCall
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.model_run import structure_of


class BlockChecks:
    """The checks of blocks, one for those that are alike: making one costs more than using it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._made: dict[tuple[object, ...], BlockCheck] = {}

    def of(self, block: nn.Module, call: BlockCall) -> BlockCheck:
        """The check of blocks like `block`."""
        structure = structure_of(block, call)
        if structure not in self._made:
            self._made[structure] = BlockCheck(block, call, self.size)
        return self._made[structure]


def styles_inside(name: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of what is inside the block `name`, by the names in it."""
    prefix = f"{name}." if name else ""
    itself = {"": styles[name]} if name and name in styles else {}
    return itself | {key.removeprefix(prefix): style for key, style in styles.items() if key.startswith(prefix)}
