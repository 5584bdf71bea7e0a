"""What ``DistributedDataParallel`` averages and leaves alone."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def active_ddp_module() -> Any:
    """The ``DistributedDataParallel`` whose forward is running, or None.

    Why: a gather or scatter in that forward has to make up for the averaging of the gradients.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def ddp_ignored(module: nn.Module) -> list[str]:
    """Names of the parameters and buffers of `module` that ``DistributedDataParallel`` will ignore, whoever set them.

    Why: the list is set as a whole, so names that others have set must be kept.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def set_ddp_ignored(module: nn.Module, names: list[str]) -> None:
    """Makes ``DistributedDataParallel`` ignore the parameters and buffers of `names` in `module`.

    Why: each rank holds another shard of a split parameter, which must not be averaged or broadcast.

    Checked: torch 2.11 and 2.13.

    Public way: none. PyTorch's DDP tutorials name this one.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
