"""One parameter whose states are on another tier, and what an update of it takes along."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.offload.slots import DeviceSlot, OffloadedMaster, Slot, SlotSpec, laid_out_like
from tensorshard.offload.updates import counts_steps, initial_step, state_keys


@dataclass
class OffloadedStates:
    """The states of one parameter.

    Args:
        master: what the optimizer updates.
        weights: this rank's shard of it, flat; where it is in memory.
        states: the slots of its states, by their keys.
        place: of the shard, where it is offloaded itself.
    """

    name: str
    master: nn.Parameter
    weights: torch.Tensor
    states: dict[str, Slot]
    place: OffloadedMaster | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of its group, at this step
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # its count before this step
    fresh: frozenset[str] = frozenset()  # states that begin with this step
    gradient: Slot | None = None  # of this step, where it is offloaded
    gradient_in_memory: torch.Tensor | None = None  # else; flat

    @property
    def is_done_when_written(self) -> bool:
        """Whether forward needs what the update writes: the weights where they are offloaded, or a device's copy."""
        return self.place is not None and self.place.copy is None

    def shown(self, slot: Slot) -> torch.Tensor:
        """A state as the optimizer has it without offload: laid out as the master."""
        return laid_out_like(self.master, slot.tensor)

    @property
    def device_copy(self) -> DeviceSlot | None:
        """Where the weights go that a device computes with whose memory is not the host's; None for nowhere."""
        return None if self.place is None else self.place.device_copy

    def begin(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Any], gradient: Slot | None) -> None:
        """Notes what an update needs, so that nothing done to the optimizer later matters to it.

        States that begin are shown by the optimizer from now on.

        Args:
            options: of the parameter's group; they do not change any more.
            gradient: where it is; None for memory.

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
        """Has the optimizer's count of steps include this one."""
        if counts_steps(optimizer):
            optimizer.state[self.master]["step"] += 1

    def specs(self) -> list[SlotSpec]:
        """What its states take."""
        return [SlotSpec("", slot.tensor.numel(), slot.tensor.dtype) for slot in self.states.values()]


def options_now(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, as they are now: schedulers may change them, tensors in place."""
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
