"""What a plan takes, before anything runs: memory of every distinct rank, on fake tensors and in one process."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorshard.estimate.estimate import Estimate, estimate
    from tensorshard.estimate.profile_memory import MemoryProfile, profile_memory
    from tensorshard.estimate.rank_estimate import RankEstimate

__all__ = ["Estimate", "MemoryProfile", "RankEstimate", "estimate", "profile_memory"]

# Where names come from on their first use, so that what only spells sizes or draws pages does not wait for torch.
_MODULES = {
    "Estimate": "estimate",
    "MemoryProfile": "profile_memory",
    "RankEstimate": "rank_estimate",
    "estimate": "estimate",
    "profile_memory": "profile_memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tensorshard.estimate' has no attribute {name!r}")
    return getattr(import_module(f"tensorshard.estimate.{_MODULES[name]}"), name)


class _Package(ModuleType):
    """Keeps a public name its own where a module has the same, which the import system would put in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType) or name not in _MODULES:  # else __getattr__ finds it
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
