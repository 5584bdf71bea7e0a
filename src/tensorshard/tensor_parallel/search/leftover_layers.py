"""What is left of a convolutional network when its layers were paired: split alone, each output being gathered.

A pair of column and row communicates once and keeps what is between the two split. Some layers have no partner: the
third convolution of a bottleneck, a shortcut, one after a concatenation. Such a layer still can compute its output
channels on as many ranks, which is right wherever it is called as a module.
"""

from collections.abc import Container, Mapping

from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_convolution
from tensorshard.tensor_parallel.table.styles import COLWISE_GATHER, Style

# Layers with a smaller share of the model's weights are not worth their communication: the first convolutions of a
# network have few weights and large outputs.
_WORTHWHILE_SHARE = 0.01


def split_leftovers(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    size: int,
    used_outside: Container[str],
    found: Mapping[str, Style],
) -> tuple[dict[str, Style], dict[str, str]]:
    """Styles of the layers of a convolutional network that have none, and why others stay whole.

    These are its convolutions, and the linear layers in `units` that have convolutions.

    Args:
        used_outside: parameters that something reads past their modules' forwards.
        found: the styles so far.
    """
    convolutional = tuple(f"{name}." if name else "" for name, unit in units.items() if _is_convolutional(unit))
    total = sum(p.numel() for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    for name, module in model.named_modules():
        layer = as_splittable(module)
        if layer is None or name in found:
            continue
        if layer.kind != "convolution" and not (layer.kind == "linear" and name.startswith(convolutional)):
            continue
        if any(names[id(p)] in used_outside for p in module.parameters()):
            whole[name] = "its parameters are read by other code than its own forward"
        elif module.weight.numel() < _WORTHWHILE_SHARE * total:  # type: ignore[operator, union-attr]
            whole[name] = "too few weights to be worth gathering its output"
        elif 0 in shard_sizes(layer.outputs, size):
            whole[name] = f"{layer.outputs} outputs cannot be split over {size} ranks"
        else:
            styles[name] = COLWISE_GATHER
    return styles, whole


def _is_convolutional(unit: nn.Module) -> bool:
    """Whether it has a convolution over several dimensions, or one that mixes channels (not the filter of a Mamba)."""
    return any(is_convolution(m) and (m.weight.ndim > 3 or m.groups == 1) for m in unit.modules())  # type: ignore[operator, union-attr]
