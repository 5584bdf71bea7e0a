"""Mixed precision: the type of computation, and what stays in fp32 with any type (Micikevicius et al. 2018)."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from tensorshard.model.buffers import spectral_norm_hooks
from tensorshard.model.forwards import Forward, Role, replace_forward, runs_forward_of, wrap_forward
from tensorshard.model.model_errors import explained_types
from tensorshard.torch_private.modules import NormBase, own_parameters, set_parameter
from tensorshard.torch_private.pytree import tree_map

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PER_SAMPLE = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORMS = (*_PER_SAMPLE, NormBase)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that the optimizer updates a parameter of `dtype` in: fp32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def held_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The type in which the values of `parameter` are kept: that of its master, or its own if it is frozen."""
    return master_dtype(parameter.dtype) if parameter.requires_grad else parameter.dtype


def compute_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The type in which forward computes with a parameter whose master is of `dtype`."""
    return DTYPES[precision] if dtype == torch.float32 else dtype


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward runs in.

    Raises:
        MixedTypesError: inside, an operation was given tensors of different types.
    """
    return nullcontext() if precision == "fp32" else _autocast(precision, device)


@contextmanager
def _autocast(precision: str, device: torch.device) -> Iterator[None]:
    with explained_types(precision), torch.autocast(device.type, DTYPES[precision]):
        yield


def widen_output(output: Any) -> Any:
    """`output` with 16-bit tensors cast to fp32, so that losses are computed in fp32."""
    return tree_map(_widen, output)


def keep_norms_fp32(modules: Iterable[nn.Module]) -> None:
    """Makes norms among `modules`, and modules that compute a weight from parameters, compute from fp32 parameters.

    Norms are torch's normalization layers and subclasses, whose own forwards run; autocast casts their inputs. They
    cost little, their sums lose most in 16 bits, and some kernels refuse weights narrower than the statistics. Weights
    are computed by parametrizations and spectral norms, whose vectors stay fp32 too.
    """
    for module in modules:
        if runs_forward_of(module, *_PER_SAMPLE):
            # With another self, the module is not changed meanwhile, so a recomputed block is compiled in one piece.
            replace_forward(module, Role.FP32, MethodType(type(module).forward, _WideParameters(module)))
        elif isinstance(module, _NORMS):
            wrap_forward(module, Role.FP32, partial(_from_fp32, [module]))
        elif isinstance(module, ParametrizationList):
            wrap_forward(module, Role.FP32, partial(_without_autocast, module))
        for hook in spectral_norm_hooks(module):
            compute = partial(_without_autocast, module, hook.compute_weight)
            vars(hook)["compute_weight"] = compute  # the hook is the module's, and is copied with it


def _without_autocast(module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` all in fp32. `module` and its children hold the parameters that it reads."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with torch.autocast(device.type, enabled=False):
        return _from_fp32(list(module.modules()), forward, *args, **kwargs)


def _from_fp32(modules: list[nn.Module], forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` while the parameters of `modules`, without those of their children, are read as fp32."""
    before = [(module, name, parameter) for module in modules for name, parameter in own_parameters(module).items()]
    for module, name, parameter in before:
        set_parameter(module, name, _widen(parameter))
    try:
        return forward(*args, **kwargs)
    finally:
        for module, name, parameter in before:
            set_parameter(module, name, parameter)


def check_supported(precision: str, device: torch.device) -> None:
    """Raises if the device cannot compute in `precision`.

    Raises:
        ValueError: a small product, forward and backward, fails on the device.
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
    """Replaces a norm as ``self``, and gives its parameters as fp32."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __getattr__(self, name: str) -> Any:
        return _widen(getattr(self._norm, name))


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
