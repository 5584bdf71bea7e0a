"""What a plan takes, before anything runs: memory of every distinct rank, on fake tensors and in one process."""

from tensorshard.estimate.estimate import Estimate, estimate
from tensorshard.estimate.rank_estimate import RankEstimate

__all__ = ["Estimate", "RankEstimate", "estimate"]
