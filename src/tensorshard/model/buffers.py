"""A module's buffers: which of them a training forward changes, and their values at one time, to restore them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from tensorshard.torch_private.modules import (
    NormBase,
    buffer_at,
    buffer_names,
    forward_pre_hooks,
    own_buffers,
    set_buffer,
)
from tensorshard.torch_private.tensors import tensor_version

Registration = tuple[nn.Module, str]
"""A module, and the name of a buffer in it."""

STATISTICS = ("running_mean", "running_var")


@dataclass
class _Kept:
    """One buffer.

    Args:
        places: where it is registered.
        buffer: the tensor itself; None where only the name is registered.
        version: how often it had been written to.
        values: a copy of its values.
        silent: whether it may be written to without being counted, as torch's batch norm does to running statistics.
    """

    places: list[Registration]
    buffer: torch.Tensor | None
    version: int
    values: torch.Tensor | None
    silent: bool = False

    @classmethod
    def of(cls, buffer: torch.Tensor | None, places: list[Registration]) -> "_Kept":
        if buffer is None:  # a forward may assign a tensor
            return cls(places, None, 0, None)
        silent = any(name in STATISTICS and keeps_statistics(module) for module, name in places)
        return cls(places, buffer, tensor_version(buffer), buffer.detach().clone(), silent)

    def is_changed(self) -> bool:
        """Whether it was replaced or written to, or may have been."""
        if self.silent:
            return True
        if any(buffer_at(module, name) is not self.buffer for module, name in self.places):
            return True
        return self.buffer is not None and tensor_version(self.buffer) != self.version


class BufferValues:
    """The buffers of `modules` as they are now.

    Args:
        modules: each once; modules inside of them are not looked at.
        wanted: says which buffers to copy. It is called with each, and with the places where it is registered.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        wanted: Callable[[torch.Tensor, list[Registration]], bool] = lambda buffer, places: True,
    ) -> None:
        registered: dict[int, tuple[torch.Tensor | None, list[Registration]]] = {}
        for module in modules:
            for name in buffer_names(module):
                buffer = buffer_at(module, name)
                registered.setdefault(id(buffer), (buffer, []))[1].append((module, name))
        self._kept = [
            _Kept.of(buffer, places)
            for buffer, places in registered.values()
            if buffer is None or wanted(buffer, places)
        ]

    def changed(self) -> list[list[Registration]]:
        """The places of each buffer that was written to or replaced since."""
        return [kept.places for kept in self._kept if kept.is_changed()]

    def forget_unchanged(self) -> None:
        """Drops the copies of buffers that have not changed."""
        self._kept = [kept for kept in self._kept if kept.is_changed()]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the same tensors back, with the values that they had."""
        for kept in self._kept:
            if kept.is_changed():
                for module, name in kept.places:
                    set_buffer(module, name, kept.buffer)
                if kept.buffer is not None and kept.values is not None:
                    kept.buffer.copy_(kept.values)

    def exchange(self) -> "Exchanged":
        """Replaces the buffers by copies of the kept values, until :meth:`Exchanged.undo`.

        Nothing is written into the buffers themselves, since a graph may still need them.
        """
        current = [(module, name, buffer_at(module, name)) for kept in self._kept for module, name in kept.places]
        for kept in self._kept:
            copy = None if kept.values is None else kept.values.clone()
            for module, name in kept.places:
                set_buffer(module, name, copy)
        return Exchanged(current)


@dataclass(frozen=True)
class Exchanged:
    """Buffers that were replaced for a while."""

    _current: list[tuple[nn.Module, str, torch.Tensor | None]]

    def undo(self) -> None:
        """Puts the buffers back."""
        for module, name, buffer in self._current:
            set_buffer(module, name, buffer)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` is one of torch's batch or instance normalizations or a subclass, or has the same buffers."""
    return isinstance(module, NormBase) or all(name in own_buffers(module) for name in STATISTICS)


def spectral_norm_hooks(module: nn.Module) -> list[SpectralNorm]:
    """The hooks of :func:`torch.nn.utils.spectral_norm`, which compute a weight before each forward of `module`."""
    return [hook for hook in forward_pre_hooks(module) if isinstance(hook, SpectralNorm)]
