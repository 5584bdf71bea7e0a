"""Where backward puts the gradients of a tile's rows: into gradient tensors, or into an update of the weight."""

from typing import Protocol

import torch

from tensorshard.loss.heads.tiles.tiles import Tile, Tiles


class Sink(Protocol):
    """Takes the gradients of each tile once."""

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        """Takes ``slope @ input`` as the gradient of the tile's rows; `slope` is [width, N]."""

    def buffer(self, tile: Tile) -> torch.Tensor:
        """[width, D] in the wide type: room for a gradient, which is then given to `put`."""

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        """Takes what `buffer` returned, with the gradient in it."""

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        """Takes the sum of `slope` [N, width] over the samples as the gradient of the tile's biases, if there are
        any."""


class Gradients:
    """Gradient tensors, for autograd.

    Args:
        weight, bias: whose gradients are needed, else None.
    """

    def __init__(self, tiles: Tiles, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        # Rows that are not in the sample have a gradient of zeros; without a sample every row is written.
        new = torch.empty_like if tiles.sample is None else torch.zeros_like
        self._tiles = tiles
        self.weight = None if weight is None else new(weight, memory_format=torch.contiguous_format)
        self.bias = None if bias is None else new(bias)
        self._direct = tiles.sample is None and weight is not None and weight.dtype == tiles.precision.wide
        self._scratch = None if self._direct or weight is None else tiles.new_scratch()

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.weight is not None:
            self.put(tile, self._tiles.multiply(slope, self._tiles.input, self.buffer(tile)))

    def buffer(self, tile: Tile) -> torch.Tensor:
        assert self.weight is not None
        return self.weight[tile.rows] if self._scratch is None else self._scratch[: tile.width]

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        if self.weight is not None and self._scratch is not None:
            self.weight[tile.rows] = grad.to(self.weight.dtype)

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias[tile.rows] = slope.sum(0).to(self.bias.dtype)


class SummedGradients:
    """Gradient tensors that are summed over several runs of rows, in the wide type.

    Args:
        weight, bias: whose gradients are needed, else None.
        dtype: the wide type.
    """

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = None if weight is None else weight.new_empty(weight.shape, dtype=dtype)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
        self._tiles: Tiles | None = None
        self._first = True

    def begin(self, tiles: Tiles) -> None:
        """Called before each run with its tiles."""
        self._first = self._tiles is None
        self._tiles = tiles

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.weight is None:
            return
        assert self._tiles is not None
        if self._first:
            self._tiles.multiply(slope, self._tiles.input, self.weight[tile.rows])
        else:
            self._tiles.add_product(self.weight[tile.rows], slope, self._tiles.input)

    def buffer(self, tile: Tile) -> torch.Tensor:
        assert self._tiles is not None
        return self._tiles.new_scratch()[: tile.width]

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        if self.weight is not None:
            self.weight[tile.rows] = grad if self._first else self.weight[tile.rows] + grad

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        if self.bias is not None:
            self.bias[tile.rows] += slope.sum(0)
