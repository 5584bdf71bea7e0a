"""A parameter that every rank holds in full, and of which each rank may update a shard."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tensorshard.comm.sharding import dtensor_like
from tensorshard.modules.parameters import like
from tensorshard.offload.slots import OffloadedMaster, Slots
from tensorshard.sharded_model import TakeGradient
from tensorshard.torch_private.dtensor import dtensor_of
from tensorshard.transforms.precision import compute_dtype, master_dtype


class ReplicatedParameter:
    """One parameter: what forward computes with, and the part of it that this rank updates.

    Args:
        slots: where master weights are kept; None for the device.

    Attributes:
        is_copy: whether forwards compute with a copy of the master weight, of another type or in other memory.
    """

    def __init__(
        self,
        name: str,
        value: torch.Tensor,
        template: nn.Parameter,
        precision: str,
        shard_mesh: DeviceMesh | None,
        slots: Slots | None = None,
    ) -> None:
        self.name = name
        self.offloaded: OffloadedMaster | None = None
        self.take_gradient: TakeGradient | None = None
        self.finish_gradients: Callable[[], None] | None = None
        self.num_shards = 1 if shard_mesh is None or value.dim() == 0 else shard_mesh.size()
        index = 0 if self.num_shards == 1 else shard_mesh.get_local_rank()  # type: ignore[union-attr]
        wide = master_dtype(value.dtype)
        narrow = compute_dtype(wide, precision)
        rows = value.size(0) if value.dim() else 1
        self.chunk_rows = -(-rows // self.num_shards)
        row = value[0].numel() if value.dim() and rows else 1
        self.chunk = self.chunk_rows * row
        self.even = self.chunk * self.num_shards == value.numel()

        self.storage = torch.zeros(self.chunk * self.num_shards, dtype=narrow, device=value.device)
        full = self.storage[: value.numel()].view(value.shape)
        full.copy_(value)
        self.compute = like(template, full)
        self.own = slice(index * self.chunk, (index + 1) * self.chunk)
        # The host updates all master weights in its memory, those of 16-bit parameters and others.
        on_host = slots is not None and slots.copies is not None and value.dim() > 0 and template.requires_grad
        self.is_copy = narrow != wide or on_host
        if shard_mesh is None and not self.is_copy:
            self.master = self.compute
            return
        first = min(index * self.chunk_rows, rows)
        mine = slice(first, min(first + self.chunk_rows, rows))
        if not self.is_copy:
            local = full[mine] if value.dim() else full
        else:
            local = (value[mine] if value.dim() else value).to(wide)
            local = local.clone() if slots is None or not value.dim() else self._keep(local, slots)
        if self.num_shards > 1:
            assert shard_mesh is not None
            shard: Any = dtensor_of(local, shard_mesh, [Shard(0)], value.shape, full.stride())
            self.master = like(template, shard)
        else:
            self.master = like(template, local)

    def _keep(self, local: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Moves the master weight's shard to a slot; returns the tensor that shows it there."""
        self.offloaded = slots.keep(local, self.storage[self.own][: local.numel()])
        return self.offloaded.slot.tensor.view(local.shape)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a master or of its gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def scatter_into(self, message: torch.Tensor, gradient: torch.Tensor) -> None:
        """Copies the full `gradient` into `message` [num_shards, chunk], where row r is what rank r will keep."""
        flat = gradient.reshape(-1)
        if self.num_shards == 1:  # a parameter that is not sharded: every row is all of it
            message.copy_(flat.view(1, -1).expand_as(message))
            return
        if not self.chunk:
            return
        rows = flat.numel() // self.chunk
        message[:rows].copy_(flat[: rows * self.chunk].view(rows, self.chunk))
        if rows < message.size(0):
            rest = flat[rows * self.chunk :]
            message[rows, : rest.numel()].copy_(rest)

    def set_gradient(self, flat: torch.Tensor) -> None:
        """Adds `flat`, this rank's shard of the averaged gradient with its padding, to the master's gradient."""
        local = self.local(self.master.detach())
        shard = flat[: local.numel()].view(local.shape)
        if self.offloaded is not None and self.offloaded.device_copy is not None:
            assert self.take_gradient is not None  # the master weight is in host memory, and cannot hold this gradient
            self.take_gradient(self.master, shard)
            return
        shard = shard.to(self.master.dtype)
        if self.master.grad is not None:
            if self.finish_gradients is not None:
                self.finish_gradients()
            self.local(self.master.grad).add_(shard)
        elif isinstance(self.master, DTensor):
            self.master.grad = dtensor_like(shard, self.master)
        else:
            self.master.grad = shard
        if self.take_gradient is not None:
            self.take_gradient(self.master)
