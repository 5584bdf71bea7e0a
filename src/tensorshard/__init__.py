"""Train a PyTorch model that outgrew one device on many, exactly as one big device would have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorshard.plan import Plan

if TYPE_CHECKING:
    from tensorshard import distributed, nn, utils
    from tensorshard.engine import Engine, parallelize
    from tensorshard.group_sharded import group_sharded_parallel, save_group_sharded_model
    from tensorshard.mesh import Mesh

__version__ = "0.1.0"

# Looked up on first use, so that `import tensorshard` costs little more than nothing.
_LAZY = {
    "Engine": "tensorshard.engine",
    "Mesh": "tensorshard.mesh",
    "parallelize": "tensorshard.engine",
    "collect_state_dict": "tensorshard.state",
    "get_parallel_dim": "tensorshard.state",
    "init_process_group": "tensorshard.distributed",
    "register_ddp_parameters_to_ignore": "tensorshard.state",
    "register_parallel_dim": "tensorshard.state",
    "relocate_state_dict": "tensorshard.state",
    "slice": "tensorshard.state",
    "group_sharded_parallel": "tensorshard.group_sharded",
    "save_group_sharded_model": "tensorshard.group_sharded",
}

_SUBMODULES = ("distributed", "nn", "utils")

__all__ = ["Plan", *_LAZY, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return import_module(f"tensorshard.{name}")
    raise AttributeError(f"module 'tensorshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
