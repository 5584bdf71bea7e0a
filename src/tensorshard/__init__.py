"""Train a PyTorch model that outgrew one device on many, exactly as one big device would have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorshard.plan import Plan

if TYPE_CHECKING:
    from tensorshard import distributed, nn, utils
    from tensorshard.distributed import init_process_group
    from tensorshard.engine import Engine, parallelize
    from tensorshard.group_sharded import group_sharded_parallel, save_group_sharded_model
    from tensorshard.mesh import Mesh
    from tensorshard.state import (
        collect_state_dict,
        get_parallel_dim,
        register_ddp_parameters_to_ignore,
        register_parallel_dim,
        relocate_state_dict,
        slice,
    )

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Mesh",
    "Plan",
    "collect_state_dict",
    "distributed",
    "get_parallel_dim",
    "group_sharded_parallel",
    "init_process_group",
    "nn",
    "parallelize",
    "register_ddp_parameters_to_ignore",
    "register_parallel_dim",
    "relocate_state_dict",
    "save_group_sharded_model",
    "slice",
    "utils",
]

# Where each name comes from on its first use, so that `import tensorshard` costs little more than nothing.
_MODULES = {
    "Engine": "engine",
    "Mesh": "mesh",
    "collect_state_dict": "state",
    "get_parallel_dim": "state",
    "group_sharded_parallel": "group_sharded",
    "init_process_group": "distributed",
    "parallelize": "engine",
    "register_ddp_parameters_to_ignore": "state",
    "register_parallel_dim": "state",
    "relocate_state_dict": "state",
    "save_group_sharded_model": "group_sharded",
    "slice": "state",
}
_SUBMODULES = ("distributed", "nn", "utils")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"tensorshard.{_MODULES[name]}"), name)
    if name in _SUBMODULES:
        return import_module(f"tensorshard.{name}")
    raise AttributeError(f"module 'tensorshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
