"""The checks of a model's blocks, and which entries of a table belong to which block."""

from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.verify.block_calls import InTraining
from tensorshard.tensor_parallel.verify.block_check import BlockCheck
from tensorshard.tensor_parallel.verify.model_check import ModelCheck
from tensorshard.tensor_parallel.verify.model_run import ModelRun

# The largest number of weights' elements that are kept for another check.
_MOST_KEPT = 1 << 22


class BlockChecks:
    """The checks of blocks, one for blocks that are alike: making a check costs more than using it.

    Args:
        units: the blocks, by name.
        run: how the model calls them.
        size: number of ranks to split them over.

    Attributes:
        passed: what a caller found about blocks that passed, in case another table asks the same.
        around: the check of the model around the blocks, once a caller has made it.
        not_random: names of the blocks that make no random numbers, once a caller has found them.
    """

    def __init__(self, units: Mapping[str, nn.Module], run: ModelRun, size: int) -> None:
        self.size = size
        self._units, self._run = units, run
        self._made: dict[int, BlockCheck] = {}
        self.passed: dict[Hashable, Any] = {}
        self.around: ModelCheck | None = None
        self.not_random: frozenset[str] | None = None

    def of(self, name: str) -> BlockCheck:
        """The check of blocks like the one called `name`."""
        kind = self._run.kinds[name]
        if kind not in self._made:
            call = self._run.calls[name]
            self._made[kind] = BlockCheck(
                self._units[name],
                call,
                self.size,
                read_outside=self._read_outside(kind),
                training=self._in_training(kind),
            )
        return self._made[kind]

    def _in_training(self, kind: int) -> InTraining:
        """What any block of this kind does in training."""
        capture = self._run.capture
        names = [name for name, other in self._run.kinds.items() if other == kind]
        written = frozenset().union(*(capture.training.inside(name).written for name in names))
        return InTraining(any(name in capture.trained_otherwise for name in names), written)

    def _read_outside(self, kind: int) -> frozenset[str]:
        """Parameters of blocks of this kind that code outside of their block reads, by their names in the block."""
        found: set[str] = set()
        for name, other in self._run.kinds.items():
            if name and other == kind:
                for parameter, reader in self._run.capture.forward_readers.items():
                    if parameter.startswith(f"{name}.") and not f"{reader}.".startswith(f"{name}."):
                        found.add(parameter.removeprefix(f"{name}."))
        return frozenset(found)

    def forget_large(self) -> None:
        """Frees the numbers of the checks made so far, if they are many. They are made again when they are needed."""
        if sum(check.num_elements for check in self._made.values()) > _MOST_KEPT:
            self._made.clear()


def styles_inside(name: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of what is inside the block `name`, by the names in it."""
    prefix = f"{name}." if name else ""
    itself = {"": styles[name]} if name and name in styles else {}
    return itself | {key.removeprefix(prefix): style for key, style in styles.items() if key.startswith(prefix)}
