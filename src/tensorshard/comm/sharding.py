"""How a dimension is cut over ranks: the one convention that every layer, collective and file here follows.

It is that of ``torch.chunk`` and of DTensor's ``Shard``: all ranks hold ``ceil(size / num_shards)`` elements until
they run out, so that the last ranks may hold fewer, or none. Local shards are therefore DTensor's local
shards.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tensorshard.torch_private.dtensor import dtensor_laid_out_as, dtensor_of, shards_of
from tensorshard.torch_private.operators import foreach_mul_


def shard_range(size: int, num_shards: int, index: int) -> tuple[int, int]:
    """Where shard `index` of a dimension of `size` elements begins, and how many elements it has."""
    chunk = -(-size // num_shards)
    start = min(size, index * chunk)
    return start, min(size, start + chunk) - start


def shard_sizes(size: int, num_shards: int) -> list[int]:
    """The number of elements of each of the `num_shards` shards."""
    return [shard_range(size, num_shards, index)[1] for index in range(num_shards)]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor as it is. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def normalize_dim(dim: int, ndim: int) -> int:
    """`dim` counted from the front.

    Raises:
        IndexError: a tensor of `ndim` dimensions has no such dimension.
    """
    if ndim == 0:
        raise IndexError(f"dim={dim} was given for a tensor without dimensions: it cannot be cut; view it as [1] first")
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim={dim} was given for a tensor of {ndim} dimensions: use one of {-ndim} to {ndim - 1}")
    return dim % ndim


def local_shard(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's shard of a tensor that every rank holds in full, in memory of its own. No communication."""
    coordinate = mesh.get_coordinate()
    if coordinate is None or not all(type(p) in (Shard, Replicate) for p in placements):
        return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    shard = full.detach()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = normalize_dim(placement.dim, full.ndim)
            shard = shard.narrow(dim, *shard_range(shard.size(dim), mesh.size(axis), coordinate[axis]))
    return shard.clone(memory_format=torch.contiguous_format)


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of a tensor that every rank holds in full, made without communication.

    Args:
        full: the same values on every rank of `mesh`. Its memory is not kept.
        placements: one per axis of `mesh`.
    """
    return DTensor.from_local(
        local_shard(full, mesh, placements),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=torch.empty(full.shape, device="meta").stride(),
    )


def distribute_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """`full` cut as `like` is, on the device of `like`.

    Raises:
        ValueError: the shapes differ.
    """
    if full.shape != like.shape:
        raise ValueError(f"a tensor of shape {list(full.shape)} was given where {list(like.shape)} is held")
    return dtensor_like(local_shard(full, like.device_mesh, like.placements).to(like.to_local().device), like)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """The DTensor laid out as `like` is, whose shard on this rank is `local`, on whatever device that is."""
    if local.dtype == like.dtype:
        return dtensor_laid_out_as(local, like)
    return dtensor_of(local, like.device_mesh, like.placements, like.shape, like.stride())


def on_mesh_device(tensor: DTensor) -> DTensor:
    """`tensor` with its shard on a device of its mesh, as collectives need it. A master weight's may be on another."""
    return DTensor.from_local(  # copies it, if it has to
        tensor.to_local(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of the gradients that this rank holds; parameters without one are left out."""
    return shards_of(p.grad for p in parameters if p.grad is not None)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    gradients = local_gradients(parameters)
    if not gradients:
        return
    if isinstance(factor, torch.Tensor):
        for device, dtype in {(g.device, g.dtype) for g in gradients}:
            foreach_mul_([g for g in gradients if (g.device, g.dtype) == (device, dtype)], factor.to(device, dtype))
    else:
        foreach_mul_(gradients, factor)
