"""What a plan takes, before anything runs: memory of every distinct rank, on fake tensors and in one process."""

from typing import TYPE_CHECKING

from tensorshard.common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from tensorshard.predict.estimate import Estimate, estimate
    from tensorshard.predict.profile_memory import MemoryProfile, profile_memory
    from tensorshard.predict.rank_estimate import RankEstimate

__all__ = ["Estimate", "MemoryProfile", "RankEstimate", "estimate", "profile_memory"]

# Imported on first use, so that code which only formats sizes or draws pages need not import torch.
__getattr__ = lazy_imports(
    __name__,
    {
        "Estimate": "tensorshard.predict.estimate",
        "MemoryProfile": "tensorshard.predict.profile_memory",
        "RankEstimate": "tensorshard.predict.rank_estimate",
        "estimate": "tensorshard.predict.estimate",
        "profile_memory": "tensorshard.predict.profile_memory",
    },
)
