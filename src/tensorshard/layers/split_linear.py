"""``F.linear`` with a weight that is split over a group: which of column and row layer it is, and what it refuses."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm.differentiable import scatter
from tensorshard.comm.groups import Group
from tensorshard.comm.marks import ParallelMark, get_mark, set_mark
from tensorshard.comm.sharding import normalize_dim, shard_range, to_local
from tensorshard.layers.activation_sharding import Replicated
from tensorshard.layers.arguments import check_dim, full_size, parameter_group
from tensorshard.layers.column_linear import column_linear
from tensorshard.layers.row_linear import row_linear


def parallel_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dim: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """``F.linear`` with a weight that is split over a group.

    Args:
        input: [*, in_features], full; with ``dim=0`` it may also be this rank's shard of the input features.
        weight: this rank's shard of [out_features, in_features], or a DTensor.
        bias: [out_features]: split as the weight's rows with ``dim=1``, full with ``dim=0``.
        dim: None: ``F.linear``. 1 or -1: the output features are split (a column layer). 0: the input features are
            split (a row layer).
        group: the ranks that hold the shards; by default the weight's own, else the model-parallel group.

    Returns:
        [*, out_features]. With ``dim=1`` this rank's shard of the last dimension, marked as a shard.

    Raises:
        ValueError: `dim` is none of these; a shard was given where a full input is needed, or the reverse;
            `group` is not the weight's.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> weight = torch.randn(32, 16)  # this rank's half of [64, 16]
        >>> ts.nn.functional.parallel_linear(torch.randn(8, 16), weight, dim=1).shape
        torch.Size([8, 32])
    """
    check_dim(dim, "parallel_linear")
    if dim is None:
        _check_whole(input, "parallel_linear with dim=None")
        return F.linear(input, weight, bias)
    size = full_size(weight, 1 if dim == 0 else 0)
    return split_linear(input, weight, bias, dim, parameter_group(weight, group, "weight"), size)


def split_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    group: dist.ProcessGroup,
    size: int | None,
) -> torch.Tensor:
    """As :func:`parallel_linear`, for a caller that knows how its weight is split. Marks on the weight are not read.

    Args:
        dim: 0, 1 or -1.
        size: of the dimension that is split: input features with ``dim=0``, else output features; None if not known.
    """
    local_weight, local_bias = to_local(weight), None if bias is None else to_local(bias)
    if dim == 0:
        input = _as_row_input(input, local_weight.size(1), size, group)
        return row_linear(input, local_weight, local_bias, Replicated(group))
    _check_whole(input, "a layer that splits its output features")
    if input.size(-1) != local_weight.size(1):
        raise ValueError(
            f"an input of shape {list(input.shape)} was given to a layer of {local_weight.size(1)} input "
            "features: a layer that splits its output features needs its full input"
        )
    (output,) = column_linear(input, [(local_weight, local_bias)], Replicated(group))
    return set_mark(output, ParallelMark(-1, size, group))


def _check_whole(input: torch.Tensor, what: str) -> None:
    mark = get_mark(input)
    if mark is not None and _is_of_features(mark, input) and _is_split(mark):
        raise ValueError(
            f"a tensor {list(input.shape)} marked as split along its last dimension was given to {what}, "
            "which needs the full input: put it together with tensorshard.distributed.gather(x, dim=-1), or use "
            "a layer with dim=0"
        )


def _is_of_features(mark: ParallelMark, input: torch.Tensor) -> bool:
    return mark.dim is not None and normalize_dim(mark.dim, input.ndim) == input.ndim - 1


def _is_split(mark: ParallelMark) -> bool:
    return mark.group is None or mark.group.size() > 1


def _as_row_input(input: torch.Tensor, held: int, full: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's shard of the input of a row layer: `held` of its `full` input features."""
    mark = get_mark(input)
    width = input.size(-1)
    is_shard = mark is not None and _is_of_features(mark, input)
    if is_shard and width == held:
        return input
    if not is_shard:
        expected = shard_range(width, group.size(), group.rank())[1]
        if width == full or (full is None and width != held and expected == held):
            return scatter(input, -1, group)
        if width == held:  # it has no mark, but the size of this rank's shard
            return input
    needed = f"its shard of {held}" if full is None else f"all {full} input features, or its shard of {held}"
    raise ValueError(
        "an input of shape "
        f"{list(input.shape)}{' marked as split along its last dimension' if is_shard else ''} was given to "
        f"rank {group.rank()} of {group.size()} of a layer that splits its input features: it needs {needed}"
    )
