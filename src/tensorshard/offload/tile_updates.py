"""Updating one tile in the host's cache: its gradient cast and scaled, weights and states updated, a copy written."""

from dataclasses import dataclass

import torch

from tensorshard.comm.world import world
from tensorshard.offload import compiled_adamw
from tensorshard.offload.offloaded_states import OffloadedStates, tiles
from tensorshard.offload.updates import TileUpdate, begins_with_gradient

_CACHE_ELEMENTS = 1 << 16  # of each tensor, for each thread: gradient, weights and two states in 1 MiB


@dataclass(frozen=True)
class Tile:
    """A part of a parameter, with all that an update of it reads and writes: flat tensors of one length.

    Args:
        of: the parameter.
        states: by their keys.
        factor: multiplies the gradients; None for no factor.
        copy: gets the new weights in its own type; None for no copy.
    """

    of: OffloadedStates
    weights: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]
    factor: torch.Tensor | float | None
    copy: torch.Tensor | None

    def part(self, start: int, count: int) -> "Tile":
        """The tile of `count` elements from `start` on."""
        within = slice(start, start + count)
        return Tile(
            self.of,
            self.weights[within],
            self.gradient[within],
            {key: tensor[within] for key, tensor in self.states.items()},
            self.factor,
            None if self.copy is None else self.copy[within],
        )


class TileUpdates:
    """Updates tiles as an optimizer would.

    Args:
        update: the optimizer's, see :func:`.updates.tile_update`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, update: TileUpdate) -> None:
        self._is_adam = isinstance(optimizer, torch.optim.Adam)
        self._update = update
        self._scratch = torch.empty(0)

    def run(self, tile: Tile) -> None:
        """Updates `tile`: in one pass over memory if possible, the rest in parts that fit the cache."""
        numel, done = tile.weights.numel(), self._in_one_pass(tile)
        # Fake tensors need no parts.
        most = numel if world().is_simulated else _CACHE_ELEMENTS * torch.get_num_threads()
        for start, count in tiles(numel - done, most):
            part = tile.part(done + start, count)
            self._by_kernels(part)
            if part.copy is not None:
                part.copy.copy_(part.weights)

    def _in_one_pass(self, tile: Tile) -> int:
        """Updates as many of the first elements as one pass can; returns how many these are."""
        o = tile.of
        if not self._is_adam or world().is_simulated:
            return 0
        if not compiled_adamw.does(o.options, tile.weights, tile.gradient, *tile.states.values()):
            return 0
        averages = tile.states["exp_avg"], tile.states["exp_avg_sq"]
        step, factor = int(o.step.item()) + 1, None if tile.factor is None else float(tile.factor)
        narrow = tile.copy if tile.copy is not None and tile.copy.dtype == torch.bfloat16 else None
        done = compiled_adamw.update(o.options, tile.weights, tile.gradient, averages, step, factor=factor, copy=narrow)
        if tile.copy is not None and narrow is None:
            tile.copy[:done].copy_(tile.weights[:done])
        return done

    def _by_kernels(self, tile: Tile) -> None:
        given: dict[str, torch.Tensor | None] = {
            key: None if key in tile.of.fresh and begins_with_gradient(key) else value
            for key, value in tile.states.items()
        }
        self._update(tile.of.options, tile.weights, self._scaled(tile), given, tile.of.step)
        for key, value in given.items():
            if value is not None and value is not tile.states[key]:
                tile.states[key].copy_(value)

    def _scaled(self, tile: Tile) -> torch.Tensor:
        """The gradient as the update takes it: in the type of the weights, multiplied."""
        gradient, dtype, factor = tile.gradient, tile.weights.dtype, tile.factor
        if factor is None and gradient.dtype == dtype:
            return gradient
        if self._scratch.numel() < gradient.numel() or self._scratch.dtype != dtype:
            self._scratch = torch.empty(gradient.numel(), dtype=dtype)
        scaled = self._scratch[: gradient.numel()]
        if factor is not None and gradient.dtype == dtype:
            torch.mul(gradient, factor, out=scaled)
            return scaled
        scaled.copy_(gradient)
        return scaled if factor is None else scaled.mul_(factor)
