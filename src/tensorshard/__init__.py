"""Train a PyTorch model that outgrew one device on many, exactly as one big device would have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorshard.common import __version__ as __version__
from tensorshard.common.lazy_imports import lazy_imports
from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan

if TYPE_CHECKING:
    from tensorshard import data, distributed, nn, utils
    from tensorshard.comm.marks import get_parallel_dim, register_parallel_attribute, register_parallel_dim
    from tensorshard.compat.group_sharded import group_sharded_parallel, save_group_sharded_model
    from tensorshard.compat.state import collect_state_dict, relocate_state_dict, sharded_state_dict, slice
    from tensorshard.distributed import init_process_group
    from tensorshard.distributed.ddp import register_ddp_parameters_to_ignore
    from tensorshard.engine.engine import Engine
    from tensorshard.engine.frozen import FrozenModel
    from tensorshard.engine.loss import model_loss
    from tensorshard.engine.loss_terms import LossTerm
    from tensorshard.engine.measures import gather_samples
    from tensorshard.parallelize.build import parallelize, parallelize_frozen
    from tensorshard.plan.mesh import Mesh
    from tensorshard.predict.estimate import Estimate, estimate
    from tensorshard.predict.profile_memory import profile_memory
    from tensorshard.predict.search.find_plans import find_plans
    from tensorshard.predict.search.plan_search import FoundPlan, PlanSearch
    from tensorshard.random.plain_loop import same_randomness
    from tensorshard.swaps.swap import Swaps, swap
    from tensorshard.trainer.launch.notebook import notebook_launch
    from tensorshard.verify.layouts import verify_layout
    from tensorshard.verify.verification import Verification
    from tensorshard.verify.verify import verify
    from tensorshard.weights.files import from_pretrained


__all__ = [
    "Engine",
    "Estimate",
    "FoundPlan",
    "FrozenModel",
    "LossTerm",
    "Mesh",
    "Offload",
    "Plan",
    "PlanSearch",
    "Swaps",
    "Verification",
    "collect_state_dict",
    "data",
    "distributed",
    "estimate",
    "find_plans",
    "from_pretrained",
    "gather_samples",
    "get_parallel_dim",
    "group_sharded_parallel",
    "init_process_group",
    "model_loss",
    "nn",
    "notebook_launch",
    "parallelize",
    "parallelize_frozen",
    "profile_memory",
    "register_ddp_parameters_to_ignore",
    "register_parallel_attribute",
    "register_parallel_dim",
    "relocate_state_dict",
    "same_randomness",
    "save_group_sharded_model",
    "sharded_state_dict",
    "slice",
    "swap",
    "utils",
    "verify",
    "verify_layout",
]

# Where each name comes from on its first use, so that `import tensorshard` costs little more than nothing.
_MODULES = {
    "Engine": "tensorshard.engine",
    "Estimate": "tensorshard.predict",
    "FoundPlan": "tensorshard.predict.search",
    "FrozenModel": "tensorshard.engine.frozen",
    "LossTerm": "tensorshard.engine.loss_terms",
    "Mesh": "tensorshard.plan.mesh",
    "PlanSearch": "tensorshard.predict.search",
    "Swaps": "tensorshard.swaps.swap",
    "Verification": "tensorshard.verify.verification",
    "collect_state_dict": "tensorshard.compat.state",
    "estimate": "tensorshard.predict",
    "find_plans": "tensorshard.predict.search",
    "from_pretrained": "tensorshard.weights.files",
    "gather_samples": "tensorshard.engine.measures",
    "get_parallel_dim": "tensorshard.comm.marks",
    "group_sharded_parallel": "tensorshard.compat.group_sharded",
    "init_process_group": "tensorshard.distributed",
    "model_loss": "tensorshard.engine.loss",
    "notebook_launch": "tensorshard.trainer.launch.notebook",
    "parallelize": "tensorshard.parallelize.build",
    "parallelize_frozen": "tensorshard.parallelize.build",
    "profile_memory": "tensorshard.predict",
    "register_ddp_parameters_to_ignore": "tensorshard.distributed.ddp",
    "_PARALLEL_DIM": "tensorshard.comm.marks",
    "register_parallel_attribute": "tensorshard.comm.marks",
    "register_parallel_dim": "tensorshard.comm.marks",
    "relocate_state_dict": "tensorshard.compat.state",
    "save_group_sharded_model": "tensorshard.compat.group_sharded",
    "same_randomness": "tensorshard.random.plain_loop",
    "sharded_state_dict": "tensorshard.compat.state",
    "slice": "tensorshard.compat.state",
    "swap": "tensorshard.swaps.swap",
    "verify": "tensorshard.verify.verify",
    "verify_layout": "tensorshard.verify.layouts",
}
_SUBMODULES = ("data", "distributed", "nn", "utils")

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
