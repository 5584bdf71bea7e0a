"""Parameters and buffers in the memory of others, which stay there only as long as nothing is laid out."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorshard.torch_private.tensors import storage_address


def check_own_memory(module: nn.Module) -> None:
    """Refuses parameters and buffers in the memory of a trained parameter: laid out, they would not follow its updates.

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
