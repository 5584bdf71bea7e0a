"""Train a PyTorch model that outgrew one device on many, exactly as one big device would have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorshard.lazy_imports import lazy_imports
from tensorshard.offload_fields import Offload
from tensorshard.plan import Plan

if TYPE_CHECKING:
    from tensorshard import distributed, nn, utils
    from tensorshard.comm.marks import get_parallel_dim, register_parallel_attribute, register_parallel_dim
    from tensorshard.distributed import init_process_group
    from tensorshard.distributed.ddp import register_ddp_parameters_to_ignore
    from tensorshard.engine.engine import Engine
    from tensorshard.estimate.estimate import Estimate, estimate
    from tensorshard.estimate.profile_memory import profile_memory
    from tensorshard.group_sharded import group_sharded_parallel, save_group_sharded_model
    from tensorshard.launch.notebook import notebook_launch
    from tensorshard.mesh import Mesh
    from tensorshard.parallelize import parallelize
    from tensorshard.planner.find_plans import find_plans
    from tensorshard.planner.plan_search import FoundPlan, PlanSearch
    from tensorshard.pretrained import from_pretrained
    from tensorshard.state import collect_state_dict, relocate_state_dict, sharded_state_dict, slice

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Estimate",
    "FoundPlan",
    "Mesh",
    "Offload",
    "Plan",
    "PlanSearch",
    "collect_state_dict",
    "distributed",
    "estimate",
    "find_plans",
    "from_pretrained",
    "get_parallel_dim",
    "group_sharded_parallel",
    "init_process_group",
    "nn",
    "notebook_launch",
    "parallelize",
    "profile_memory",
    "register_ddp_parameters_to_ignore",
    "register_parallel_attribute",
    "register_parallel_dim",
    "relocate_state_dict",
    "save_group_sharded_model",
    "sharded_state_dict",
    "slice",
    "utils",
]

# Where each name comes from on its first use, so that `import tensorshard` costs little more than nothing.
_MODULES = {
    "Engine": "tensorshard.engine",
    "Estimate": "tensorshard.estimate",
    "FoundPlan": "tensorshard.planner",
    "Mesh": "tensorshard.mesh",
    "PlanSearch": "tensorshard.planner",
    "collect_state_dict": "tensorshard.state",
    "estimate": "tensorshard.estimate",
    "find_plans": "tensorshard.planner",
    "from_pretrained": "tensorshard.pretrained",
    "get_parallel_dim": "tensorshard.comm.marks",
    "group_sharded_parallel": "tensorshard.group_sharded",
    "init_process_group": "tensorshard.distributed",
    "notebook_launch": "tensorshard.launch.notebook",
    "parallelize": "tensorshard.parallelize",
    "profile_memory": "tensorshard.estimate",
    "register_ddp_parameters_to_ignore": "tensorshard.distributed.ddp",
    "_PARALLEL_DIM": "tensorshard.comm.marks",
    "register_parallel_attribute": "tensorshard.comm.marks",
    "register_parallel_dim": "tensorshard.comm.marks",
    "relocate_state_dict": "tensorshard.state",
    "save_group_sharded_model": "tensorshard.group_sharded",
    "sharded_state_dict": "tensorshard.state",
    "slice": "tensorshard.state",
}
_SUBMODULES = ("distributed", "nn", "utils")

_import_name = lazy_imports(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _import_name(name)
    if name in _SUBMODULES:
        return import_module(f"tensorshard.{name}")
    elsewhere = [] if name.startswith("_") else [f"{m}.{name}" for m in _SUBMODULES if hasattr(__getattr__(m), name)]
    hint = f"; use tensorshard.{elsewhere[0]}" if elsewhere else ""
    raise AttributeError(f"module 'tensorshard' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
