"""Tensor parallelism: a table's styles applied to a model (Shoeybi et al. 2019).

Only forwards and attributes of the instances change. Names, classes and hooks stay as they are, and so do the names in
checkpoints. The caller replaces each parameter by what :func:`local_shard` makes of it, as a plain tensor or a DTensor.
"""

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.groups import Group, resolve_group
from tensorshard.comm.sharding import to_local
from tensorshard.common.words import join_names
from tensorshard.model.blocks import find_blocks
from tensorshard.model.forwards import Forward, Role, replace_forward, wrap_forward
from tensorshard.tensor_parallel.apply.attention import split_attention, use_layer_calls
from tensorshard.tensor_parallel.apply.local_shapes import forward_with_local_shapes
from tensorshard.tensor_parallel.apply.split_layers import (
    SharedColumns,
    check_rows_called,
    split_classes,
    split_column,
    split_gathered_column,
    split_row,
    split_vocabulary,
)
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, keep_own_channels, signature_of
from tensorshard.tensor_parallel.table.layer_styles import (
    Classes,
    Column,
    Colwise,
    ColwiseGather,
    ColwiseShared,
    PackedColwise,
    Rowwise,
    Style,
    Vocab,
)
from tensorshard.tensor_parallel.table.layouts import REPLICATED, Layout, check_can_split
from tensorshard.tensor_parallel.table.styles import (
    COLWISE_GATHER,
    DIVIDED,
    RESHAPE_SIZES,
    Channels,
    Divide,
    Gather,
    Heads,
    Replicate,
    Slice,
    Sum,
    owner_of,
)
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.torch_private.modules import own_buffers, own_parameters, refresh_recurrent_weights, set_parameter
from tensorshard.torch_private.pytree import tree_map_only


def sum_gradients(module: nn.Module, names: Iterable[str], divided: Container[str], group: dist.ProcessGroup) -> None:
    """Makes `module` sum the gradients of its own parameters `names` over the ranks, which have different activations.

    Args:
        divided: names of the parameters to divide by the number of ranks: each rank adds these to its part of a sum.
    """
    wrap_forward(module, Role.SUMMED_GRADIENTS, partial(_summing_forward, module, list(names), divided, group))


def _summing_forward(
    module: nn.Module,
    names: list[str],
    divided: Container[str],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    own = own_parameters(module)
    parameters = {name: own[name] for name in names}
    try:
        for name, parameter in parameters.items():
            copied = collectives.copy(to_local(parameter), group)
            set_parameter(module, name, copied / group.size() if name in divided else copied)
        return forward(*args, **kwargs)
    finally:
        for name, parameter in parameters.items():
            set_parameter(module, name, parameter)


def gather_parameters(module: nn.Module, dims: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Makes the forward of `module` run on full parameters, of which each rank keeps a slice.

    This is for what tensor parallelism cannot split otherwise: recurrent layers, tables of positions, parameters that a
    forward uses in its own way. All ranks compute the same with them. So each rank has the full gradient, and takes
    its slice of it: nothing is communicated in backward.

    Args:
        dims: names of the parameters, each with the dimension that is sliced. They are still full.
    """
    sizes = {name: (dim, module.get_parameter(name).shape[dim]) for name, dim in dims.items()}
    wrap_forward(module, Role.GATHERED_PARAMETERS, partial(_gathering_forward, module, sizes, group))


def _gathering_forward(
    module: nn.Module,
    sizes: Mapping[str, tuple[int, int]],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    places = []
    for name, (dim, size) in sizes.items():
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((owner, key, own_parameters(owner)[key], dim, size))
    try:
        for owner, key, parameter, dim, size in places:
            set_parameter(owner, key, collectives.gather(to_local(parameter), dim, group, size=size))
        refresh_recurrent_weights(module)
        return forward(*args, **kwargs)
    finally:
        for owner, key, parameter, _, _ in places:
            set_parameter(owner, key, parameter)
        refresh_recurrent_weights(module)


def sum_own_gradients(module: nn.Module, style: Replicate, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes `module` sum the gradients of all of its own parameters, if the style says so."""
    if style.sums_gradients:
        names = list(own_parameters(module))
        sum_gradients(module, names, names if style == DIVIDED else (), group)


def split_channels(module: nn.Module, style: Channels, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes a module that computes channel by channel do so for this rank's channels."""
    keep_own_channels(module, group.rank(), group.size(), style.parts)


def sum_output(module: nn.Module, _style: Sum, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes `module` return the sum over the ranks of what its forward returns."""
    wrap_forward(module, Role.SUMMED_OUTPUT, partial(_forward_summing_output, group))


def _forward_summing_output(group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    def given(tensor: torch.Tensor) -> torch.Tensor:
        return collectives.copy(tensor, group) if tensor.requires_grad else tensor

    args, kwargs = tree_map_only(torch.Tensor, given, (args, kwargs))
    return tree_map_only(torch.Tensor, lambda part: collectives.reduce(part, group), forward(*args, **kwargs))


def divide(module: nn.Module, style: Divide, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Divides attributes and inputs of `module` that depend on its heads, in place.

    Inputs that have an entry for every head are such as the position biases of ALiBi (Press et al. 2022), which BLOOM
    computes once for all of its blocks.
    """
    attributes: dict[str, int] = {}
    inputs: dict[str, tuple[int, int | None]] = {}
    for option in style.targets:
        if option == RESHAPE_SIZES:
            wrap_forward(module, Role.LOCAL_SHAPES, partial(forward_with_local_shapes, group.size()))
            continue
        target, _, divisor = option.partition("/")
        if target.startswith("input."):
            _, argument, dim = target.split(".")
            inputs[argument] = (int(dim), _read(module, divisor) if divisor else None)
        else:
            attributes[target] = _read(module, target) // (int(divisor) if divisor else group.size())
    if any(target.startswith("config.") for target in attributes):
        module.config = copy.copy(module.config)  # type: ignore[assignment, arg-type]  # other modules read it too
    for target, value in attributes.items():
        owner, key = owner_of(module, target)
        setattr(owner, key, value)
    if inputs:
        around = partial(_forward_on_own_heads, signature_of(module), type(module).__name__, inputs, group)
        wrap_forward(module, Role.DIVIDED_INPUTS, around)


def _forward_on_own_heads(
    signature: inspect.Signature,
    name: str,
    inputs: dict[str, tuple[int, int | None]],
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `forward` with this rank's heads of some of its inputs."""
    bound = signature.bind(*args, **kwargs)
    extra = next((p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), "")
    for argument, (dim, heads) in inputs.items():
        # Arguments that only **kwargs takes are in a dict under that parameter's name.
        holder = bound.arguments if argument in signature.parameters else bound.arguments.get(extra, {})
        if argument not in holder and argument not in signature.parameters:
            raise ValueError(f"{name} was not given an input {argument!r}, whose heads are to be divided")
        given = holder.get(argument)
        if isinstance(given, torch.Tensor):
            holder[argument] = _own_heads(given, dim, heads, group, f"{name}'s input {argument!r}")
    return forward(*bound.args, **bound.kwargs)


def _own_heads(given: torch.Tensor, dim: int, heads: int | None, group: dist.ProcessGroup, what: str) -> torch.Tensor:
    if heads is None:
        if given.ndim <= dim or given.size(dim) % group.size():
            raise ValueError(
                f"{what} has the shape {list(given.shape)}; along dimension {dim} it must have an entry for each head, "
                f"which {group.size()} ranks can divide"
            )
        return collectives.scatter(given, dim, group)
    if given.ndim <= dim or given.size(dim) % heads:
        raise ValueError(
            f"{what} has the shape {list(given.shape)}; along dimension {dim} it must have an entry for each of "
            f"{heads} heads, or for each sample and head"
        )
    by_head = given.unflatten(dim, (-1, heads))
    return collectives.scatter(by_head, dim + 1, group).flatten(dim, dim + 1)


def _read(module: nn.Module, attribute: str) -> int:
    owner, key = owner_of(module, attribute)
    value: int = getattr(owner, key)
    return value


def _change_nothing(*_: Any) -> None:
    """Only the parameters change."""


_Apply = Callable[[nn.Module, Any, dist.ProcessGroup, SplitOutputs], None]
_APPLY: Mapping[type[Style], _Apply] = MappingProxyType(
    {
        Colwise: split_column,
        PackedColwise: split_column,
        ColwiseShared: split_column,
        ColwiseGather: split_gathered_column,
        Rowwise: split_row,
        Vocab: split_vocabulary,
        Classes: split_classes,
        Replicate: sum_own_gradients,
        Slice: _change_nothing,
        Gather: _change_nothing,  # its reader gathers it
        Channels: split_channels,
        Sum: sum_output,
        Heads: split_attention,
        Divide: divide,
    }
)
"""What each style does to a module that it names."""


def apply_tensor_parallel(
    model: nn.Module,
    table: TensorTable,
    group: Group,
    *,
    shared_inputs: Iterable[Sequence[str]] = (),
    outputs: SplitOutputs | None = None,
    whole: nn.Module | None = None,
    elsewhere: Container[str] = (),
) -> dict[str, Layout]:
    """Makes `model` compute its part of what `table` splits.

    Args:
        model: on any device, the meta device included. Its parameters are still whole; the caller replaces
            them.
        table: its names are those of `model`.
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
    styles = table.resolve(whole or model)
    layouts = find_layouts(whole or model, styles, process_group.size())
    styles = {name: style for name, style in styles.items() if name not in elsewhere}
    use_layer_calls(model, {name for name, layout in layouts.items() if layout.dim is not None})
    blocks = tuple(f"{name}." for name in find_blocks(whole or model)) if COLWISE_GATHER in styles.values() else ()
    for name, module in model.named_modules():
        style = styles.get(name)
        if style is not None:  # layers inside of blocks always gather
            within = SplitOutputs() if name.startswith(blocks) else outputs
            _APPLY[type(style)](module, style, process_group, within)
        own = {key: own_style for key in own_parameters(module) if (own_style := styles.get(join_names(name, key)))}
        summed = [key for key, own_style in own.items() if own_style.sums_gradients]
        if summed and not (style is not None and style.sums_gradients):
            sum_gradients(module, summed, [key for key in summed if own[key] == DIVIDED], process_group)
    for reader, dims in _gathered(model, styles).items():
        gather_parameters(model.get_submodule(reader), dims, process_group)
    check_rows_called(model, styles)
    for names in shared_inputs:
        layers = [model.get_submodule(name) for name in names if isinstance(styles.get(name), Column)]
        shared = SharedColumns(layers, process_group)
        for index, layer in enumerate(layers):
            replace_forward(layer, Role.SHARED_INPUT, partial(shared.forward, index))
    return layouts


def _gathered(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, dict[str, int]]:
    """For each module in whose forward parameters are gathered: their names in it, each with its dimension."""
    gathered: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        for key in own_parameters(module):
            parameter = join_names(name, key)
            style = styles.get(parameter, styles.get(name))
            if isinstance(style, Gather):
                reader = style.reader(parameter)
                gathered.setdefault(reader, {})[parameter.removeprefix(f"{reader}.")] = style.dim
    return gathered


def find_layouts(model: nn.Module, styles: Mapping[str, Style], size: int) -> dict[str, Layout]:
    """The layout on `size` ranks of every parameter of `model`, by each of its names, and of buffers that are split.

    Changes nothing.

    Args:
        styles: as :meth:`TensorTable.resolve` gives them.

    Raises:
        ValueError: as :func:`apply_tensor_parallel`.
    """
    layouts: dict[str, Layout] = {}
    chosen: dict[int, tuple[str, Layout]] = {}
    unsaid: list[tuple[str, torch.Tensor]] = []
    table_name: dict[nn.Module, str] = {}  # the table names a module once, even if it is registered at several places
    for prefix, module in model.named_modules(remove_duplicate=False):
        listed = table_name.setdefault(module, prefix)
        own_style = styles.get(listed)
        own = {} if own_style is None else own_style.layouts(listed, module, size)
        for key, parameter in own_parameters(module).items():
            name = join_names(prefix, key)
            layout = own.get(key, REPLICATED)
            if (style := styles.get(join_names(listed, key))) is not None:
                layout = style.parameter_layout(name, parameter)
            elif listed not in styles and as_splittable(module) is None:
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
            check_can_split(own[key], size, join_names(prefix, key))
            layouts[join_names(prefix, key)] = own[key]
    layouts.update({name: chosen.get(id(parameter), (name, REPLICATED))[1] for name, parameter in unsaid})
    return layouts


def split_shares(model: nn.Module, table: TensorTable, size: int) -> tuple[float, float]:
    """Shares of `model`'s parameters, by number of elements, that `table` splits, and that it splits only in memory.

    Raises:
        ValueError: as :func:`apply_tensor_parallel`.
    """
    styles = table.resolve(model)
    layouts = find_layouts(model, styles, size)
    total = split = gathered = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if layouts[name].dim is not None:
            split += parameter.numel()
            if isinstance(styles.get(name, styles.get(name.rpartition(".")[0])), Gather):
                gathered += parameter.numel()
    return split / max(total, 1), gathered / max(total, 1)
