"""One parameter whose states are offloaded, with all that an update of it needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.offload.tiers import DeviceSlot, OffloadedMaster, Slot, SlotSpec, laid_out_like
from tensorshard.offload.updates import counts_steps, initial_step, state_keys


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

    @property
    def is_done_when_written(self) -> bool:
        """Whether forward has to wait for the update's writes: to offloaded weights, or to a device's copy."""
        return self.place is not None and self.place.copy is None

    def shown(self, slot: Slot) -> torch.Tensor:
        """A state as the optimizer shows it: laid out as the master weight."""
        return laid_out_like(self.master, slot.tensor)

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
            self.fresh = frozenset(key for key in self.states if key not in state)
            state.update({key: self.shown(slot) for key, slot in self.states.items() if key in self.fresh})

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
