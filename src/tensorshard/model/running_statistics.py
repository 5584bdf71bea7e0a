"""The buffers that a training forward changes: normalizations keep statistics of their batches there."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from tensorshard.torch_private.modules import NormBase, SpectralNormVectors, forward_pre_hooks, own_buffers

STATISTICS = ("running_mean", "running_var")


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` is one of torch's batch or instance normalizations or a subclass, or has the same buffers."""
    return isinstance(module, NormBase) or all(name in own_buffers(module) for name in STATISTICS)


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that a training forward of `model`'s normalizations changes."""
    return buffers_of(modules_with_statistics(model))


def modules_with_statistics(model: nn.Module) -> list[nn.Module]:
    """The modules in `model` that have such buffers: batch and instance normalizations, and spectral norms."""
    return [module for module in model.modules() if keeps_statistics(module) or _iterates(module)]


def buffers_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The buffers that `modules` hold themselves at this moment."""
    return [buffer for module in modules for buffer in own_buffers(module).values()]


def spectral_norm_hooks(module: nn.Module) -> list[SpectralNorm]:
    """The hooks of :func:`torch.nn.utils.spectral_norm`, which compute a weight before each forward of `module`."""
    return [hook for hook in forward_pre_hooks(module) if isinstance(hook, SpectralNorm)]


def _iterates(module: nn.Module) -> bool:
    """Whether each training forward takes one more step of a power iteration."""
    return isinstance(module, SpectralNormVectors) or bool(spectral_norm_hooks(module))
