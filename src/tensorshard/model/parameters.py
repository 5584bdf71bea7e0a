"""A model's parameters and buffers: names and places, shared memory, and values to put in their place."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorshard.torch_private.modules import (
    NormBase,
    buffer_at,
    buffer_names,
    own_buffers,
    own_parameters,
    set_buffer,
    set_parameter,
)
from tensorshard.torch_private.tensors import storage_address, tensor_version

Registration = tuple[nn.Module, str]
"""A module, and the name of a buffer in it."""

STATISTICS = ("running_mean", "running_var")


def like(template: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """A parameter that holds `value` and is otherwise like `template`, with the attributes that users set on it."""
    parameter = nn.Parameter(value, requires_grad=template.requires_grad)
    parameter.__dict__.update(template.__dict__)
    return parameter


class ParameterPlaces:
    """Where each parameter of a model is registered: a tied one at several places."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in own_parameters(module).items():
                self._places.setdefault(parameter, []).append((module, name))

    def of(self, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
        """The modules that register `parameter`, with its names there."""
        return self._places[parameter]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Puts `new` at every place of `old`."""
        for module, name in self._places[old]:
            set_parameter(module, name, new)


def assign_buffers(model: nn.Module, value_of: Callable[[str], torch.Tensor], device: torch.device) -> None:
    """Gives every buffer of `model` its value, on `device`; one registered at several places stays one."""
    real: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in own_buffers(module).items():
            if id(buffer) not in real:
                real[id(buffer)] = value_of(f"{prefix}.{name}" if prefix else name).to(device)
            set_buffer(module, name, real[id(buffer)])


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter, the first name that it is registered under: tied ones have several."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def buffer_aliases(model: nn.Module) -> dict[str, str]:
    """For every name of a buffer, the first name that it is registered under: blocks may share one."""
    first: dict[torch.Tensor, str] = {}
    return {name: first.setdefault(b, name) for name, b in model.named_buffers(remove_duplicate=False)}


def check_own_memory(module: nn.Module) -> None:
    """Refuses parameters and buffers in the memory of a trained parameter: a plan would give them memory of their own.

    Raises:
        ValueError: there is one. Views in plain attributes are refused where values are taken out of the model.
    """
    trained: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not is_lazy(parameter) and parameter.numel():
            trained.setdefault(storage_address(parameter.untyped_storage()), []).append((name, parameter))
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if is_lazy(tensor) or not tensor.numel() or tensor.layout != torch.strided:
                continue
            for first, parameter in trained.get(storage_address(tensor.untyped_storage()), ()):
                if tensor is not parameter and _overlap(tensor, parameter):
                    raise ValueError(
                        f"{kind} {name!r} shares the memory of the parameter {first!r}, which gets memory of its own "
                        f"when it is laid out, so that {name!r} would not follow its updates. Read the parameter in "
                        f"forward instead"
                        + ("; to tie two parameters, register the same nn.Parameter twice" * (kind == "parameter"))
                    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage may have elements in common."""
    (begin, end), (first, last) = _span(one), _span(other)
    return begin < last and first < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length: int = sum((int(size) - 1) * int(stride) for size, stride in pairs) + 1
    return begin, begin + length * tensor.itemsize


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

    def hold_other_numbers(self) -> bool:
        """Whether there is another buffer in the place of one, or one of a floating-point type has other values now."""
        for kept in self._kept:
            buffer = buffer_at(*kept.places[0])
            if buffer is not kept.buffer:
                return True
            if buffer is None or not buffer.is_floating_point() or not kept.is_changed():
                continue
            if kept.values is None or not torch.equal(buffer, kept.values):
                return True
        return False

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
