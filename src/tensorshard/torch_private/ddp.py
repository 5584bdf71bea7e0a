"""What ``DistributedDataParallel`` averages and leaves alone."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def active_ddp_module() -> Any:
    """The ``DistributedDataParallel`` whose forward is running, or None.

    Why: a gather or scatter in there has to make up for the averaging of the gradients.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def ddp_ignored(module: nn.Module) -> list[str]:
    """Names of what ``DistributedDataParallel`` will leave alone in `module`, whoever said so.

    Why: the list is set as a whole, so that others' names must be kept.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def set_ddp_ignored(module: nn.Module, names: list[str]) -> None:
    """Has ``DistributedDataParallel`` leave the parameters and buffers of `names` in `module` alone.

    Why: each rank holds another shard of a split parameter, which must not be averaged or broadcast.

    Checked: torch 2.11 and 2.13.

    Public way: none. PyTorch's DDP tutorials name this one.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
