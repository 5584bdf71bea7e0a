"""Reads and checks the arguments that parallel layers and their functional forms have in common."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tensorshard.comm.groups import Group, resolve_group
from tensorshard.comm.marks import get_layout
from tensorshard.torch_private.operators import assert_async


def parameter_group(parameter: torch.Tensor, group: Group | None, name: str) -> dist.ProcessGroup:
    """The ranks that hold the parts of a layer's parameter.

    Args:
        parameter: this rank's shard, whose mark may name its group; or a DTensor on a one-dimensional mesh.
        group: the user's ``group`` argument.
        name: of the parameter, for messages.

    Raises:
        ValueError: `group` is not the one that the parameter is split over.
    """
    layout = None if isinstance(parameter, DTensor) else get_layout(parameter)
    if isinstance(parameter, DTensor):
        own = resolve_group(parameter.device_mesh)
    elif layout is None or layout.group is None:
        return resolve_group(group)
    else:
        own = layout.group
    check_same_ranks(own, group, name)
    return own


def full_size(parameter: torch.Tensor, dim: int) -> int | None:
    """Size of the full parameter along `dim`, counted from the front; None if this rank's shard does not say."""
    if isinstance(parameter, DTensor):
        return parameter.size(dim)
    layout = get_layout(parameter)
    return None if layout is None or layout.dim != dim else layout.size


def check_same_ranks(own: dist.ProcessGroup, group: Group | None, what: str) -> None:
    """Refuses a `group` argument that names other ranks than those over which `what` is split.

    Raises:
        ValueError: it does.
    """
    if group is None:
        return
    ranks, given = dist.get_process_group_ranks(own), dist.get_process_group_ranks(resolve_group(group))
    if ranks != given:
        raise ValueError(
            f"{what} is split over the ranks {ranks}, and group= names the ranks {given}: leave group= out"
        )


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[*, features] as [samples, features]."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[None]


def check_dim(dim: int | None, what: str) -> None:
    """Refuses values of a layer's `dim` argument that have no meaning.

    Raises:
        ValueError: `dim` is none of None, 0, 1, -1.
    """
    if dim not in (None, 0, 1, -1):
        raise ValueError(f"dim={dim!r} was given for {what}: use 0 (rows), 1 or -1 (columns), or None (not split)")


def check_sizes(**sizes: int) -> None:
    """Refuses what cannot be the size of a layer.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is negative.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise (ValueError if isinstance(size, int) else TypeError)(
                f"{name} is {size!r}: it must be an integer of at least 0"
            )


def check_indices(indices: torch.Tensor, size: int, what: str, of_what: str, ignore_index: int | None = None) -> None:
    """Refuses indices outside [0, size), as ``torch`` does where one rank holds everything.

    On a GPU the check is asynchronous, as torch's own is, so that nobody waits for it.

    Raises:
        TypeError: they are not integers.
        IndexError: on the CPU. It names the first such index.
    """
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise TypeError(f"{what} of type {indices.dtype} was given for {size} {of_what}: give integers")
    if indices.numel() == 0 or indices.is_meta:
        return
    outside = (indices < 0) | (indices >= size)
    if ignore_index is not None:
        outside &= indices != ignore_index
    if indices.device.type != "cpu" or type(indices) is not torch.Tensor:  # nothing to read yet, as in tracing
        assert_async(~outside.any(), f"{what} outside the {size} {of_what}")
        return
    if outside.any():
        first = int(outside.flatten().nonzero()[0, 0])
        raise IndexError(
            f"{what} {int(indices.flatten()[first])}, number {first} of {indices.numel()}, is outside the {size} "
            f"{of_what}: use 0 to {size - 1}"
            + ("" if ignore_index is None else f", or {ignore_index} for what is to be ignored")
        )


def autocast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in the type that an enclosing ``torch.autocast`` would have ``F.linear`` compute in.

    Code that switches autocast off computes from fp32 inputs, and from weights that the plan made 16 bits wide.
    """
    device_type = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device_type):
        types = {t.dtype for t in tensors if t is not None}
        if len(types) > 1 and torch.float32 in types and not types.isdisjoint((torch.bfloat16, torch.float16)):
            return [t if t is None else t.to(torch.float32) for t in tensors]
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
