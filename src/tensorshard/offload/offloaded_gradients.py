"""Gradients in host memory or on disk, from the end of their reduction to the update."""

from collections.abc import Mapping

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.offload.background_update import BackgroundUpdate
from tensorshard.offload.tiers import DeviceSlot, Slot, Tiers, laid_out_like
from tensorshard.offload.transfers import Move, Transfers, Work
from tensorshard.offload.updates import tiles
from tensorshard.torch_private.operators import foreach_norm
from tensorshard.torch_private.tensors import share_storage, tensor_version


class OffloadedGradients:
    """Moves each master weight's gradient when it is reduced. ``master.grad`` then shows it in its new place.

    It is written in the background, without the page cache, while backward goes on. Further micro-batches and hooks add
    to it in place.

    If the device has memory of its own, ``master`` and ``master.grad`` are in the host's memory, or mapped to the disk.

    Args:
        places: where each master weight's gradient goes.
        tiers: of all slots.
        transfers: writes to them.
        background: the update that may still read the last step's gradients.
    """

    def __init__(
        self, places: Mapping[nn.Parameter, Slot], tiers: Tiers, transfers: Transfers, background: BackgroundUpdate
    ) -> None:
        self._places = places
        self._tiers = tiers
        self._transfers = transfers
        self._background = background
        self._norms: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}  # the norm, with the gradient's version
        self._written: list[nn.Parameter] = []  # by transfers under way
        self._settled = False
        self._failure: OSError | None = None

    @torch.no_grad()
    def take(self, master: nn.Parameter, shard: torch.Tensor | None = None) -> None:
        """Moves the gradient of `master`, if it has one that is not moved yet.

        Args:
            shard: this rank's gradient, if it is on a device and `master` in the host's memory. It is added to the one
                of ``master.grad``. 16-bit gradients leave the device in 16 bits. None: the gradient is ``master.grad``.
        """
        slot = self._places.get(master)
        known = slot is not None and self.slot(master) is not None
        local = shard
        if shard is None and master.grad is not None and not known:
            local = to_local(master.grad)
        if slot is None and shard is not None:
            _keep(master, shard)
        if slot is None or local is None:
            return
        if self._failure is None:
            self._background.finish()  # all ranks learn of a failure after backward
            try:
                if known:
                    self._add(slot, local.reshape(-1))
                    self._norms.pop(master, None)
                else:
                    self._move(master, slot, local.reshape(-1))
            except OSError as error:
                self._failure = error  # all ranks learn of it at the update; an exception here would leave them waiting
        if shard is not None or self._failure is None:
            master.grad = laid_out_like(master, slot.tensor)

    def _move(self, master: nn.Parameter, slot: Slot, values: torch.Tensor) -> None:
        [norm] = foreach_norm([values.to(master.dtype)], 2.0, None)
        self._settle()
        self._transfers.write(slot, values, master.dtype)
        self._norms[master] = norm, -1
        self._written.append(master)

    def _add(self, slot: Slot, values: torch.Tensor) -> None:
        """Adds `values`, on the device, to what is in `slot`."""
        assert self._tiers.copies is not None
        self.finish()
        self._settle()
        slot_of_values = DeviceSlot(values, self._tiers.copies, self._tiers.copies.given())
        most = self._transfers.elements(values.dtype, slot.tensor.dtype)
        self._transfers.run(
            Work(
                [
                    Move(slot, start, count, slot.tensor.dtype),
                    Move(slot_of_values, start, count, values.dtype, write=False),
                ],
                _add_tile,
            )
            for start, count in tiles(values.numel(), most)
        )

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._tiers.sync_mapping()

    def finish(self) -> None:
        """Waits until all gradients that were taken can be read."""
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
        """Called before the update; returns the error in taking gradients, if any."""
        self.finish()
        self._settled = False
        failure, self._failure = self._failure, None
        return failure

    def slot(self, master: nn.Parameter) -> Slot | None:
        """The slot that the gradient of `master` is in; None if it is in the device's memory."""
        slot = self._places.get(master)
        if slot is None or master.grad is None or not share_storage(to_local(master.grad), slot.tensor):
            return None
        return slot

    def norm(self, master: nn.Parameter) -> torch.Tensor | None:
        """L2 norm of this rank's part of the gradient when it was taken; None if it has changed since."""
        self.finish()
        known = self._norms.get(master)
        return known[0] if known is not None and self.slot(master) and known[1] == _version(master) else None


def _keep(master: nn.Parameter, shard: torch.Tensor) -> None:
    """Keeps the gradient of a master weight without a place, such as one that no optimizer updates, beside the
    weight."""
    values = shard.to(master.device, master.dtype)
    if master.grad is None:
        master.grad = laid_out_like(master, values.reshape(-1))
    else:
        to_local(master.grad).add_(values.view(to_local(master.grad).shape))


def _add_tile(tensors: list[torch.Tensor]) -> None:
    total, values = tensors
    total.add_(values)


def _version(master: nn.Parameter) -> int:
    """A number that grows with each in-place change of the gradient of `master`."""
    return -2 if master.grad is None else tensor_version(to_local(master.grad))
