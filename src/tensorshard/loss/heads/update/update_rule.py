"""Stochastic gradient descent with momentum, applied to the rows of a tile as soon as their gradient is known."""

from dataclasses import dataclass

import torch

from tensorshard.loss.heads.tiles.kernels import Kernels, choose_kernels
from tensorshard.loss.heads.tiles.rounding import Noise
from tensorshard.loss.heads.tiles.tiles import Tile, Tiles
from tensorshard.loss.heads.update import compiled_sgd


@dataclass(frozen=True)
class Rule:
    """The update of a backward pass. m is the momentum, g the gradient, w the weight.

    m = keep * m + g; and if `complete`: m += weight_decay * w, w -= lr * m. In the first micro-batch of a step, `keep`
    is the momentum's factor; in later ones it is 1. Only the last one is complete. Together this is the update that
    ``torch.optim.SGD`` makes with the sum of their gradients.
    """

    keep: float
    complete: bool
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Slot:
    """A rank's part of a parameter and its momentum.

    Args:
        weight: fp32, fp64, or bf16, which is rounded stochastically.
        momentum: of the same shape: in the wide type, bf16, or 8-bit codes.
        scales: of 8-bit codes, else None.
    """

    weight: torch.Tensor
    momentum: torch.Tensor
    scales: torch.Tensor | None = None

    def is_wide(self) -> bool:
        """Whether momentum and weight both have the type in which gradients are computed."""
        return self.momentum.dtype == self.weight.dtype and self.weight.dtype in (torch.float32, torch.float64)


class Update:
    """A sink that updates the weight, so that no gradient tensor exists.

    Args:
        weight, bias: what is updated; `bias` is None if there is none.
        seed: of the rounding in this pass.
    """

    def __init__(self, tiles: Tiles, weight: Slot, bias: Slot | None, rule: Rule, seed: int) -> None:
        self._tiles, self._weight, self._bias, self._rule = tiles, weight, bias, rule
        # The product is added to the momentum in place. Rows of a sample are copies, so for them it cannot.
        self._direct = weight.is_wide() and tiles.sample is None
        self._grad: torch.Tensor | None = None
        self._room = [] if self._direct else [tiles.new_scratch() for _ in range(2)]
        narrow = any(slot is not None and not slot.is_wide() for slot in (weight, bias))
        width, features = tiles.new_scratch().shape if narrow else (0, 0)
        self._noise = Noise(width * features, seed, tiles.input.device) if narrow else None
        self._kernels = choose_kernels(tiles.input)

    def put_product(self, tile: Tile, slope: torch.Tensor) -> None:
        if not self._direct:
            self.put(tile, self._tiles.multiply(slope, self._tiles.input, self.buffer(tile)))
            return
        momentum = self._weight.momentum[tile.rows]
        self._tiles.add_product(momentum, slope, self._tiles.input, beta=self._rule.keep)
        self._finish(self._weight.weight[tile.rows], momentum)

    def buffer(self, tile: Tile) -> torch.Tensor:
        if self._grad is None:
            self._grad = self._tiles.new_scratch()
        return self._grad[: tile.width]

    def put(self, tile: Tile, grad: torch.Tensor) -> None:
        if self._direct:
            momentum = self._weight.momentum[tile.rows].mul_(self._rule.keep).add_(grad)
            self._finish(self._weight.weight[tile.rows], momentum)
        else:
            self._step(self._weight, tile.rows, grad, [room[: tile.width] for room in self._room])

    def put_bias(self, tile: Tile, slope: torch.Tensor) -> None:
        if self._bias is not None:
            grad = slope.sum(0)
            self._step(self._bias, tile.rows, grad, [torch.empty_like(grad) for _ in range(2)])

    def _finish(self, weight: torch.Tensor, momentum: torch.Tensor) -> None:
        """Ends the step of some rows, both of the wide type."""
        if self._rule.complete:
            _sgd_step(weight, momentum, self._rule.weight_decay, self._rule.lr)

    def _step(self, slot: Slot, rows: slice | torch.Tensor, grad: torch.Tensor, room: list[torch.Tensor]) -> None:
        """Updates weight and momentum of any type, or rows of a sample, by `grad`. Overwrites `grad` and `room`."""
        if isinstance(rows, slice) and compiled_sgd.does(slot.weight[rows], slot.momentum[rows], grad):
            self._step_in_one_pass(slot, rows, grad)
            return
        momentum, spare = room
        if slot.scales is not None:
            self._kernels.dequantize(slot.momentum[rows], slot.scales[rows], momentum)
        else:
            momentum.copy_(slot.momentum[rows])
        momentum.mul_(self._rule.keep).add_(grad)
        if self._rule.complete:
            weight = grad.copy_(slot.weight[rows])
            _sgd_step(weight, momentum, self._rule.weight_decay, self._rule.lr)
            self._write(slot.weight, rows, weight)
        if slot.scales is None:
            self._write(slot.momentum, rows, momentum)
            return
        assert self._noise is not None
        codes, scales = slot.momentum[rows], slot.scales[rows]
        self._kernels.quantize(momentum, self._noise.bits(momentum.shape), spare, codes, scales)
        if not isinstance(rows, slice):  # a slice shares the slot's memory
            slot.momentum[rows], slot.scales[rows] = codes, scales

    def _step_in_one_pass(self, slot: Slot, rows: slice, grad: torch.Tensor) -> None:
        assert self._noise is not None
        rule, none = self._rule, grad.view(torch.int32)  # in place of random bits that are not read
        rounds_weight = rule.complete and slot.weight.dtype == torch.bfloat16
        compiled_sgd.step(
            slot.weight[rows],
            slot.momentum[rows],
            None if slot.scales is None else slot.scales[rows],
            grad,
            keep=rule.keep,
            weight_decay=rule.weight_decay,
            lr=rule.lr if rule.complete else None,
            weight_bits=self._noise.bits(grad.shape) if rounds_weight else none,
            momentum_bits=self._noise.bits(grad.shape) if slot.momentum.dtype != torch.float32 else none,
        )

    def _write(self, target: torch.Tensor, rows: slice | torch.Tensor, value: torch.Tensor) -> None:
        """Stores rows in the type of `target`. Overwrites `value`."""
        if target.dtype == torch.bfloat16:
            assert self._noise is not None
            value = self._kernels.round_to_bfloat16_(value, self._noise.bits(value.shape))
        target[rows] = value.to(target.dtype)


def _sgd_step(weight: torch.Tensor, momentum: torch.Tensor, weight_decay: float, lr: float) -> None:
    """m += weight_decay * w; w -= lr * m, in place."""
    if weight_decay:
        momentum.add_(weight, alpha=weight_decay)
    weight.add_(momentum, alpha=-lr)


def finish_step(weight: Slot, bias: Slot | None, rule: Rule, seed: int, rows: int) -> None:
    """Ends a step whose gradients are all in the momentum: updates every row, some `rows` at a time."""
    for slot in (weight, bias):
        if slot is None or not slot.weight.numel():
            continue
        wide = torch.float64 if slot.weight.dtype == torch.float64 else torch.float32
        flat = slot.weight.view(len(slot.weight), -1)
        features = flat.size(1)
        noise = None if slot.is_wide() else Noise(min(rows, len(flat)) * features, seed, flat.device)
        for begin in range(0, len(flat), rows):
            part = slice(begin, begin + rows)
            _finish_rows(slot, part, rule, noise, wide, choose_kernels(flat))


def _finish_rows(slot: Slot, rows: slice, rule: Rule, noise: Noise | None, wide: torch.dtype, kernels: Kernels) -> None:
    weight, held = slot.weight[rows], slot.momentum[rows]
    if slot.scales is not None:
        momentum = kernels.dequantize(held, slot.scales[rows], torch.empty_like(held, dtype=wide))
    else:
        momentum = held.to(wide)  # `held` itself, if it has that type
    moved = weight.to(wide)
    _sgd_step(moved, momentum, rule.weight_decay, rule.lr)
    if noise is None:
        return
    if weight.dtype == torch.bfloat16:
        weight.copy_(kernels.round_to_bfloat16_(moved, noise.bits(moved.shape)))
    if slot.scales is not None:
        kernels.quantize(momentum, noise.bits(momentum.shape), torch.empty_like(momentum), held, slot.scales[rows])
    elif held.dtype == torch.bfloat16:
        held.copy_(kernels.round_to_bfloat16_(momentum, noise.bits(momentum.shape)))
