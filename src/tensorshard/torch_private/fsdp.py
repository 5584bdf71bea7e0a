"""FSDP2's collectives.

`AllGather`, `ReduceScatter`: what the arguments of ``FSDPModule.set_custom_all_gather`` and
``set_custom_reduce_scatter``, which are public, derive from.

Why: on Gloo, all-gathers and reduce-scatters built from sends and receives are several times as fast.

Checked: torch 2.11 and 2.13.

Public way: none; the methods are public and the classes are not.
"""

from typing import Any

from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter", "forget_module_state"]


def forget_module_state(module: Any) -> None:
    """Undoes ``fully_shard``'s claim to a module, whose class and attributes are the former ones again.

    Why: a module is given back to the user when a plan is refused after it was sharded.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    _module_state_mapping.pop(module, None)
