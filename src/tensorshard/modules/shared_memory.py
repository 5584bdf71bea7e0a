"""Tensors in the memory of others, which stay there only as long as nothing is laid out."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorshard.torch_private.modules import TABLES
from tensorshard.torch_private.pytree import tree_leaves
from tensorshard.torch_private.tensors import storage_address


def check_own_memory(module: nn.Module, *, attributes: bool) -> None:
    """Refuses other tensors in the memory of a trained parameter: once laid out, they would not follow its updates.

    Args:
        attributes: whether to look at tensors in plain attributes; else at parameters and buffers.

    Raises:
        ValueError: there is one.
    """
    trained: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not is_lazy(parameter) and parameter.numel():
            trained.setdefault(storage_address(parameter.untyped_storage()), []).append((name, parameter))
    for name, what, tensor in _attributes(module) if attributes else _registered(module):
        if is_lazy(tensor) or not tensor.numel() or tensor.layout != torch.strided:
            continue
        for first, parameter in trained.get(storage_address(tensor.untyped_storage()), ()):
            if tensor is not parameter and _overlap(tensor, parameter):
                raise ValueError(
                    f"{what} {name!r} shares the memory of the parameter {first!r}, which gets memory of its own when "
                    f"it is laid out, so that {name!r} would not follow its updates. Read the parameter in forward "
                    f"instead"
                    + ("; to tie two parameters, register the same nn.Parameter twice" if what == "parameter" else "")
                )


def _registered(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, "parameter", parameter
    for name, buffer in module.named_buffers():
        yield name, "buffer", buffer


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    registered = {id(parameter) for parameter in module.parameters()}
    for prefix, owner in module.named_modules():
        hooks = owner._forward_pre_hooks.values()
        computed = {
            getattr(hook, "name", None) for hook in hooks
        }  # by older weight and spectral norms, before each call
        for key, value in vars(owner).items():
            if key in TABLES or key in computed or not isinstance(value, (torch.Tensor, list, tuple, dict)):
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in registered:
                    yield (f"{prefix}.{key}" if prefix else key), "attribute", leaf


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage may have elements in common."""
    (begin, end), (first, last) = _span(one), _span(other)
    return begin < last and first < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length: int = sum((int(size) - 1) * int(stride) for size, stride in pairs) + 1
    return begin, begin + length * tensor.itemsize
