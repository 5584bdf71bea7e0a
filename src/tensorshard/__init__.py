"""Train a PyTorch model that outgrew one device on many, exactly as one big device would have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorshard.plan import Plan

if TYPE_CHECKING:
    from tensorshard.engine import Engine, parallelize
    from tensorshard.mesh import Mesh

__version__ = "0.1.0"

# Looked up on first use, so that `import tensorshard` costs little more than nothing.
_LAZY = {
    "Engine": "tensorshard.engine",
    "Mesh": "tensorshard.mesh",
    "parallelize": "tensorshard.engine",
    "group_sharded_parallel": "tensorshard.group_sharded",
    "save_group_sharded_model": "tensorshard.group_sharded",
}

__all__ = ["Plan", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tensorshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
