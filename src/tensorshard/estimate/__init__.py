"""What a plan takes, before anything runs: memory of every distinct rank, on fake tensors and in one process."""

from typing import TYPE_CHECKING

from tensorshard.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from tensorshard.estimate.estimate import Estimate, estimate
    from tensorshard.estimate.profile_memory import MemoryProfile, profile_memory
    from tensorshard.estimate.rank_estimate import RankEstimate

__all__ = ["Estimate", "MemoryProfile", "RankEstimate", "estimate", "profile_memory"]

# Imported on first use, so that code which only formats sizes or draws pages need not import torch.
__getattr__ = lazy_imports(
    __name__,
    {
        "Estimate": "tensorshard.estimate.estimate",
        "MemoryProfile": "tensorshard.estimate.profile_memory",
        "RankEstimate": "tensorshard.estimate.rank_estimate",
        "estimate": "tensorshard.estimate.estimate",
        "profile_memory": "tensorshard.estimate.profile_memory",
    },
)
