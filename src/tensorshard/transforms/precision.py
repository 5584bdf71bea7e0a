"""Mixed precision: which type is computed in, and what stays fp32 whatever it is (Micikevicius et al. 2018)."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.torch_private.modules import NormBase, own_parameters
from tensorshard.torch_private.pytree import tree_map

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, NormBase)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that the optimizer updates a parameter of `dtype` in: fp32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def compute_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The type that a parameter whose master is of `dtype` is computed in."""
    return DTYPES[precision] if dtype == torch.float32 else dtype


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward runs in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


def widen_output(output: Any) -> Any:
    """`output` with its 16-bit tensors as fp32, so that losses are computed in fp32."""
    return tree_map(_widen, output)


def keep_norms_fp32(model: nn.Module) -> None:
    """Makes torch's normalization layers compute in fp32 with fp32 weights, as autocast does for their inputs.

    They cost little, their sums lose most in 16 bits, and some kernels refuse weights narrower than the statistics.
    """
    for module in model.modules():
        if isinstance(module, _NORMS):
            forward: Any = type(module).forward
            module.forward = partial(forward, _WideParameters(module))  # type: ignore[method-assign]


def check_supported(precision: str, device: torch.device) -> None:
    """Raises where the device cannot compute in `precision`.

    Raises:
        ValueError: tried on a small product, forward and backward.
    """
    if precision == "fp32":
        return
    try:
        with torch.enable_grad():
            weight = torch.ones(8, 8, dtype=DTYPES[precision], device=device, requires_grad=True)
            nn.functional.linear(nn.functional.layer_norm(weight, (8,)), weight).sum().backward()
    except RuntimeError as error:
        raise ValueError(
            f"precision={precision!r} does not work on {device.type} ({error}); use 'fp32'"
            + (" or 'bf16'" if precision == "fp16" else "")
        ) from error


class _WideParameters:
    """Stands for a module whose parameters are read as fp32."""

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _widen(value) if name in own_parameters(self._module) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
