"""Mixtures of experts whose weights are stacked into parameters [experts, ...]: how their MLPs could be split."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tensorshard.tensor_plans.styles import SUM, Style

_MOST_TRIES = 64


def find_experts(block: nn.Module) -> dict[str, nn.Module]:
    """The modules in `block` that hold stacked experts: two or more parameters of their own, [experts, a, b] each."""
    found = {}
    for name, module in block.named_modules():
        shapes = [p.shape for p in module._parameters.values() if p is not None]
        stacked = [shape for shape in shapes if len(shape) == 3]
        counts = {shape[0] for shape in stacked}
        if len(stacked) > 1 and len(counts) == 1 and counts != {1} and len(list(module.parameters())) == len(shapes):
            found[name] = module
    return found


def expert_styles(name: str, module: nn.Module) -> Iterator[dict[str, Style]]:
    """Ways to split the experts of `module`, by names that begin with its own: every expert's hidden features are cut.

    The way into these features (gate and up, perhaps packed) is cut along the same number as the way out of them.
    """
    own = {key: p.shape for key, p in module._parameters.items() if p is not None}
    stacked = [shape for shape in own.values() if len(shape) == 3]
    widths = sorted({size for shape in stacked for size in shape[1:]}, reverse=True)
    tries = 0
    for width in widths:
        options = [list(_cuts(shape, width)) for shape in own.values()]
        for styles in product(*options):
            cut = [style for style in styles if style is not None]
            if len(cut) >= len(stacked):
                tries += 1
                if tries > _MOST_TRIES:
                    return
                named = zip(own, styles, strict=True)
                yield {name: SUM, **{f"{name}.{key}" if name else key: s for key, s in named if s is not None}}


def _cuts(shape: torch.Size, width: int) -> Iterator[Style | None]:
    for dim, size in list(enumerate(shape))[1:]:
        if size == width:
            yield Style("slice", (dim,))
        elif size == 2 * width:
            yield Style("slice", (dim, 2))
            yield Style("slice", (dim,))
    if len(shape) < 3:
        yield None


def stand_in(model: nn.Module) -> None:
    """Lets `model` run on fake tensors: which experts its tokens go to depends on values, which these do not have.

    Experts that are given indices then return something of the shape and type of their first input, made of all that
    they were given.
    """
    for module in find_experts(model).values():
        module.forward = partial(_pretended, module, module.forward)  # type: ignore[method-assign]


def _pretended(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if all(tensor.is_floating_point() for tensor in tensors):
        return forward(*args, **kwargs)
    first, *others = [tensor for tensor in tensors if tensor.is_floating_point()]
    return sum((t.sum().to(first.dtype) for t in (*others, *module._parameters.values()) if t is not None), start=first)
