"""Marks on tensors of which each rank of a group holds a shard: along which dimension, of what, over whom.

Split tensors are plain tensors, so that hand-written code sets, compares and copies them, and computing on them costs
no dispatch. What is known of them travels as attributes of the tensor object, by TorchShard's names: ``parallel_dim``
and ``order_type``. An operation's result carries no mark, even where the operation is element by element: put it back
with :func:`register_parallel_dim` or :class:`tensorshard.nn.RegisterParallelDim`.

A parameter's ``parallel_dim`` is the `dim` of its layer, in the order of ``nn.Linear``'s arguments: input features,
then output features. A linear layer with ``dim=1`` splits its output features, so its weight [out_features,
in_features] along 0.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tensorshard.common.words import kind_of

_PARALLEL_DIM = "parallel_dim"
_ORDER_TYPE = "order_type"
_DETAILS = "_tensorshard_mark"

# Parameters that were marked as split. Where torch passes on only a gradient or ``.data``, its parameter is found here.
_split_parameters: "WeakValueDictionary[int, nn.Parameter]" = WeakValueDictionary()


@dataclass(frozen=True)
class ParallelMark:
    """What is known of a shard, or of a parameter that a parallel layer holds in full on every rank.

    Args:
        dim: the dimension along which the tensor is split; None for one that is held in full.
        size: elements of the full tensor along `dim`, if known.
        group: the ranks that hold the shards, if known.
        layer_dim: of a parameter, the `dim` of its layer; of any other tensor, None.
    """

    dim: int | None
    size: int | None = None
    group: dist.ProcessGroup | None = None
    layer_dim: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelMark":
        return self  # the group is the same one

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # a process group cannot be saved: `parallel_dim` and `order_type` are what remains


def get_mark(tensor: torch.Tensor) -> ParallelMark | None:
    """The mark of a shard; None for a full tensor."""
    layout = get_layout(tensor)
    return None if layout is None or layout.dim is None else layout


def get_layout(tensor: torch.Tensor) -> ParallelMark | None:
    """As :func:`get_mark`; and for a parameter that a parallel layer holds in full, a mark whose `dim` is None."""
    named = getattr(tensor, _PARALLEL_DIM, None)
    if not isinstance(named, int):
        return None
    details = getattr(tensor, _DETAILS, None)
    if isinstance(details, ParallelMark) and named == (details.dim if details.layer_dim is None else details.layer_dim):
        return details
    if not isinstance(tensor, nn.Parameter):
        return ParallelMark(named)
    return ParallelMark(_own_dim(tensor, named, getattr(tensor, _ORDER_TYPE, 0)), layer_dim=named)


def set_mark(tensor: torch.Tensor, mark: ParallelMark | None) -> torch.Tensor:
    """Puts `mark` on `tensor`, or takes it off; returns `tensor`."""
    if mark is not None:
        setattr(tensor, _DETAILS, mark)
        setattr(tensor, _PARALLEL_DIM, mark.dim if mark.layer_dim is None else mark.layer_dim)
        if mark.layer_dim is not None:
            setattr(tensor, _ORDER_TYPE, int(mark.dim == mark.layer_dim % max(1, tensor.ndim)))
        if mark.dim is not None and isinstance(tensor, nn.Parameter):
            _split_parameters[id(tensor)] = tensor
        return tensor
    for attribute in (_DETAILS, _PARALLEL_DIM, _ORDER_TYPE):
        if hasattr(tensor, attribute):
            delattr(tensor, attribute)
    return tensor


def get_parallel_dim(tensor: torch.Tensor) -> int | None:
    """The dimension along which `tensor` is split; None if it is whole.

    For a parameter of a parallel layer this is the `dim` of the layer: 1 or -1 for the weight [out_features,
    in_features] of a linear layer that splits its output features, and 0 for weight and bias of one that splits its
    input features, though every rank holds all of that bias.
    """
    if isinstance(tensor, DTensor):
        return next((p.dim for p in tensor.placements if isinstance(p, Shard)), None)
    named = getattr(tensor, _PARALLEL_DIM, None)
    return named if isinstance(named, int) else None


def register_parallel_dim(
    tensor: torch.Tensor,
    dim: int | None = None,
    *,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Marks `tensor` as a shard that is split along `dim`; with None, as whole.

    Args:
        tensor: marked in place.
        dim: for an activation or buffer, its own dimension. For an ``nn.Parameter``, the `dim` of its layer, as
            :func:`register_parallel_attribute` takes it.
        size: elements of the full tensor along `dim`. Without it, code that needs it asks the other ranks.
        group: the ranks that hold the parts; by default those of the layer or loss that reads the mark.

    Returns:
        The same tensor.

    Raises:
        IndexError: the tensor has no dimension `dim`.
        ValueError: a parameter's `dim` is none of 0, 1 and -1.
        TypeError: a DTensor, whose placements already say how it is split.

    Examples:
        >>> shard = ts.register_parallel_dim(torch.randn(8, 16), -1)
        >>> ts.get_parallel_dim(shard)
        -1
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"register_parallel_dim was given {kind_of(tensor)}, where a tensor was expected")
    _refuse_dtensor(tensor)
    if isinstance(tensor, nn.Parameter):
        return register_parallel_attribute(tensor, dim, size=size, group=group)
    if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
        raise IndexError(f"dim={dim} was given for a tensor of {tensor.ndim} dimensions")
    return set_mark(tensor, None if dim is None else ParallelMark(dim, size, group))


def register_parallel_attribute(
    param: torch.Tensor,
    value: int | None = None,
    order_type: int = 0,
    *,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Marks a parameter of your own layer as a shard, by the `dim` of the layer.

    Args:
        param: marked in place.
        value: 1 or -1: the layer splits its output features; 0: its input features; None: nothing.
        order_type: 0: `param` is [out_features, in_features, ...], as a linear layer's weight is, or [out_features], a
            bias, which is split with 1 and -1 and held in full by every rank with 0. 1: `value` is the dimension of
            `param` itself, as an embedding's [num_embeddings, embedding_dim].
        size, group: as in :func:`register_parallel_dim`.

    Returns:
        The same parameter.

    Raises:
        IndexError: with ``order_type=1``, the tensor has no dimension `value`.
        ValueError: `value` or `order_type` is none of these.
        TypeError: a DTensor.

    Examples:
        >>> weight = torch.nn.Parameter(torch.randn(2, 16))  # this rank's rows
        >>> ts.get_parallel_dim(ts.register_parallel_attribute(weight, 1))
        1
    """
    _refuse_dtensor(param)
    if order_type not in (0, 1):
        raise ValueError(
            f"order_type={order_type!r} was given: use 0 (out features first) or 1 (dimensions of its own)"
        )
    if value is None:
        return set_mark(param, None)
    if order_type == 1 and not -param.ndim <= value < param.ndim:
        raise IndexError(f"dim={value} was given for a tensor of {param.ndim} dimensions")
    return set_mark(param, ParallelMark(_own_dim(param, value, order_type), size, group, value))


def _refuse_dtensor(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise TypeError(f"a DTensor says by its placements {tensor.placements} how it is split: it takes no mark")


def _own_dim(parameter: torch.Tensor, layer_dim: int, order_type: int) -> int | None:
    """The parameter's own dimension along which a layer with `layer_dim` splits it."""
    if order_type == 1:
        return layer_dim % max(1, parameter.ndim)
    if layer_dim not in (0, 1, -1):
        raise ValueError(
            f"dim={layer_dim} was given for a parameter: use 1 or -1 (its layer splits the output features), 0 (the "
            "input features) or None; register_parallel_attribute(param, dim, order_type=1) takes its own dimensions"
        )
    if layer_dim == 0:
        return 1 if parameter.ndim > 1 else None
    return 0


def split_parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The marked parameter whose memory `tensor` shares, as its ``.data`` does; `tensor` itself if there is none."""
    if get_layout(tensor) is not None or type(tensor) is not torch.Tensor or tensor.is_meta:
        return tensor
    address = tensor.untyped_storage().data_ptr()
    for parameter in list(_split_parameters.values()):
        if parameter.shape == tensor.shape and address and parameter.untyped_storage().data_ptr() == address:
            return parameter
    return tensor


def split_parameters_by_gradient() -> dict[int, nn.Parameter]:
    """The marked parameters that have a gradient, by the ``id`` of the gradient."""
    trained = [parameter for parameter in list(_split_parameters.values()) if parameter.requires_grad]
    return {id(p.grad): p for p in trained if p.grad is not None and get_mark(p) is not None}
