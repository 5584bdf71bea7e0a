"""What is split outside of the blocks: the vocabulary's embedding and the output layer."""

from collections.abc import Container, Mapping

from torch import nn

from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import CLASSES, COLWISE_GATHER, VOCAB
from tensorshard.tensor_parallel.verify.block_calls import Capture
from tensorshard.tensor_parallel.verify.outer_layers_check import OuterLayersCheck

UNREAD = "the run on the sample inputs did not use it; give inputs (sample_inputs) that do"
"""Why a layer stays whole that nothing is known about."""

# Tables that are much smaller than the largest (positions, segments) are not worth their communication.
_WORTHWHILE_SHARE = 0.5


def split_outer_layers(
    model: nn.Module,
    units: list[str],
    size: int,
    capture: Capture,
    inner: Mapping[str, Style],
    ends: Container[str],
    check: OuterLayersCheck,
) -> tuple[dict[str, Style], dict[str, str]]:
    """Styles of embeddings and output layers outside of `units`, and why others stay whole.

    Splitting an embedding's rows, a head's classes, or a linear layer whose output is gathered, is right wherever the
    layer is called as a module. Only layers with their own forward are checked by numbers.

    Args:
        capture: what a run of the model showed of its parameters.
        inner: styles found so far, which are kept.
        ends: for a model without blocks, the linear layers whose output no other layer takes. Only these and the
            model's embeddings count as outside of what the search could split.
        check: compares layers that have their own forwards.
    """
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    layers = {
        name: module
        for name, module in model.named_modules()
        if (described := as_splittable(module)) is not None
        and described.kind != "convolution"
        and name not in inner
        and not any(name.startswith(f"{unit}.") for unit in units)
    }
    if units == [""]:
        layers = {n: m for n, m in layers.items() if (s := as_splittable(m)) and (s.kind != "linear" or n in ends)}
    tables = [m.weight.numel() for m in layers.values() if isinstance(m, nn.Embedding)]
    embedded = {id(m.weight) for m in layers.values() if isinstance(m, nn.Embedding)}
    for name, module in layers.items():
        layer = as_splittable(module)
        assert layer is not None
        weight = module.weight
        if layer.kind == "head":
            worthwhile, reason = True, ""
        elif layer.kind == "embedding":
            worthwhile, reason = weight.numel() >= _WORTHWHILE_SHARE * max(tables), "a small table"  # type: ignore[operator]
        else:
            worthwhile = id(weight) in embedded or layer.outputs > layer.inputs
            reason = "outside of the blocks, and not an output layer larger than its input"
        rows = layer.inputs if layer.kind == "embedding" else layer.outputs
        if layer.kind != "head" and not any(names[id(p)] in capture.read for p in module.parameters()):
            whole[name] = UNREAD
        elif any(names[id(p)] in capture.used_outside for p in module.parameters()):
            whole[name] = "its parameters are read by other code than its own forward"
        elif not worthwhile:
            whole[name] = reason
        elif (size - 1) * -(-rows // size) >= rows:
            whole[name] = f"{rows} rows cannot be split over {size} ranks"
        else:
            style = {"embedding": VOCAB, "head": CLASSES}.get(layer.kind, COLWISE_GATHER)
            refusal = check.refusal(name, style)
            if refusal is None:
                styles[name] = style
            else:
                whole[name] = refusal
    return styles, whole
