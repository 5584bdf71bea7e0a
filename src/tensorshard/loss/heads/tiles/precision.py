"""In which types a head computes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The types in which a head computes.

    Args:
        compute: of the factors of matrix products. On the CPU it is `wide`: products of narrower types are slow there.
        wide: of logits, sums and gradients during their computation: fp32, or fp64 for fp64 tensors.
    """

    compute: torch.dtype
    wide: torch.dtype

    @classmethod
    def choose(cls, input: torch.Tensor, autocast: torch.dtype | None) -> "Precision":
        """The types for an input, with the type of autocast if that is on."""
        if input.dtype == torch.float64:
            return cls(torch.float64, torch.float64)
        if input.device.type == "cpu":
            return cls(torch.float32, torch.float32)
        return cls(autocast or input.dtype, torch.float32)
