"""Updates of torch's optimizers, a tile at a time: the same kernels on views, so the same results to the last bit.

A tile's gradient, weights and states fit in a processor's cache. So casting and clipping its gradient, its update and
the 16-bit copy of its weights together read and write main memory once. One pass over the whole model for each of them
would do so several times. The kernels are those that the optimizer itself calls, and they compute element by element.
Only at a tensor's end, which may not be a whole vector, a kernel may round differently. So tiles begin at multiples of
:data:`~tensorshard.offload.tiers.TILE_ALIGNMENT`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from tensorshard.comm.sharding import distribute_like, to_local
from tensorshard.comm.world import world
from tensorshard.offload import compiled_adamw
from tensorshard.offload.tiers import DeviceSlot, OffloadedMaster, Slot, SlotSpec, laid_out_like
from tensorshard.torch_private.operators import fused_adam_

_CACHE_ELEMENTS = 1 << 16  # of each tensor, for each thread: gradient, weights and two states in 1 MiB

States = dict[str, torch.Tensor | None]
"""A tile's states by their keys; None for a state that begins with this update. The update then sets it."""

TileUpdate = Callable[[Mapping[str, Any], torch.Tensor, torch.Tensor, States, torch.Tensor], None]
"""Called with a parameter group's options, a tile's weights, gradient and states, and the count of earlier steps (which
it does not change)."""


@dataclass
class OffloadedStates:
    """The states of one parameter.

    Args:
        master: the master weight, which the optimizer updates.
        weights: this rank's shard of it, flat, if it is in memory.
        states: the slots of its states, by their keys.
        place: of the shard, if it is offloaded itself.
    """

    name: str
    master: nn.Parameter
    weights: torch.Tensor
    states: dict[str, Slot]
    place: OffloadedMaster | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of its group, at this step
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # its count before this step
    fresh: frozenset[str] = frozenset()  # states that begin with this step
    gradient: Slot | None = None  # of this step, if it is offloaded
    gradient_in_memory: torch.Tensor | None = None  # else this one, flat

    def __post_init__(self) -> None:
        self._class = type(self.master)  # as the user's code sees it; an update makes it a plain DTensor
        self._shown: dict[str, torch.Tensor] = {}

    @property
    def is_done_when_written(self) -> bool:
        """Whether forward has to wait for the update's writes: to offloaded weights, or to a device's copy."""
        return self.place is not None and self.place.copy is None

    def shown(self, key: str) -> torch.Tensor:
        """A state as the optimizer shows it: laid out as the master weight, and read in full where that is."""
        state = laid_out_like(self.master, self.states[key].tensor)
        if isinstance(state, DTensor):
            state.__class__ = self._class  # type: ignore[assignment]
        self._shown[key] = state
        return state

    @torch.no_grad()
    def adopt(self, state: dict[str, Any]) -> None:
        """Moves states that are elsewhere to their slots: those that the optimizer's constructor made, that were
        loaded, or that the user's code has put in their place."""
        for key, slot in self.states.items():
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or value is self._shown.get(key):
                continue
            if isinstance(self.master, DTensor) and not isinstance(value, DTensor):
                value = distribute_like(value, self.master)
            slot.tensor.copy_(to_local(value).reshape(-1))
            state[key] = self.shown(key)

    @property
    def device_copy(self) -> DeviceSlot | None:
        """The slot for the weights in the memory of a device that computes with them; None if there is none."""
        return None if self.place is None else self.place.device_copy

    def begin(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Any], gradient: Slot | None) -> None:
        """Notes what an update needs, so that later changes of the optimizer do not affect it.

        From now on, the optimizer also shows the states that begin with this update.

        Args:
            options: of the parameter's group; they are a copy.
            gradient: its slot; None if it is in memory.

        Raises:
            ValueError: the options ask for other states than there is room for.
        """
        needed = set(state_keys(optimizer, options))
        if needed != set(self.states):
            raise ValueError(
                f"the options of {type(optimizer).__name__} now ask for the states {sorted(needed)} of "
                f"{self.name!r}, and space was reserved for {sorted(self.states)}; give these options when the "
                f"optimizer is made"
            )
        assert self.master.grad is not None
        self.options = options
        self.weights = to_local(self.master.detach()).view(-1)
        self.gradient = gradient
        self.gradient_in_memory = to_local(self.master.grad).reshape(-1) if gradient is None else None
        if counts_steps(optimizer):
            state = optimizer.state[self.master]
            if "step" not in state:
                state["step"] = initial_step(optimizer, options)
            self.step = state["step"].clone()
        if self.states:
            state = optimizer.state[self.master]
            self.adopt(state)
            self.fresh = frozenset(key for key in self.states if key not in state)
            state.update({key: self.shown(key) for key in self.states if key in self.fresh})

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds this step to the optimizer's count of steps."""
        if counts_steps(optimizer):
            optimizer.state[self.master]["step"] += 1

    def specs(self) -> list[SlotSpec]:
        """The sizes and types of its states."""
        return [SlotSpec("", slot.tensor.numel(), slot.tensor.dtype) for slot in self.states.values()]


def options_now(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of the options of each group, since schedulers may change them, also in place."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def tiles(numel: int, most: int) -> Iterator[tuple[int, int]]:
    """Where each tile of at most `most` elements begins, and how many it has."""
    for start in range(0, numel, most):
        yield start, min(most, numel - start)


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
        update: the optimizer's, see :func:`tile_update`.
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


def _adam(
    group: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, states: States, step: torch.Tensor
) -> None:
    amsgrad = group["amsgrad"]
    if group["fused"] and all(isinstance(value, float | int) for value in (group["lr"], *group["betas"])):
        fused_adam_(weights, gradient, [_given(state) for state in states.values()], step + 1, group)
        return
    adam(
        [weights],
        [gradient],
        [_given(states["exp_avg"])],
        [_given(states["exp_avg_sq"])],
        [_given(states["max_exp_avg_sq"])] if amsgrad else [],
        [step.clone()],  # the kernel adds to it
        foreach=group["foreach"],
        fused=group["fused"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=amsgrad,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _sgd(
    group: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, states: States, step: torch.Tensor
) -> None:
    momentum: list[torch.Tensor | None] = [states.get("momentum_buffer")]
    sgd(
        [weights],
        [gradient],
        momentum,
        foreach=group["foreach"],
        fused=group["fused"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    if "momentum_buffer" in states:
        states["momentum_buffer"] = momentum[0]


def _adagrad(
    group: Mapping[str, Any], weights: torch.Tensor, gradient: torch.Tensor, states: States, step: torch.Tensor
) -> None:
    adagrad(
        [weights],
        [gradient],
        [_given(states["sum"])],
        [step.clone()],
        foreach=group["foreach"],
        fused=group["fused"],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _given(state: torch.Tensor | None) -> torch.Tensor:
    assert state is not None
    return state


_UPDATES: dict[type, TileUpdate] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}


def tile_update(optimizer: torch.optim.Optimizer) -> TileUpdate | None:
    """The update of one tile, if the kernels of `optimizer` are known here and it has common options; else None."""
    unusual = any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)
    return None if unusual else _UPDATES.get(type(optimizer))


def state_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Sequence[str]:
    """The states of a parameter's shape that an optimizer with a :func:`tile_update` keeps for `group`."""
    if isinstance(optimizer, torch.optim.Adam):
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("sum",)


def begins_with_gradient(key: str) -> bool:
    """Whether the state `key` has no value before the first update, which makes it from the gradient."""
    return key == "momentum_buffer"


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` keeps a count of steps for each parameter."""
    return not isinstance(optimizer, torch.optim.SGD)


def initial_step(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.Tensor:
    """The count of steps before the first one, of the type that the optimizer itself uses."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32)
