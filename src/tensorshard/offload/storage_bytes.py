"""A storage as one tensor of bytes, and tensors on such bytes. This also works for fake tensors."""

from collections.abc import Sequence

import torch

from tensorshard.comm.world import world


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage of `tensor`, [bytes] of uint8, in the same memory."""
    storage = tensor.untyped_storage()
    if not world().is_simulated:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
    count = storage.nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)


def on_bytes(
    memory: torch.Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor in the `memory` that :func:`bytes_of` gave, or in other bytes.

    Args:
        offset: of its first element, in elements.
    """
    if not world().is_simulated:
        tensor = torch.empty(0, dtype=dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), offset, size, stride)  # type: ignore[call-overload]
    whole = memory.numel() // dtype.itemsize * dtype.itemsize
    return memory[:whole].view(dtype).as_strided(size, stride, offset)
