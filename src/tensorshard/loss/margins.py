"""Margins for recognition: the target's cosine is made smaller, so that training has to make it larger."""

import math
from dataclasses import dataclass

import torch

# Cosines nearer to 1 than this are taken as this far: the angle's derivative is infinite at 1 itself.
_EDGE = 1e-7


@dataclass(frozen=True)
class ArcFace:
    """An additive angular margin (Deng et al. 2019): cos(a) becomes cos(a + margin).

    If a + margin exceeds pi, cos(a + margin) would grow again. Then it is cos(a) - margin * sin(margin), as in
    InsightFace.

    Args:
        margin: in radians.

    Raises:
        ValueError: `margin` is outside [0, pi).

    Examples:
        >>> head = ts.nn.ParallelLinearCrossEntropy(16, 1000, margin=ts.nn.ArcFace(0.5))
        >>> head(torch.randn(8, 16), torch.arange(8)).shape
        torch.Size([])
    """

    margin: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.pi:
            raise ValueError(f"ArcFace was given margin={self.margin}: use an angle from 0 to pi, in radians")

    def apply(self, cosine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosine with its margin, and the derivative of that; both of the shape of `cosine`."""
        clamped = cosine.clamp(-1 + _EDGE, 1 - _EDGE)
        angle = clamped.acos()
        turned = angle + self.margin
        monotone = turned <= math.pi
        value = torch.where(monotone, turned.cos(), cosine - self.margin * math.sin(self.margin))
        return value, torch.where(monotone, turned.sin() / angle.sin(), 1.0)


@dataclass(frozen=True)
class CosFace:
    """An additive cosine margin (Wang et al. 2018): cos(a) becomes cos(a) - margin.

    Args:
        margin: what is subtracted.

    Raises:
        ValueError: `margin` is outside [0, 2).

    Examples:
        >>> head = ts.nn.ParallelLinearCrossEntropy(16, 1000, margin=ts.nn.CosFace(0.35))
        >>> head(torch.randn(8, 16), torch.arange(8)).shape
        torch.Size([])
    """

    margin: float = 0.35

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 2:
            raise ValueError(f"CosFace was given margin={self.margin}: use a number from 0 to 2, the range of a cosine")

    def apply(self, cosine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosine with its margin, and the derivative of that; both of the shape of `cosine`."""
        return cosine - self.margin, torch.ones_like(cosine)


Margin = ArcFace | CosFace
