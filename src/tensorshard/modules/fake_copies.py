"""Copies of modules that share nothing with the original, on fake or real tensors, without its weights."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from tensorshard.modules.forwards import deepcopy_module
from tensorshard.torch_private.pytree import tree_leaves

_Module = TypeVar("_Module", bound=nn.Module)


def copy_with(module: _Module, tensor_for: Callable[[str, torch.Tensor], torch.Tensor]) -> _Module:
    """A deep copy of `module` in which ``tensor_for(name, tensor)`` stands for each parameter and buffer.

    Ties are kept: a tensor with several names is asked for once, by the first.
    """
    memo: dict[int, torch.Tensor] = {}
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            value = tensor_for(name, tensor)
            memo[id(tensor)] = (
                nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
    return deepcopy_module(module, memo | computed_attributes(module))


def computed_attributes(module: nn.Module) -> dict[int, torch.Tensor]:
    """What :func:`copy.deepcopy` has to put for tensors with a graph, which it refuses, by their ``id``.

    Modules keep some as plain attributes: the weight that the older weight_norm computes, or what a hook kept.
    """
    kept = (leaf for inner in module.modules() for value in vars(inner).values() for leaf in tree_leaves(value))
    return {id(leaf): leaf.detach() for leaf in kept if isinstance(leaf, torch.Tensor) and not leaf.is_leaf}


def keep_padding(model: nn.Module) -> None:
    """Keeps torch's encoders from leaving out padding when they evaluate: nested tensors are neither faked nor sent."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def blank(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor like `tensor`, on the CPU; a fake one under a ``FakeTensorMode``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def mixed_mask(shape: Sequence[int]) -> torch.Tensor:
    """A mask that leaves something of each row to attend to, whether True means to attend or to ignore."""
    return sum(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), start=torch.zeros(())) % 2 == 0


def random_values(generator: torch.Generator) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Values under which a wrong split shows: of the size of trained weights, with biases, and norms not all
    1.

    Buffers keep their values where they have any. Floating-point types become fp32, in which a comparison
    means most.
    """

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            return tensor.detach().to("cpu", dtype, copy=True)
        if not tensor.is_floating_point():
            if dtype == torch.bool and tensor.ndim > 1:
                return mixed_mask(tensor.shape)
            return torch.ones(tensor.shape, dtype=dtype)  # nothing masked, the first of what is counted
        noise = torch.randn(tensor.shape, generator=generator)
        if not isinstance(tensor, nn.Parameter) and tensor.ndim < 2:
            return noise.abs_().add_(0.5)  # a variance, a frequency, a count
        if tensor.ndim < 2:
            return noise.mul_(0.3).add_(1.0 if name.endswith("weight") else 0.0)
        # Somewhat above the usual scale, so that attention is far from uniform.
        return noise.mul_(1.5 / min(tensor.shape[-2:]) ** 0.5)

    return value
