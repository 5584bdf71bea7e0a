"""Parameters that nothing else splits: each rank keeps a slice, and they are gathered when their module is called.

This is right if only the module that holds a parameter reads it, in its forward: a recurrent layer, a table of
positions, or any other code. It is also right if one module around it does (attention that multiplies by its layers'
weights itself: Swin, BEiT). It splits memory (of the parameters, their gradients and the optimizer's states), but no
computation. So it comes last.
"""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import Divide, Gather
from tensorshard.tensor_parallel.table.table import starred
from tensorshard.tensor_parallel.verify.block_calls import Capture

# Parameters with a smaller share of the model's are not worth a message. Parameters that are alike in a list of blocks
# count together.
_WORTHWHILE_SHARE = 0.01


def keep_in_slices(model: nn.Module, size: int, capture: Capture, found: Mapping[str, Style]) -> dict[str, Style]:
    """Styles of the parameters of `model` that are still whole and can be kept in slices.

    Args:
        capture: what a run of the model showed: its ``readers`` say which modules read the parameters of others.
        found: the styles so far.
    """
    readers, parameters = capture.readers, dict(model.named_parameters())
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    total = sum(p.numel() for p in parameters.values())
    alike: Counter[str] = Counter()
    for name, parameter in parameters.items():
        alike[starred(name)] += parameter.numel()
    styles: dict[str, Style] = {}
    for name, parameter in parameters.items():
        owner = name.rpartition(".")[0]
        layer = as_splittable(model.get_submodule(owner))
        if name not in capture.read or name in found or (owner in found and not isinstance(found[owner], Divide)):
            continue
        reader = readers.get(name, owner)
        called_as_layer = name not in readers and layer is not None and not layer.own_forward
        if names[id(parameter)] > 1 or (name in readers and not reader) or called_as_layer:
            continue
        if parameter.ndim < 2 or alike[starred(name)] < _WORTHWHILE_SHARE * total:
            continue
        dim = max(range(parameter.ndim), key=lambda dim, shape=parameter.shape: shape[dim])  # type: ignore[misc]
        if 0 not in shard_sizes(parameter.shape[dim], size):
            styles[name] = Gather(dim, owner.count(".") - reader.count("."))
    return styles
