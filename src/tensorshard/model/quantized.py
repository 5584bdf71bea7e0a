"""Frozen weights of several tensors behind one name, such as integers and their scales, held as one tensor of bytes.

A plan lays out plain tensors. A quantized parameter of torchao (any subclass with ``__tensor_flatten__``, the protocol
of torch.compile) or of bitsandbytes (4 bits) becomes a frozen parameter of bytes with the same name, which is sharded,
sent and saved like any other. Whoever reads the module's attribute gets the quantized tensor, made of views of these
bytes, so that the module computes what it did.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.common.words import join_names
from tensorshard.torch_private.modules import own_parameters, set_parameter

_SPECS = "_quantized_parameters"  # in a module's __dict__: for each name of such a parameter, what it is made of
_ALIGNMENT = 16  # of each part within the bytes: views of any type need a multiple of its size


@dataclass(frozen=True)
class _Plain:
    """A tensor within the bytes."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def build(self, data: torch.Tensor) -> torch.Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return data[self.start : self.start + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Flattened:
    """A subclass with ``__tensor_flatten__``."""

    kind: type[Any]
    parts: Mapping[str, "_Plain | _Flattened"]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{name} {part}' for name, part in self.parts.items())})"

    def build(self, data: torch.Tensor) -> torch.Tensor:
        inner = {name: part.build(data) for name, part in self.parts.items()}
        tensor: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)
        return tensor


@dataclass(frozen=True)
class _FourBits:
    """A ``Params4bit`` of bitsandbytes, with the state that its operators read."""

    kind: type[Any]
    data: _Plain
    attributes: Mapping[str, Any]
    state: Any
    parts: Mapping[tuple[str, ...], _Plain]

    def __str__(self) -> str:
        parts = (f"{'.'.join(path)} {part}" for path, part in self.parts.items())
        return f"{self.kind.__name__}({', '.join([f'data {self.data}', *parts])})"

    def build(self, data: torch.Tensor) -> torch.Tensor:
        if data.is_meta:  # its state has numbers that are read
            return data
        made: Any = self.data.build(data)
        if type(data) is torch.Tensor:  # fake tensors are a subclass already, and have the attributes alone
            made = made.as_subclass(self.kind)
        state = copy.copy(self.state)
        if getattr(state, "state2", None) is not None:
            state.state2 = copy.copy(state.state2)
        for path, part in self.parts.items():
            owner = state if len(path) == 1 else getattr(state, path[0])
            setattr(owner, path[-1], part.build(data))
        made.__dict__.update(self.attributes, quant_state=state)
        tensor: torch.Tensor = made
        return tensor


Quantized = _Plain | _Flattened | _FourBits
"""What a quantized parameter is made of: ``str`` describes it, and ``build(data)`` makes it of its bytes."""


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether `parameter` keeps several tensors behind one name."""
    return _is_known(parameter) or type(parameter).__module__.startswith("bitsandbytes")


def _is_known(parameter: torch.Tensor) -> bool:
    """Whether it can be opened. 8 bits of bitsandbytes, and 4 bits that are not yet on a device, cannot."""
    if isinstance(parameter, DTensor):
        return False
    return hasattr(parameter, "__tensor_flatten__") or getattr(parameter, "quant_state", None) is not None


def hold_as_bytes(
    model: nn.Module, *, frozen: bool = False, empty: Callable[[int], torch.Tensor] | None = None
) -> None:
    """Replaces the frozen quantized parameters of `model`, at every place of each, by parameters of bytes.

    Args:
        model: gets other parameters and classes.
        frozen: whether all parameters count as frozen.
        empty: makes a tensor of so many bytes, for a copy that has no values; None to copy the values.
    """
    made: dict[int, tuple[nn.Parameter, Quantized]] = {}
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if _is_known(parameter) and (frozen or not parameter.requires_grad):
                if id(parameter) not in made:
                    made[id(parameter)] = _as_bytes(parameter, empty)
                data, spec = made[id(parameter)]
                set_parameter(module, name, data)
                specs = {**module.__dict__.get(_SPECS, {}), name: spec}
                module.__dict__[_SPECS] = specs
                kind: Any = _plain_class(type(module))
                module.__class__ = _class_with(kind, tuple(specs))


def quantized_parameters(model: nn.Module) -> dict[str, "Quantized"]:
    """What the quantized parameters that are held as bytes are made of, by their names in `model`."""
    return {
        join_names(path, name): spec
        for path, module in model.named_modules(remove_duplicate=False)
        for name, spec in module.__dict__.get(_SPECS, {}).items()
    }


def holds_quantized(module: nn.Module) -> bool:
    """Whether a parameter of `module` itself is held as bytes."""
    return _SPECS in module.__dict__


def refuse_export(names: Collection[str], call: str) -> None:
    """Refuses to write weights for other programs that are quantized.

    Args:
        names: of quantized parameters.
        call: what was called.

    Raises:
        ValueError: there are some.
    """
    if names:
        raise ValueError(
            f"{call} was called for a model of which {len(names)} weights are quantized, such as "
            f"{next(iter(names))!r}, and files of safetensors hold plain tensors: write the adapters alone "
            f"(engine.save_pretrained(adapters_only=True) for a model of peft), or torch.save what "
            f"engine.full_state_dict() returns on rank 0, which has the quantized tensors"
        )


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """`value` as it is held: the bytes of a quantized tensor, any other as it is."""
    return _as_bytes(value)[0].data if is_quantized(value) else value


def _as_bytes(
    tensor: torch.Tensor, empty: Callable[[int], torch.Tensor] | None = None
) -> tuple[nn.Parameter, Quantized]:
    parts: list[torch.Tensor] = []
    spec = _open(tensor, parts)
    if empty is not None:
        return nn.Parameter(empty(_end(parts)), requires_grad=False), spec
    pieces = []
    for part in parts:
        data = part.detach().contiguous().reshape(-1).view(torch.uint8)
        pieces += [data, data.new_zeros(-len(data) % _ALIGNMENT)]
    return nn.Parameter(torch.cat(pieces), requires_grad=False), spec


def _open(tensor: Any, parts: list[torch.Tensor]) -> Any:
    """What `tensor` is made of. Its plain tensors are added to `parts`."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _open(getattr(tensor, name), parts) for name in names}
        return _Flattened(type(tensor), inner, context, tensor.shape, tensor.stride())
    if getattr(tensor, "quant_state", None) is not None:
        state, opened = tensor.quant_state, {}
        data = _open(tensor.data.as_subclass(torch.Tensor), parts)
        for path, held in (((), state), (("state2",), getattr(state, "state2", None))):
            for name, value in vars(held).items() if held is not None else ():
                if isinstance(value, torch.Tensor):
                    opened[*path, name] = _open(value, parts)
        attributes = {name: value for name, value in vars(tensor).items() if name != "quant_state"}
        return _FourBits(type(tensor), data, attributes, state, opened)
    parts.append(tensor)
    return _Plain(_end(parts[:-1]), tensor.dtype, tensor.shape)


def _end(parts: list[torch.Tensor]) -> int:
    """Where the bytes of `parts`, each aligned, end."""
    return sum(math.ceil(part.nbytes / _ALIGNMENT) * _ALIGNMENT for part in parts)


class _HoldsBytes:
    """In the bases of the classes that :func:`_class_with` makes."""


@cache
def _class_with(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """`kind`, whose attributes `names` are quantized tensors made of this module's bytes."""
    attributes: dict[str, Any] = {name: property(partial(_built, name=name)) for name in names}
    attributes["__module__"] = kind.__module__
    attributes["__qualname__"] = kind.__qualname__
    return type(kind.__name__, (_HoldsBytes, kind), attributes)


def _plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` before :func:`_class_with`."""
    if _HoldsBytes not in kind.__bases__:
        return kind
    plain: type[nn.Module] = kind.__bases__[1]
    return plain


def _built(module: nn.Module, *, name: str) -> torch.Tensor | None:
    data: torch.Tensor | None = own_parameters(module).get(name)
    if data is None or isinstance(data, DTensor):  # another stage's; a shard, outside of forward
        return data
    if data.storage_offset() % _ALIGNMENT:
        data = data.clone()
    built: torch.Tensor = module.__dict__[_SPECS][name].build(data.detach())
    return built
