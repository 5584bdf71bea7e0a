"""Mixtures of experts with weights stacked into parameters [experts, ...]: ways to split their MLPs."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import nn

from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import DIVIDED, SUM, SUM_GRADIENTS, Slice
from tensorshard.torch_private.modules import own_parameters

_MOST_TRIES = 64


def expert_styles(name: str, module: nn.Module) -> Iterator[dict[str, Style]]:
    """Ways to split the experts of `module`, by names that begin with its own. Every expert's hidden features are cut.

    The weights before these features (gate and up, perhaps packed) are cut to the same number as the weight after them.
    """
    own = {key: p.shape for key, p in own_parameters(module).items()}
    stacked = [shape for shape in own.values() if len(shape) == 3]
    widths = sorted({size for shape in stacked for size in shape[1:]}, reverse=True)
    tries = 0
    for width in widths:
        options = [list(_cuts(shape, width)) for shape in own.values()]
        for styles in product(*options):
            cut = [style for style in styles if isinstance(style, Slice)]
            if len(cut) >= len(stacked):
                tries += 1
                if tries > _MOST_TRIES:
                    return
                named = zip(own, styles, strict=True)
                yield {name: SUM, **{f"{name}.{key}" if name else key: style for key, style in named}}


def _cuts(shape: torch.Size, width: int) -> Iterator[Style]:
    """Ways to lay out one parameter. The bias of the last layer is added to each rank's part of the sum."""
    for dim, size in list(enumerate(shape))[1:]:
        if size == width:
            yield Slice(dim)
        elif size == 2 * width:
            yield Slice(dim, 2)
            yield Slice(dim)
    if len(shape) < 3:
        yield DIVIDED
        yield SUM_GRADIENTS
