"""Layers that compute this rank's part: linear layers, convolutions, embeddings and heads (Shoeybi et al. 2019).

A layer with torch's forward gets another one. A layer whose own forward is kept runs it on this rank's part of the
weight: convolutions, whose forward takes care of strides, padding and dilation, and layers of users' classes. A
convolution is linear in its channels, so it is split along these as a linear layer is along its features.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharding import to_local
from tensorshard.layers.split_embedding import parallel_embedding
from tensorshard.layers.split_linear import ActivationSharding, Replicated, column_linear, parallel_linear
from tensorshard.model.blocks import is_transposed
from tensorshard.model.forwards import Forward, Role, replace_forward, wrap_forward
from tensorshard.model.trains_itself import TrainsItself
from tensorshard.tensor_parallel.apply.attention import share_heads
from tensorshard.tensor_parallel.apply.tensor_split import SplitOutputs
from tensorshard.tensor_parallel.table.layer_kinds import SplittableLayer, as_splittable
from tensorshard.tensor_parallel.table.layer_styles import (
    Classes,
    Column,
    ColwiseGather,
    ColwiseShared,
    Rowwise,
    Style,
    Vocab,
)
from tensorshard.tensor_parallel.table.styles import Slice
from tensorshard.torch_private.modules import own_parameters, set_parameter
from tensorshard.torch_private.tensors import tensor_version


def split_column(module: nn.Module, style: Column, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes a layer compute this rank's outputs, from an input that is full on every rank."""
    layer = _described(module)
    if isinstance(style, ColwiseShared):
        share_heads(module, style.heads, style.sizes, group)
    if layer.runs_on_parts:
        wrap_forward(module, Role.SPLIT_LAYER, partial(_own_column_forward, group))
    elif layer.kind == "linear":
        replace_forward(module, Role.SPLIT_LAYER, partial(_linear_forward, module, is_transposed(module), 1, group))
    # An embedding looks up its own features.


def split_gathered_column(
    module: nn.Module, style: ColwiseGather, group: dist.ProcessGroup, outputs: SplitOutputs
) -> None:
    """As :func:`split_column`, with an output that is gathered: now, or when somebody needs all of it."""
    layer = _described(module)
    full: Forward
    if layer.kind == "convolution":
        full = partial(_gathering_forward, module, layer.outputs, group)
    elif style.sum_grad:
        full = partial(_gather_for_sum, layer.outputs, group)
    else:
        full = partial(_output_forward, layer.outputs, group, outputs)
        if not layer.own_forward:
            outputs.sizes[module] = layer.outputs
    wrap_forward(module, Role.GATHERED_OUTPUT, full)
    if layer.runs_on_parts:
        wrap_forward(module, Role.SPLIT_LAYER, partial(_own_column_forward, group))
    else:
        replace_forward(module, Role.SPLIT_LAYER, partial(_linear_forward, module, is_transposed(module), 1, group))


def split_row(module: nn.Module, style: Rowwise, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes a layer take this rank's inputs. Its output is summed over the ranks, then its bias added."""
    if _described(module).runs_on_parts:
        wrap_forward(module, Role.SPLIT_LAYER, partial(_own_row_forward, module, group))
        return
    replace_forward(module, Role.SPLIT_LAYER, partial(_linear_forward, module, is_transposed(module), 0, group))
    if style.sum_grad:
        wrap_forward(module, Role.GATHERED_OUTPUT, partial(_copy_output, group))


def split_vocabulary(module: nn.Module, _style: Vocab, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes an embedding look up the rows that this rank holds. Its output is summed over the ranks."""
    layer = _described(module)
    if layer.own_forward:
        wrap_forward(module, Role.SPLIT_LAYER, partial(_with_split_lookups, module, layer.inputs, group))
    else:
        replace_forward(module, Role.SPLIT_LAYER, partial(_embedding_forward, module, layer.inputs, group))


def split_classes(module: nn.Module, _style: Classes, group: dist.ProcessGroup, _outputs: SplitOutputs) -> None:
    """Makes a head compute the classes of this rank; its loss is that of all."""
    assert isinstance(module, TrainsItself)
    module.split_outputs(group)


def _described(module: nn.Module) -> SplittableLayer:
    layer = as_splittable(module)
    assert layer is not None  # the layouts were computed for it
    return layer


# -- forwards of layers with torch's forward --


def _linear_forward(
    module: nn.Module, transposed: bool, dim: int, group: dist.ProcessGroup, input: torch.Tensor
) -> torch.Tensor:
    weight: Any = module.weight
    return parallel_linear(input, weight.t() if transposed else weight, module.bias, dim, group)  # type: ignore[arg-type]


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


# -- around forwards that are kept --


def _own_column_forward(
    group: dist.ProcessGroup, forward: Forward, /, input: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return forward(collectives.copy(input, group), *args, **kwargs)


def _own_row_forward(
    module: nn.Module, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    bias = own_parameters(module).get("bias")
    if bias is None:
        return collectives.reduce(forward(*args, **kwargs), group)
    set_parameter(module, "bias", None)  # it is added once, to the sum
    try:
        part = forward(*args, **kwargs)
    finally:
        set_parameter(module, "bias", bias)
    shape = [1] * (-_channel_dim(module) - 1)
    return collectives.reduce(part, group) + bias.to(part.dtype).view(-1, *shape)


def _channel_dim(module: nn.Module) -> int:
    """The dimension of the channels in input and output, counted from the end, since samples may be missing."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return 1 - weight.ndim


def _with_split_lookups(
    module: nn.Module, num_embeddings: int, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs an embedding's own forward, in which only the lookup is replaced.

    Such a forward may scale what it looks up, or make the indices itself (positions with an offset). It calls
    ``torch.nn.functional.embedding``, mostly through its base class.
    """

    def lookup(
        input: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        if weight is not own_parameters(module)["weight"]:
            return F.embedding(input, weight, *options)
        return parallel_embedding(input, weight, *options, num_embeddings, 0, group)

    with _EmbeddingOverride(lookup):
        return forward(*args, **kwargs)


class _EmbeddingOverride(TorchFunctionMode):
    """Replaces ``torch.nn.functional.embedding`` by another function."""

    def __init__(self, lookup: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._lookup = lookup

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._lookup if func is F.embedding else func)(*args, **(kwargs or {}))


# -- full outputs --


def _output_forward(
    size: int, group: dist.ProcessGroup, outputs: SplitOutputs, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return outputs.finish(forward(*args, **kwargs), size, group)


def _gathering_forward(
    module: nn.Module, outputs: int, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return collectives.gather(forward(*args, **kwargs), _channel_dim(module), group, size=outputs)


def _gather_for_sum(
    size: int, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The gathered output of `forward`. Each rank goes on to compute something else with it."""
    return collectives.gather_for_sum(forward(*args, **kwargs), -1, group, size=size)


def _copy_output(group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The full output of `forward`. Each rank goes on to compute something else with it."""
    return collectives.copy(forward(*args, **kwargs), group)


# -- column layers that read the same input --


@dataclass
class _Ready:
    """An output that was computed before its layer was called."""

    input: torch.Tensor
    version: int
    with_gradients: bool
    output: torch.Tensor


class SharedColumns:
    """The column layers of one input, on the ranks of a group. Its gradients are summed once for all of them.

    Query, key and value, or gate and up, have one input. Split one by one, each would sum that input's gradient over
    the ranks. Here the layer that is called first computes the others' outputs too. So backward needs one sum, and the
    weights' gradients are computed while it is under way.

    Only the calls decide what is computed together, so that recomputation repeats it. A layer that is called with
    another tensor than the first one was is computed on its own.

    Args:
        layers: in the order in which they are called.
        group: the ranks that hold their parts.
    """

    def __init__(self, layers: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self._layers = list(layers)
        self._transposed = [is_transposed(layer) for layer in layers]
        self._group = group
        self._ready: dict[int, _Ready] = {}

    def forward(self, index: int, input: torch.Tensor) -> torch.Tensor:
        """The output of layer `index`: this rank's part of its features."""
        ready = self._ready.pop(index, None)
        if (
            ready is not None
            and ready.input is input
            and ready.version == tensor_version(input)
            and ready.with_gradients == torch.is_grad_enabled()
        ):
            return ready.output
        self._ready.clear()
        together = range(len(self._layers)) if index == 0 else [index]
        outputs = self._compute(together, input)
        for i, output in zip(together, outputs, strict=True):
            if i != index:
                self._ready[i] = _Ready(input, tensor_version(input), torch.is_grad_enabled(), output)
        return outputs[0]

    def _compute(self, indices: Iterable[int], input: torch.Tensor) -> list[torch.Tensor]:
        parameters: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for index in indices:
            layer = self._layers[index]
            weight = to_local(layer.weight)  # type: ignore[arg-type]
            bias = None if layer.bias is None else to_local(layer.bias)  # type: ignore[arg-type]
            parameters.append((weight.t() if self._transposed[index] else weight, bias))
        outputs = column_linear(input, parameters, self._sharding())
        return [set_mark(output, ParallelMark(-1, None, self._group)) for output in outputs]

    def _sharding(self) -> ActivationSharding | None:
        """How the input is laid out over the ranks."""
        return Replicated(self._group)


# -- rows that are called --


def check_rows_called(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Makes a module raise if it reads a slice of one layer's weight, and then does not call its row layers.

    Such code often has a second path, a fused kernel that reads the weights of all layers (Mamba's has, in training on
    GPUs). That path would take this rank's part of a row layer for the whole weight, and no sum over the ranks would
    follow.
    """
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        children = dict(module.named_children())
        rows = {key: child for key, child in children.items() if isinstance(styles.get(prefix + key), Rowwise)}
        reads_slices = any(
            isinstance(styles.get(f"{prefix}{key}.{parameter}"), Slice)
            for key, child in children.items()
            if prefix + key not in styles
            for parameter in own_parameters(child)
        )
        if reads_slices and rows:
            called: set[str] = set()
            for key, row in rows.items():
                row.register_forward_pre_hook(lambda *_, called=called, key=key: called.add(key))
            what = f"{name or 'the model'} ({type(module).__name__})"
            wrap_forward(module, Role.GUARDED_ROWS, partial(_forward_calling_rows, what, frozenset(rows), called))


def _forward_calling_rows(
    what: str, rows: frozenset[str], called: set[str], forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    called.clear()
    output = forward(*args, **kwargs)
    if missing := sorted(rows - called):
        raise RuntimeError(
            f"{what} did not call {', '.join(missing)}, of whose weight this rank has a part: it read the weight past "
            f"the layer, as fused kernels do, and its output would be wrong; switch such kernels off, or give a "
            f"tp_plan that leaves this module whole"
        )
    return output
