"""Gradients on another tier, from the end of their reduction to the update."""

from collections.abc import Mapping

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.offload.slots import Slot, Slots, laid_out_like
from tensorshard.offload.transfers import Transfers
from tensorshard.offload.update_behind import UpdateBehind
from tensorshard.torch_private.operators import foreach_norm
from tensorshard.torch_private.tensors import storage_address, tensor_version


class OffloadedGradients:
    """Takes each master's gradient when it is reduced, and has ``master.grad`` show it from where it is then.

    Writing goes on in the background, past the page cache, while backward does. What is added to such a gradient later,
    by further micro-batches or hooks, is added in place.

    Args:
        places: where each master's gradient goes.
        slots: all slots.
        transfers: what writes to them.
        behind: the update that may still read the last step's.
    """

    def __init__(
        self, places: Mapping[nn.Parameter, Slot], slots: Slots, transfers: Transfers, behind: UpdateBehind
    ) -> None:
        self._places = places
        self._slots = slots
        self._transfers = transfers
        self._behind = behind
        self._norms: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # with the gradient's version
        self._written: list[nn.Parameter] = []  # by transfers under way
        self._settled = False
        self._failure: OSError | None = None

    @torch.no_grad()
    def take(self, master: nn.Parameter) -> None:
        """Moves the gradient of `master`, if it has one that is not moved yet."""
        slot = self._places.get(master)
        if slot is None or master.grad is None or self.slot(master) is not None or self._failure is not None:
            return
        self._behind.finish()  # a failure is told to all ranks after backward
        local = to_local(master.grad)
        [norm] = foreach_norm([local], 2.0, None)
        try:
            if not self._settled:
                self._settled = True
                self._slots.settle()
            self._transfers.write(slot, local.reshape(-1))
        except OSError as error:
            self._failure = error  # told to all ranks at the update; an exception here would leave them waiting
            return
        self._norms[master] = norm, -1
        self._written.append(master)
        master.grad = laid_out_like(master, slot.tensor)

    def finish(self) -> None:
        """Waits until all that was taken can be read."""
        if not self._written:
            return
        try:
            self._transfers.drain()
        except OSError as error:
            self._failure = error
        for master in self._written:
            self._norms[master] = self._norms[master][0], _version(master)
        self._written.clear()

    def begin_update(self) -> OSError | None:
        """Called before the update; returns what went wrong in taking gradients."""
        self.finish()
        self._settled = False
        failure, self._failure = self._failure, None
        return failure

    def slot(self, master: nn.Parameter) -> Slot | None:
        """The slot that the gradient of `master` is in; None if it is in the device's memory."""
        slot = self._places.get(master)
        if slot is None or master.grad is None or not _same_storage(to_local(master.grad), slot.tensor):
            return None
        return slot

    def norm(self, master: nn.Parameter) -> torch.Tensor | None:
        """L2 norm of this rank's part of the gradient, as it was when it was taken; None if it has changed since."""
        self.finish()
        known = self._norms.get(master)
        return known[0] if known is not None and self.slot(master) and known[1] == _version(master) else None


def _version(master: nn.Parameter) -> int:
    """A number that each change in place of the gradient of `master` adds to."""
    return -2 if master.grad is None else tensor_version(to_local(master.grad))


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_address(one.untyped_storage()) == storage_address(other.untyped_storage())
