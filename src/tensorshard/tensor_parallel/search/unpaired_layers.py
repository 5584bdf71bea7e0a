"""What is split outside of pairs of column and row, in the order in which the search takes it.

- Embeddings and output layers outside of the blocks.
- Layers in no pair: each is split alone, and its output is gathered. A pair communicates once and keeps what is between
  the two split. Some layers have no partner: the third convolution of a bottleneck, a shortcut, the layers of an
  attention that cannot be split by its heads. Their output features can still be computed on as many ranks.
- Parameters that nothing else splits: each rank keeps a slice, and they are gathered when their module is called. This
  splits memory (of the parameters, their gradients and the optimizer's states), but no computation, so it comes last.

The first two are right wherever the layer is called as a module. Only layers with their own forward are checked by
numbers.
"""

from collections import Counter
from collections.abc import Container, Mapping

from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.tensor_parallel.table.layer_kinds import SplittableLayer, as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import CLASSES, COLWISE_GATHER, VOCAB, Divide, Gather
from tensorshard.tensor_parallel.table.table import starred
from tensorshard.tensor_parallel.verify.block_calls import Capture
from tensorshard.tensor_parallel.verify.model_check import OuterLayersCheck
from tensorshard.torch_private.modules import own_parameters

# Tables that are much smaller than the largest (positions, segments) are not worth their communication.
_SHARE_OF_LARGEST = 0.5
# Nor are layers and parameters with a smaller share of the model's: the first convolutions of a network have few
# weights and large outputs. Equal ones in a list of blocks count together, except for convolutions.
_WORTHWHILE_SHARE = 0.01

Found = tuple[dict[str, Style], dict[str, str]]
"""The styles of layers by name, and why others stay whole."""


def split_outer_layers(
    model: nn.Module,
    units: list[str],
    size: int,
    capture: Capture,
    inner: Mapping[str, Style],
    ends: Container[str],
    check: OuterLayersCheck,
) -> Found:
    """Splits embeddings, output layers and heads outside of `units`.

    Args:
        capture: what a run of the model showed of its parameters.
        inner: styles found so far, which are kept.
        ends: for a model without blocks, the linear layers whose output no other layer takes. Only these and the
            model's embeddings count as outside of what the search could split.
        check: compares layers that have their own forwards.
    """
    layers = {
        name: (module, layer)
        for name, module in model.named_modules()
        if (layer := as_splittable(module)) is not None
        and layer.kind != "convolution"
        and name not in inner
        and not any(name.startswith(f"{unit}.") for unit in units)
        and (units != [""] or layer.kind != "linear" or name in ends)
    }
    embeddings = [module.weight for module, _ in layers.values() if isinstance(module, nn.Embedding)]
    largest = max((weight.numel() for weight in embeddings), default=0)

    def worthless(module: nn.Module, layer: SplittableLayer) -> str | None:
        weight = own_parameters(module)["weight"] if layer.kind != "head" else None
        if layer.kind == "embedding" and weight is not None and weight.numel() < _SHARE_OF_LARGEST * largest:
            return "a small table"
        if layer.kind == "linear" and layer.outputs <= layer.inputs and not any(weight is w for w in embeddings):
            return "outside of the blocks, and not an output layer larger than its input"
        rows = layer.inputs if layer.kind == "embedding" else layer.outputs
        return f"{rows} rows cannot be split over {size} ranks" if 0 in shard_sizes(rows, size) else None

    names = {id(p): name for name, p in model.named_parameters()}
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    for name, (module, layer) in layers.items():
        style = {"embedding": VOCAB, "head": CLASSES}.get(layer.kind, COLWISE_GATHER)
        reason = _unusable(module, layer, names, capture) or worthless(module, layer) or check.refusal(name, style)
        if reason is None:
            styles[name] = style
        else:
            whole[name] = reason
    return styles, whole


def split_unpaired_layers(
    model: nn.Module, size: int, capture: Capture, taken: Mapping[str, Style], check: OuterLayersCheck
) -> Found:
    """Splits convolutions and linear layers that have no style among `taken`, those so far.

    Args:
        capture: what a run of the model showed of its parameters.
        check: compares layers that have their own forwards.
    """
    least = _WORTHWHILE_SHARE * sum(p.numel() for p in model.parameters())
    layers = {
        name: (module, layer)
        for name, module in model.named_modules()
        if name not in taken and (layer := as_splittable(module)) is not None and layer.has_rows
    }
    elements = {name: own_parameters(module)["weight"].numel() for name, (module, _) in layers.items()}
    in_lists: Counter[str] = Counter()
    for name, number in elements.items():
        in_lists[starred(name)] += number

    def worthless(name: str, layer: SplittableLayer) -> str | None:
        if (elements[name] if layer.kind == "convolution" else in_lists[starred(name)]) < least:
            return "too few weights to be worth gathering its output"
        outputs = layer.outputs
        return f"{outputs} outputs cannot be split over {size} ranks" if 0 in shard_sizes(outputs, size) else None

    names = {id(p): name for name, p in model.named_parameters()}
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    for name, (module, layer) in layers.items():
        reason = (
            _unusable(module, layer, names, capture) or worthless(name, layer) or check.refusal(name, COLWISE_GATHER)
        )
        if reason is None:
            styles[name] = COLWISE_GATHER
        else:
            whole[name] = reason
    return styles, whole


def _unusable(module: nn.Module, layer: SplittableLayer, names: Mapping[int, str], capture: Capture) -> str | None:
    """Why the run of the model forbids to split a layer; None if it does not. `names`: of parameters, by their ids."""
    own = {names[id(p)] for p in module.parameters()}
    if not own & capture.read and layer.kind != "head":
        return "the run on the sample inputs did not use it; give inputs (sample_inputs) that do"
    return "its parameters are read by other code than its own forward" if own & capture.used_outside else None


def gather_parameters(model: nn.Module, size: int, capture: Capture, taken: Mapping[str, Style]) -> dict[str, Style]:
    """Styles of the parameters of `model` that are still whole, and that each rank can keep a slice of.

    This is right if only the module that holds a parameter reads it, in its forward: a recurrent layer, a table of
    positions, or any other code. It is also right if one module around it does (attention that multiplies by its
    layers' weights itself: Swin, BEiT).

    Args:
        capture: what a run of the model showed: its ``readers`` say which modules read the parameters of others.
        taken: the styles so far.
    """
    readers, parameters = capture.readers, dict(model.named_parameters())
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    least = _WORTHWHILE_SHARE * sum(p.numel() for p in parameters.values())
    in_lists: Counter[str] = Counter()
    for name, parameter in parameters.items():
        in_lists[starred(name)] += parameter.numel()
    styles: dict[str, Style] = {}
    for name, parameter in parameters.items():
        owner = name.rpartition(".")[0]
        layer = as_splittable(model.get_submodule(owner))
        if name not in capture.read or name in taken or (owner in taken and not isinstance(taken[owner], Divide)):
            continue
        reader = readers.get(name, owner)
        called_as_layer = name not in readers and layer is not None and not layer.own_forward
        if names[id(parameter)] > 1 or (name in readers and not reader) or called_as_layer:
            continue
        if parameter.ndim < 2 or in_lists[starred(name)] < least:
            continue
        dim = max(range(parameter.ndim), key=lambda dim, shape=parameter.shape: shape[dim])  # type: ignore[misc]
        if 0 not in shard_sizes(parameter.shape[dim], size):
            styles[name] = Gather(dim, owner.count(".") - reader.count("."))
    return styles
