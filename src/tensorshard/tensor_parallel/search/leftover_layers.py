"""Layers that are in no pair of column and row: each is split alone, and its output is gathered.

A pair of column and row communicates once and keeps what is between the two split. Some layers have no partner: the
third convolution of a bottleneck, a shortcut, the layers of an attention that cannot be split by its heads. The output
features or channels of such a layer can still be computed on as many ranks. This is right wherever the layer is called
as a module.
"""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.tensor_parallel.search.outer_layers import UNREAD
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import COLWISE_GATHER
from tensorshard.tensor_parallel.table.table import starred
from tensorshard.tensor_parallel.verify.block_calls import Capture
from tensorshard.tensor_parallel.verify.outer_layers_check import OuterLayersCheck

# Layers with a smaller share of the model's weights are not worth their communication: the first convolutions of a
# network have few weights and large outputs. Linear layers that are alike in a list of blocks count together.
_WORTHWHILE_SHARE = 0.01


def split_leftovers(
    model: nn.Module,
    size: int,
    capture: Capture,
    found: Mapping[str, Style],
    check: OuterLayersCheck,
) -> tuple[dict[str, Style], dict[str, str]]:
    """Styles of convolutions and linear layers that have none, and why others stay whole.

    Args:
        capture: what a run of the model showed of its parameters.
        found: the styles so far.
        check: compares layers that have their own forwards.
    """
    total = sum(p.numel() for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    layers = {
        name: layer
        for name, module in model.named_modules()
        if (layer := as_splittable(module)) is not None and name not in found and layer.has_rows
    }
    alike: Counter[str] = Counter()
    for name in layers:
        alike[starred(name)] += _weight(model, name).numel()
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        elements = _weight(model, name).numel() if layer.kind == "convolution" else alike[starred(name)]
        if not any(names[id(p)] in capture.read for p in module.parameters()):
            whole[name] = UNREAD
        elif any(names[id(p)] in capture.used_outside for p in module.parameters()):
            whole[name] = "its parameters are read by other code than its own forward"
        elif elements < _WORTHWHILE_SHARE * total:
            whole[name] = "too few weights to be worth gathering its output"
        elif 0 in shard_sizes(layer.outputs, size):
            whole[name] = f"{layer.outputs} outputs cannot be split over {size} ranks"
        elif (refusal := check.refusal(name, COLWISE_GATHER)) is not None:
            whole[name] = refusal
        else:
            styles[name] = COLWISE_GATHER
    return styles, whole


def _weight(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_submodule(name).weight  # type: ignore[return-value]
