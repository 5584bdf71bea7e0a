"""Recognizes layers of unusual form: transposed linear layers, and experts stacked into parameters [experts, ...]."""

from functools import partial
from typing import Any

from torch import nn

from tensorshard.model.forwards import Forward, Role, has_users_forward, wrap_forward
from tensorshard.model.tensors import tensor_leaves
from tensorshard.torch_private.modules import own_parameters


def find_experts(block: nn.Module) -> dict[str, nn.Module]:
    """The modules in `block` that hold stacked experts: two or more parameters of their own, [experts, a, b] each."""
    experts = {}
    for name, module in block.named_modules():
        shapes = [p.shape for p in own_parameters(module).values()]
        stacked = [shape for shape in shapes if len(shape) == 3]
        counts = {shape[0] for shape in stacked}
        if len(stacked) > 1 and len(counts) == 1 and counts != {1} and len(list(module.parameters())) == len(shapes):
            experts[name] = module
    return experts


def use_placeholder_outputs(model: nn.Module) -> None:
    """Lets `model` run on fake tensors. These have no values, so nothing says which experts the tokens go to.

    Experts that are given indices return a placeholder of the shape and type of their first input, made of all their
    inputs.
    """
    for module in find_experts(model).values():
        wrap_forward(module, Role.FAKE_EXPERTS, partial(_placeholder_output, module))


def _placeholder_output(module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    tensors = tensor_leaves((args, kwargs))
    if all(tensor.is_floating_point() for tensor in tensors):
        return forward(*args, **kwargs)
    first, *others = [tensor for tensor in tensors if tensor.is_floating_point()]
    return sum(
        (t.sum().to(first.dtype) for t in (*others, *own_parameters(module).values()) if t is not None), start=first
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether `module` computes as the ``Conv1D`` of transformers: a linear layer whose weight is [inputs, outputs]."""
    forward = type(module).forward
    home, name = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
    return name == "Conv1D.forward" and home.startswith("transformers.") and not has_users_forward(module)
