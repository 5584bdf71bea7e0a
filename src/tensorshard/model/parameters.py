"""A model's parameters and buffers: their names and places, replacing those of a meta model, shared memory."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorshard.torch_private.modules import own_buffers, own_parameters, set_buffer, set_parameter
from tensorshard.torch_private.tensors import storage_address


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
