"""What a plan takes, before anything runs: memory of every distinct rank, on fake tensors and in one process."""

from tensorshard.estimate.estimate import Estimate, estimate
from tensorshard.estimate.profile_memory import MemoryProfile, profile_memory
from tensorshard.estimate.rank_estimate import RankEstimate

__all__ = ["Estimate", "MemoryProfile", "RankEstimate", "estimate", "profile_memory"]
