"""In which types a head computes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """In which types a head computes.

    Args:
        compute: of what is multiplied. On the CPU it is `wide`: matrix products of narrower types are slow there.
        wide: of logits, sums and gradients while they are being computed: fp32, or fp64 for fp64 tensors.
    """

    compute: torch.dtype
    wide: torch.dtype

    @classmethod
    def choose(cls, input: torch.Tensor, autocast: torch.dtype | None) -> "Precision":
        """For an input, under the autocast type if there is one."""
        if input.dtype == torch.float64:
            return cls(torch.float64, torch.float64)
        if input.device.type == "cpu":
            return cls(torch.float32, torch.float32)
        return cls(autocast or input.dtype, torch.float32)
