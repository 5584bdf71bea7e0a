"""The values of a module's buffers at one time, to restore if a computation is undone or repeated."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tensorshard.model.running_statistics import STATISTICS, keeps_statistics
from tensorshard.torch_private.modules import buffer_at, buffer_names, set_buffer
from tensorshard.torch_private.tensors import tensor_version

Place = tuple[nn.Module, str]
"""A module, and the name of a buffer in it."""


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

    places: list[Place]
    buffer: torch.Tensor | None
    version: int
    values: torch.Tensor | None
    silent: bool = False

    @classmethod
    def of(cls, buffer: torch.Tensor | None, places: list[Place]) -> "_Kept":
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
        wanted: Callable[[torch.Tensor, list[Place]], bool] = lambda buffer, places: True,
    ) -> None:
        found: dict[int, tuple[torch.Tensor | None, list[Place]]] = {}
        for module in modules:
            for name in buffer_names(module):
                buffer = buffer_at(module, name)
                found.setdefault(id(buffer), (buffer, []))[1].append((module, name))
        self._kept = [
            _Kept.of(buffer, places) for buffer, places in found.values() if buffer is None or wanted(buffer, places)
        ]

    def changed(self) -> list[list[Place]]:
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
