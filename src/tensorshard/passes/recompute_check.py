"""Whether a recomputed forward computes what the first one did, compared by values."""

import math
from dataclasses import dataclass

import torch

from tensorshard.torch_private.fake_tensors import FakeTensor

_ROUNDING = 1e-6  # of a forward that normalizes its weight in place, which does so twice
_TOLERANCE = 1e-3  # on devices whose kernels may add in another order each time


class DifferentValuesError(RuntimeError):
    """A block's recomputed forward does not compute what its first forward did."""


@dataclass
class Comparison:
    """How a block's saved tensors are compared.

    Args:
        block: names the block, for the error.
        least_dim: tensors of fewer dimensions are compared by their layouts only; None for all.
    """

    block: str
    least_dim: int | None = None

    def __call__(self, tensor: torch.Tensor) -> "SavedTensor":
        return SavedTensor(self.block, self.least_dim, tensor)


class SavedTensor:
    """The shape of a tensor that a block's forward saved, and some numbers that depend on all of its values.

    Args:
        block: names the block, for the error.
        least_dim: tensors of fewer dimensions are compared by their layouts only; None for all.
    """

    __slots__ = ("_block", "_exact", "_layout", "_numbers")

    def __init__(self, block: str, least_dim: int | None, tensor: torch.Tensor) -> None:
        self._block = block
        self._layout = tensor.shape, tensor.dtype, tensor.device
        self._numbers = None
        if least_dim is not None and tensor.dim() >= least_dim and not _has_no_values(tensor):
            self._exact = tensor.device.type == "cpu"
            self._numbers = _summary(tensor.detach())

    def __ne__(self, other: object) -> bool:
        """False.

        Raises:
            DifferentValuesError: the layouts or the values differ.
        """
        assert isinstance(other, SavedTensor)
        if self._layout != other._layout:
            raise DifferentValuesError(different(self._block))
        if self._numbers is not None and other._numbers is not None and not self._agrees(other):
            raise DifferentValuesError(different(self._block))
        return False

    def _agrees(self, other: "SavedTensor") -> bool:
        assert self._numbers is not None and other._numbers is not None
        tolerance = _ROUNDING if self._exact else _TOLERANCE
        mine, others = self._numbers.tolist(), other._numbers.tolist()
        scale = max(abs(mine[0]), abs(others[0])) if math.isfinite(mine[0]) and math.isfinite(others[0]) else 0.0
        return all(
            one == two or (math.isnan(one) and math.isnan(two)) or abs(one - two) <= tolerance * scale
            for one, two in zip(mine, others, strict=True)
        )


def different(block: str, because: str | None = None) -> str:
    """The sentence about a block whose recomputed forward differs from the first one."""
    because = because or (
        "its forward depends on something that changes meanwhile and cannot be restored, such as a file, the time, an "
        "object of a compiled library, or a tensor that other code writes to in place"
    )
    return (
        f"block {block} computes other values when its forward runs again in backward (Plan.recompute), so its "
        f"gradients would be wrong: {because}. Keep such a state in an attribute, a list, a dict or a buffer of the "
        f"block, or use recompute='none'"
    )


def _has_no_values(tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, FakeTensor)
        or tensor.is_meta
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or not tensor.numel()
    )


@torch.no_grad()
def _summary(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of sizes, of all, of every other row and of every other column, without a copy of what has 32 bits."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    with torch.autocast(tensor.device.type, enabled=False):
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float64
        parts = [tensor, tensor[::2], tensor[..., ::2]] if tensor.dim() else [tensor]
        sums = [part.sum(dtype=wide) for part in parts]
        if tensor.is_floating_point():
            sums.insert(0, torch.linalg.vector_norm(tensor, 1, dtype=wide))
        return torch.stack(sums)
