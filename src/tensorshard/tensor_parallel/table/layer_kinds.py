"""The layers and modules that tensor parallelism can split, whatever names their classes give to sizes."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.common.words import kind_of
from tensorshard.model.blocks import is_transposed
from tensorshard.model.forwards import own_forward, runs_forward_of
from tensorshard.model.quantized import holds_quantized
from tensorshard.model.trains_itself import TrainsItself
from tensorshard.tensor_parallel.table.layouts import Layout
from tensorshard.torch_private.modules import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    BatchNormBase,
    NormBase,
    overrides_convolution,
    own_buffers,
    own_parameters,
)

_IN_PROJECTIONS = {"in_proj_weight", "q_proj_weight"}  # an nn.MultiheadAttention has one of them
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class SplittableLayer:
    """What splitting needs to know about a layer.

    Args:
        kind: "linear", "convolution" (transposed or not, of one group), "embedding", or "head": a linear layer and its
            cross entropy in one.
        inputs: number of input features or channels (for an embedding, the rows of its table).
        outputs: number of output features or channels (for a head, its classes).
        input_dim, output_dim: the dimensions of the weight for inputs and outputs.
        own_forward: whether it is a linear layer or an embedding with its own forward (a scaled embedding, say). That
            forward then runs on this rank's part of the weight.
    """

    kind: str
    inputs: int
    outputs: int
    input_dim: int
    output_dim: int
    own_forward: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether its input features can be split too, so that its output is a sum over the ranks."""
        return self.kind in ("linear", "convolution")

    @property
    def is_plain_linear(self) -> bool:
        """Whether it is a linear layer with torch's forward."""
        return self.kind == "linear" and not self.own_forward

    @property
    def runs_on_parts(self) -> bool:
        """Whether its forward is kept, and runs on this rank's part of the weight: a convolution's, or a user's."""
        return self.has_rows and not self.is_plain_linear


def as_splittable(module: nn.Module) -> SplittableLayer | None:
    """How `module` could be split, or None if it is no layer that could.

    A linear layer or an embedding may have its own forward, from a subclass or set on the instance. It is kept; a check
    by numbers decides whether it computes the same on parts of the weight. A layer whose weight is computed from other
    parameters cannot be split.
    """
    if isinstance(module, TrainsItself) and (sizes := module.linear_sizes()) is not None:  # it splits itself
        return SplittableLayer("head", *sizes, 1, 0)
    weight = own_parameters(module).get("weight")
    if weight is None or holds_quantized(module):
        return None
    if runs_forward_of(module, nn.Linear):
        return SplittableLayer("linear", weight.shape[1], weight.shape[0], 1, 0)
    if runs_forward_of(module, nn.Embedding):
        return SplittableLayer("embedding", weight.shape[0], weight.shape[1], 0, 1)
    if is_transposed(module):
        return SplittableLayer("linear", weight.shape[0], weight.shape[1], 0, 1)
    if is_convolution(module) and module.groups == 1:
        if isinstance(module, TRANSPOSED_CONVOLUTIONS):
            return SplittableLayer("convolution", weight.shape[0], weight.shape[1], 0, 1)
        return SplittableLayer("convolution", weight.shape[1], weight.shape[0], 1, 0)
    return _with_own_forward(module, weight)


def _with_own_forward(module: nn.Module, weight: nn.Parameter) -> SplittableLayer | None:
    """A linear layer or an embedding with its own forward, and with no more parameters than torch's class has."""
    if weight.ndim != 2 or not own_parameters(module).keys() <= {"weight", "bias"} or any(module.children()):
        return None
    if isinstance(module, nn.Linear):
        return SplittableLayer("linear", weight.shape[1], weight.shape[0], 1, 0, own_forward=True)
    if isinstance(module, nn.Embedding) and "bias" not in own_parameters(module):
        return SplittableLayer("embedding", weight.shape[0], weight.shape[1], 0, 1, own_forward=True)
    return None


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` computes as torch's convolutions of 1, 2 or 3 dimensions do; transposed ones count."""
    return runs_forward_of(module, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS) and not overrides_convolution(module)


def is_multihead_attention(module: nn.Module) -> bool:
    """Whether `module` is an unmodified ``nn.MultiheadAttention``, which reads its layers' weights directly."""
    return runs_forward_of(module, nn.MultiheadAttention) and not _IN_PROJECTIONS.isdisjoint(own_parameters(module))


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of `module`'s forward, without the code that tensorshard put around it."""
    return inspect.signature(own_forward(module))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module`, by name. Arguments without a known name are left out."""
    try:
        bound = signature_of(module).bind_partial(*args, **kwargs)
    except TypeError:  # a forward that was set on the instance
        return dict(kwargs)
    parameters = signature_of(module).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return kwargs | {key: value for key, value in bound.arguments.items() if parameters[key].kind not in variadic}


# -- modules that compute channel by channel --


@dataclass(frozen=True)
class Channelwise:
    """A module that computes channel by channel, or by groups of channels, so that each rank can have some of them.

    A batch normalization has statistics for each channel, and a group normalization for each group. A grouped
    convolution is many convolutions side by side. Each rank computes such a module's results for its own channels,
    without communication.

    Args:
        inputs, outputs: numbers of input and output channels.
        groups: number of groups of neighbouring channels that are computed separately.
        counts: names of attributes that hold numbers of channels or of groups.
        surely: whether the class decides this. If not, it is guessed from the sizes of parameters and buffers.
    """

    inputs: int
    outputs: int
    groups: int
    counts: tuple[str, ...]
    surely: bool


def as_channelwise(module: nn.Module) -> Channelwise | None:
    """How the channels of `module` could be split, or None if it does not look as if they could.

    Norms are known by their classes. Other modules count if all that they hold is one number per channel, or several.
    """
    if is_convolution(module):
        grouped = Channelwise(
            module.in_channels,  # type: ignore[arg-type]
            module.out_channels,  # type: ignore[arg-type]
            module.groups,  # type: ignore[arg-type]
            ("in_channels", "out_channels", "groups"),
            True,
        )
        return grouped if grouped.groups > 1 else None
    tensors = list(_own_tensors(module))
    if len(tensors) < sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers()):
        return None  # it contains other modules
    lengths = {tensor.shape for _, tensor in tensors if tensor.ndim > 0}
    if isinstance(module, nn.GroupNorm):
        size, groups = module.num_channels, module.num_groups
        surely = runs_forward_of(module, nn.GroupNorm)
        return Channelwise(size, size, groups, ("num_channels", "num_groups"), surely)
    if isinstance(module, NormBase):
        size = module.num_features
        surely = runs_forward_of(module, BatchNormBase, nn.SyncBatchNorm, *_INSTANCE_NORMS)
        return Channelwise(size, size, size, ("num_features",), surely)
    if len(lengths) != 1 or len(shape := next(iter(lengths))) != 1:
        return None
    counts = tuple(key for key, value in vars(module).items() if type(value) is int and value == shape[0])
    return Channelwise(shape[0], shape[0], shape[0], counts, False)


def channel_layouts(name: str, module: nn.Module, size: int, parts: int = 1) -> dict[str, Layout]:
    """Layouts of the parameters and buffers of a channelwise `module`, by their names in it.

    Args:
        name: the module's name in the model, for messages.
        size: number of ranks.
        parts: the number of equal parts that its channels consist of. Each part is split.

    Raises:
        ValueError: the module does not compute channel by channel, or its groups cannot be divided.
    """
    channels = as_channelwise(module)
    if channels is None:
        raise ValueError(
            f"{name} is {kind_of(module)}, which cannot be 'channels': that is for batch, group and instance "
            f"norms, convolutions of several groups, and modules that hold one number a channel"
        )
    by_channel = channels.groups == channels.inputs == channels.outputs
    if channels.outputs % parts or channels.inputs % parts or (channels.groups % (parts * size) and not by_channel):
        packed = "" if parts == 1 else f" in {parts} parts"
        raise ValueError(
            f"{name} has {channels.groups} groups of its {channels.outputs} channels{packed}, which cannot be divided "
            f"over {size} ranks; lower tp, or leave it and the layers around it whole"
        )
    return {
        key: Layout(0, (tensor.shape[0] // parts,) * parts) for key, tensor in _own_tensors(module) if tensor.ndim > 0
    }


def keep_own_channels(module: nn.Module, rank: int, size: int, parts: int = 1) -> None:
    """Sets the channel and group counts of `module` to those of rank `rank` of `size`. Its tensors do not change."""
    channels = as_channelwise(module)
    assert channels is not None
    for key in channels.counts:
        setattr(module, key, parts * shard_sizes(getattr(module, key) // parts, size)[rank])


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from own_parameters(module).items()
    yield from own_buffers(module).items()
