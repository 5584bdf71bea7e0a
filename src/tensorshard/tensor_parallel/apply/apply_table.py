"""Tensor parallelism: a table's styles applied to a model (Shoeybi et al. 2019).

Only forwards and attributes of the instances change. Names, classes and hooks stay as they are, and so do the names in
checkpoints. The caller replaces each parameter by what :func:`local_shard` makes of it, as a plain tensor or a DTensor.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.groups import Group, resolve_group
from tensorshard.common.dotted_names import join_names
from tensorshard.model.blocks import find_blocks
from tensorshard.model.forwards import Role, replace_forward
from tensorshard.tensor_parallel.apply.attention import split_attention, use_layer_calls
from tensorshard.tensor_parallel.apply.split_layers import (
    SharedColumns,
    check_rows_called,
    split_classes,
    split_column,
    split_gathered_column,
    split_row,
    split_vocabulary,
)
from tensorshard.tensor_parallel.apply.split_modules import (
    divide,
    gather_parameters,
    split_channels,
    sum_gradients,
    sum_output,
    sum_own_gradients,
)
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
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
    Channels,
    Divide,
    Gather,
    Heads,
    Replicate,
    Slice,
    Sum,
)
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.torch_private.modules import own_buffers, own_parameters


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
