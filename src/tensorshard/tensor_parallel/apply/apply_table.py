"""Tensor parallelism: a table's styles applied to a model (Shoeybi et al. 2019).

Only forwards and attributes of the instances change. Names, classes and hooks stay as they are, and so do the names in
checkpoints. The caller replaces each parameter by what :func:`local_shard` makes of it, as a plain tensor or a DTensor.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.groups import Group, resolve_group
from tensorshard.layers.split_embedding import parallel_embedding
from tensorshard.layers.split_linear import parallel_linear
from tensorshard.model.blocks import find_blocks
from tensorshard.model.forwards import Forward, Role, replace_forward, wrap_forward
from tensorshard.model.special_layers import is_transposed
from tensorshard.model.trains_itself import TrainsItself
from tensorshard.tensor_parallel.apply.called_rows import guard_rows
from tensorshard.tensor_parallel.apply.convolutions import gather_columns, split_channels, split_columns, split_rows
from tensorshard.tensor_parallel.apply.divide import check_divides, divide
from tensorshard.tensor_parallel.apply.gathered_parameters import gather_parameters
from tensorshard.tensor_parallel.apply.multihead_attention import attention_layouts, keep_layers_called, split_attention
from tensorshard.tensor_parallel.apply.own_lookups import split_own_lookups
from tensorshard.tensor_parallel.apply.shared_columns import SharedColumns
from tensorshard.tensor_parallel.apply.shared_heads import check_shared_heads, share_heads
from tensorshard.tensor_parallel.apply.split_outputs import SplitOutputs
from tensorshard.tensor_parallel.apply.summed import copy_into, forward_summing, gather_into, sum_parts
from tensorshard.tensor_parallel.table.channelwise import channel_layouts
from tensorshard.tensor_parallel.table.layer_kinds import SplittableLayer, as_splittable
from tensorshard.tensor_parallel.table.layouts import REPLICATED, Layout, check_can_split
from tensorshard.tensor_parallel.table.styles import COLUMN_KINDS, COLWISE_GATHER, DIVIDED, Style
from tensorshard.tensor_parallel.table.table import TensorPlan
from tensorshard.torch_private.modules import own_buffers, own_parameters

# The kind of layer that each style is for. Styles that are not listed are for linear layers and convolutions.
_LAYER_KINDS = {"vocab": "embedding", "classes": "head"}
_CLASS_NAMES = {
    "linear": "an nn.Linear, or an unmodified nn.Conv1d, 2d or 3d, or nn.ConvTranspose1d, 2d or 3d of one group",
    "embedding": "an nn.Embedding",
    "head": "a ParallelLinearCrossEntropy",
}


def apply_tensor_parallel(
    model: nn.Module,
    plan: TensorPlan,
    group: Group,
    *,
    shared_inputs: Iterable[Sequence[str]] = (),
    outputs: SplitOutputs | None = None,
    whole: nn.Module | None = None,
    elsewhere: Container[str] = (),
) -> dict[str, Layout]:
    """Makes `model` compute its part of what `plan` splits.

    Args:
        model: on any device, the meta device included. Its parameters are still whole; the caller replaces
            them.
        plan: the table.
        group: the tensor-parallel ranks.
        shared_inputs: names of column layers that are called with the same tensor, in the order of their calls, as
            :attr:`VerifiedTable.shared_inputs` has them. They communicate once for all.
        outputs: tells the output layers (``colwise_gather``) whether to gather; None to gather always.
        whole: the full model, if `model` is a stage of a pipeline. Names are matched and layouts found in it.
        elsewhere: names of what other stages compute. It is left as it is.

    Returns:
        The layout of every parameter, by each of its names, and of the buffers that are split.

    Raises:
        ValueError: an entry that matches nothing; a style that does not suit what it names; sizes or
            attributes that cannot be split; tied parameters that would be laid out differently. Nothing is
            changed then.
    """
    process_group = resolve_group(group)
    outputs = outputs or SplitOutputs()
    styles = plan.resolve(whole or model)
    layouts = find_layouts(whole or model, styles, process_group.size())
    styles = {name: style for name, style in styles.items() if name not in elsewhere}
    keep_layers_called(model, {name for name, layout in layouts.items() if layout.dim is not None})
    blocks = tuple(f"{name}." for name in find_blocks(whole or model)) if COLWISE_GATHER in styles.values() else ()
    gathered: dict[str, dict[str, int]] = {}  # by the module in whose forward they are read
    for name, module in model.named_modules():
        style = styles.get(name)
        if style is not None:  # layers inside of blocks always gather
            _apply(module, style, process_group, SplitOutputs() if name.startswith(blocks) else outputs)
        own = {key: s for key in own_parameters(module) if (s := styles.get(_join(name, key))) and s.sums_gradients}
        if own and not (style is not None and style.sums_gradients):
            divided = [key for key, own_style in own.items() if own_style == DIVIDED]
            around = partial(forward_summing, module, list(own), divided, process_group)
            wrap_forward(module, Role.SUMMED_GRADIENTS, around)
        for key in own_parameters(module):
            said = styles.get(_join(name, key), style)
            if said is not None and said.kind == "gather":
                reader = gathered_in(_join(name, key), said)
                gathered.setdefault(reader, {})[_join(name, key).removeprefix(f"{reader}.")] = said.sizes[0]
    for reader, dims in gathered.items():
        gather_parameters(model.get_submodule(reader), dims, process_group)
    guard_rows(model, styles)
    for names in shared_inputs:
        layers = [
            model.get_submodule(name) for name in names if (style := styles.get(name)) and style.kind in COLUMN_KINDS
        ]
        shared = SharedColumns(layers, process_group)
        for index, layer in enumerate(layers):
            replace_forward(layer, Role.SHARED_INPUT, partial(shared.forward, index))
    return layouts


def gathered_in(parameter: str, style: Style) -> str:
    """The name of the module in whose forward a parameter of the style ``gather`` is gathered.

    Raises:
        ValueError: there is no such module.
    """
    further_out = style.sizes[1] if len(style.sizes) > 1 else 0
    path = parameter.split(".")[:-1]
    if further_out > len(path):
        raise ValueError(f"{parameter} has {len(path)} modules around it, and {style} asks for one further out")
    return ".".join(path[: len(path) - further_out])


def find_layouts(model: nn.Module, styles: Mapping[str, Style], size: int) -> dict[str, Layout]:
    """The layout on `size` ranks of every parameter of `model`, by each of its names, and of buffers that are split.

    Changes nothing.

    Args:
        styles: as :meth:`TensorPlan.resolve` gives them.

    Raises:
        ValueError: as :func:`apply_tensor_parallel`.
    """
    layouts: dict[str, Layout] = {}
    chosen: dict[int, tuple[str, Layout]] = {}
    unsaid: list[tuple[str, torch.Tensor]] = []
    table_name: dict[nn.Module, str] = {}  # the table names a module once, even if it is registered at several places
    for prefix, module in model.named_modules(remove_duplicate=False):
        said = table_name.setdefault(module, prefix)
        own = _module_layouts(said, module, styles.get(said), size)
        for key, parameter in own_parameters(module).items():
            name = _join(prefix, key)
            layout = own.get(key, REPLICATED)
            if (style := styles.get(_join(said, key))) is not None:
                layout = _parameter_layout(name, parameter, style)
            elif said not in styles and as_splittable(module) is None:
                unsaid.append((name, parameter))  # if it is tied to another, that one decides the layout
                continue
            check_can_split(layout, size, name)
            first, other = chosen.setdefault(id(parameter), (name, layout))
            if other != layout:
                raise ValueError(
                    f"{first} and {name} are one tied parameter, and the table splits only one of them or splits them "
                    f"differently: give 'vocab' to an embedding and 'colwise_gather' to the layer tied to it"
                )
            layouts[name] = layout
        for key in own_buffers(module).keys() & own.keys():
            check_can_split(own[key], size, _join(prefix, key))
            layouts[_join(prefix, key)] = own[key]
    layouts.update({name: chosen.get(id(parameter), (name, REPLICATED))[1] for name, parameter in unsaid})
    return layouts


def _module_layouts(name: str, module: nn.Module, style: Style | None, size: int) -> dict[str, Layout]:
    """Layouts of a module's own parameters and buffers, where they are not whole."""
    if style is None or style.kind in ("replicate", "sum"):
        return {}
    if style.kind == "divide":
        for attribute in style.names:
            check_divides(name, module, attribute, size)
        return {}
    if style.kind == "heads":
        return attention_layouts(name, module, size)
    if style.kind in ("slice", "gather"):
        return {key: _parameter_layout(_join(name, key), p, style) for key, p in own_parameters(module).items()}
    if style.kind == "channels":
        return channel_layouts(name, module, size, style.parts)
    layer = as_splittable(module)
    wanted = _LAYER_KINDS.get(style.kind, "linear")
    suits = layer is not None and (
        layer.kind == wanted
        or (wanted == "linear" and layer.has_rows)
        or (style.kind in COLUMN_KINDS and layer.kind != "head")
    )
    if layer is None or not suits:
        raise ValueError(
            f"{name} is a {type(module).__name__}, which cannot be {style.kind!r}: that is for "
            f"{_CLASS_NAMES[wanted]}{'; it can be classes' if layer is not None and layer.kind == 'head' else ''}"
        )
    if style.sums_output_gradients and (layer.kind != "linear" or layer.own_forward):
        raise ValueError(
            f"{name} is a {type(module).__name__}, which cannot be {str(style)!r}: that is for an nn.Linear"
        )
    if style.kind == "vocab":
        return {"weight": Layout(layer.input_dim, (layer.inputs,))}
    if style.kind == "rowwise":
        return {"weight": Layout(layer.input_dim, (layer.inputs,))}
    parts = _packed_parts(name, layer, style) if style.sizes else (layer.outputs,)
    if style.kind == "colwise_shared":
        check_shared_heads(name, style.sizes[0], parts[-2:], size)
    return {"weight": Layout(layer.output_dim, parts), "bias": Layout(0, parts)}


def _packed_parts(name: str, layer: SplittableLayer, style: Style) -> tuple[int, ...]:
    if style.kind == "colwise_shared":
        return _fused_parts(name, layer, style)
    if len(style.sizes) == 1:
        (count,) = style.sizes
        if layer.outputs % count:
            raise ValueError(
                f"{name} has {layer.outputs} output features, which are not {count} equal parts; give "
                f"the parts' sizes, as in packed_colwise(64, 32, 32)"
            )
        return (layer.outputs // count,) * count
    return _adding_up(name, layer, style, style.sizes)


def _fused_parts(name: str, layer: SplittableLayer, style: Style) -> tuple[int, ...]:
    """The parts of a layer whose heads are shared: itself, or queries, keys and values."""
    if layer.kind != "linear":
        kind = "an embedding" if layer.kind == "embedding" else f"a {layer.kind}"
        raise ValueError(f"{name} is {kind}, which cannot be {str(style)!r}: that is for a linear layer")
    parts = style.sizes[1:] or (layer.outputs,)
    if len(parts) == 3 and parts[1] != parts[2]:
        raise ValueError(
            f"{name}: {style} says {parts[1]} features of keys and {parts[2]} of values; they must be equal"
        )
    return _adding_up(name, layer, style, parts)


def _adding_up(name: str, layer: SplittableLayer, style: Style, parts: tuple[int, ...]) -> tuple[int, ...]:
    if sum(parts) != layer.outputs:
        raise ValueError(f"{name} has {layer.outputs} output features, and the parts of {style} add up to {sum(parts)}")
    return parts


def _parameter_layout(name: str, parameter: torch.Tensor, style: Style) -> Layout:
    if style.kind == "replicate":
        return REPLICATED
    if style.kind not in ("slice", "gather"):
        raise ValueError(
            f"{name} is a parameter, which can be 'slice(dim)', 'gather(dim)' or 'replicate', not {style.kind!r}"
        )
    dim, parts = style.sizes[0], 1
    if style.kind == "gather":
        gathered_in(name, style)
    elif len(style.sizes) > 1:
        parts = style.sizes[1]
    if dim >= parameter.ndim:
        raise ValueError(f"{name} has {parameter.ndim} dimensions, and {style} asks for dimension {dim}")
    if parameter.shape[dim] % parts:
        raise ValueError(
            f"{name} has {parameter.shape[dim]} elements along dimension {dim}, which are not {parts} equal parts"
        )
    return Layout(dim, (parameter.shape[dim] // parts,) * parts)


def _apply(module: nn.Module, style: Style, group: dist.ProcessGroup, outputs: SplitOutputs) -> None:
    if style.kind == "divide":
        divide(module, style.names, group)
        return
    if style.kind == "heads":
        split_attention(module, group)
        return
    if style.sums_gradients:
        names = list(own_parameters(module))
        divided = names if style == DIVIDED else []
        wrap_forward(module, Role.SUMMED_GRADIENTS, partial(forward_summing, module, names, divided, group))
        return
    if style.kind == "sum":
        wrap_forward(module, Role.SUMMED_OUTPUT, partial(sum_parts, group))
        return
    if style.kind == "channels":
        split_channels(module, style.parts, group)
        return
    layer = as_splittable(module)
    if layer is None or style.kind in ("slice", "gather", "replicate"):
        return
    if style.kind == "colwise_shared":
        share_heads(module, style.sizes[0], style.sizes[1:], group)
    if layer.kind == "convolution" or (layer.kind == "linear" and layer.own_forward):
        _apply_around_forward(module, layer, style, group, outputs)
        return
    if style.kind == "classes":
        assert isinstance(module, TrainsItself)
        module.split_outputs(group)
        return
    if style.kind == "vocab" and layer.own_forward:
        split_own_lookups(module, layer.inputs, group)
        return
    forward: Forward
    if style.kind == "vocab":
        forward = partial(_embedding_forward, module, layer.inputs, group)
    elif style.kind == "rowwise":
        forward = partial(_linear_forward, module, is_transposed(module), 0, group)
        if style.sums_output_gradients:
            wrap_forward(module, Role.GATHERED_OUTPUT, partial(copy_into, group))
    elif layer.kind == "linear":
        forward = partial(_linear_forward, module, is_transposed(module), 1, group)
        if style.sums_output_gradients:
            wrap_forward(module, Role.GATHERED_OUTPUT, partial(gather_into, layer.outputs, group))
        elif style.kind == "colwise_gather":
            wrap_forward(module, Role.GATHERED_OUTPUT, partial(_output_forward, layer.outputs, group, outputs))
            outputs.sizes[module] = layer.outputs
    else:
        return  # an embedding split by features: each rank looks up its own features
    replace_forward(module, Role.SPLIT_LAYER, forward)


def _apply_around_forward(
    module: nn.Module, layer: SplittableLayer, style: Style, group: dist.ProcessGroup, outputs: SplitOutputs
) -> None:
    """Splits a layer whose own forward is kept: it runs on this rank's part of the weight."""
    if style.kind == "rowwise":
        split_rows(module, group)
        return
    split_columns(module, group)
    if style.kind != "colwise_gather":
        return
    if layer.kind == "convolution":
        gather_columns(module, layer.outputs, group)
    else:
        wrap_forward(module, Role.GATHERED_OUTPUT, partial(_output_forward, layer.outputs, group, outputs))


def _linear_forward(
    module: nn.Module, transposed: bool, dim: int, group: dist.ProcessGroup, input: torch.Tensor
) -> torch.Tensor:
    weight = module.weight.t() if transposed else module.weight  # type: ignore[operator]
    return parallel_linear(input, weight, module.bias, dim, group)  # type: ignore[arg-type]


def _output_forward(
    size: int, group: dist.ProcessGroup, outputs: SplitOutputs, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return outputs.finish(forward(*args, **kwargs), size, group)


def _embedding_forward(
    module: nn.Module, num_embeddings: int, group: dist.ProcessGroup, input: torch.Tensor
) -> torch.Tensor:
    assert isinstance(module, nn.Embedding)
    return parallel_embedding(
        input,
        module.weight,
        module.padding_idx,
        module.max_norm,
        module.norm_type,
        module.scale_grad_by_freq,
        module.sparse,
        num_embeddings,
        0,
        group,
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
