"""Embedding tables split over a group: by vocabulary, or by feature."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from tensorshard.comm import primitives
from tensorshard.comm.differentiable import copy, gather
from tensorshard.comm.groups import Group
from tensorshard.comm.sharding import shard_range, to_local
from tensorshard.layers.arguments import check_dim, check_indices, full_size, parameter_group


class _VocabularyEmbedding(Function):
    """Each rank looks up the rows that it holds, and has zeros for all others. The sum over the ranks is the output
    (Shoeybi et al. 2019)."""

    acts_on_parts = True  # of sequences that context parallelism cuts

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        indices: torch.Tensor,
        start: int,
        padding_index: int,
        scale_by_frequency: bool,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        rows = indices - start
        elsewhere = (rows < 0) | (rows >= weight.size(0))
        rows.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(rows, elsewhere)
        ctx.height, ctx.padding_index = weight.size(0), padding_index
        ctx.scale_by_frequency, ctx.group = scale_by_frequency, group
        if weight.size(0):
            output = F.embedding(rows, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        else:
            output = weight.new_zeros((*indices.shape, weight.size(1)))
        primitives.all_reduce(output, group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            grad = copy(grad, ctx.group)
        rows, elsewhere = ctx.saved_tensors
        if ctx.height == 0:
            return grad.new_zeros((0, grad.size(-1))), None, None, None, None, None
        if ctx.scale_by_frequency:  # a row's count must not include the indices that are held elsewhere
            grad, rows = grad[~elsewhere], rows[~elsewhere]
        else:
            grad = grad.masked_fill(elsewhere.unsqueeze(-1), 0)
        grad_weight = torch.ops.aten.embedding_dense_backward(
            grad, rows, ctx.height, ctx.padding_index, ctx.scale_by_frequency
        )
        return grad_weight, None, None, None, None, None


def parallel_embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """``F.embedding`` with a table that is split over a group.

    Args:
        input: indices into the full vocabulary, of any shape, the same on every rank of the group.
        weight: this rank's shard of [num_embeddings, embedding_dim], or a DTensor.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in ``F.embedding``. `max_norm`
            changes `weight` in place. `sparse` needs ``dim=None``.
        num_embeddings: size of the full vocabulary. It is needed with ``dim=0``, unless `weight` is a DTensor or the
            parameter of a parallel layer.
        dim: None: ``F.embedding``. 0: the vocabulary is split. 1 or -1: the features are split.
        group: the ranks that hold the shards; by default the weight's own, else the model-parallel group.

    Returns:
        [*input.shape, embedding_dim], full.

    Raises:
        IndexError: an index is outside the vocabulary.
        ValueError: `dim` is none of these; `sparse` with a split table; `num_embeddings` is needed and
            missing, or `weight` is not a shard of so many rows; `group` is not the weight's.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> table = torch.randn(500, 16)  # this rank's half of [1000, 16]
        >>> ts.nn.functional.parallel_embedding(torch.tensor([3, 999]), table, num_embeddings=1000, dim=0).shape
        torch.Size([2, 16])
    """
    check_dim(dim, "parallel_embedding")
    if dim is None:
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if sparse:
        raise ValueError("sparse=True was given for a split embedding, whose gradients are dense: leave it out")
    if num_embeddings is None:
        num_embeddings = full_size(weight, 0)
    return split_embedding(
        input,
        weight,
        padding_idx,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        dim,
        parameter_group(weight, group, "weight"),
        (num_embeddings, full_size(weight, 1)),
    )


def split_embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    dim: int,
    process_group: dist.ProcessGroup,
    shape: tuple[int | None, int | None],
) -> torch.Tensor:
    """As :func:`parallel_embedding`, for a caller that knows how its table is split. Marks on the table are not read.

    Args:
        dim: 0, 1 or -1.
        shape: of the full table. The number of features may be None; so may that of rows, with `dim` 1 or -1.
    """
    num_embeddings, embedding_dim = shape
    with torch.no_grad():
        table = to_local(weight)
    if dim == 0:
        start, height = _rows_of(num_embeddings, table.size(0), process_group)
        assert num_embeddings is not None  # else _rows_of raises
        check_indices(input, num_embeddings, "index", "embeddings")
        padding = _positive(padding_idx, num_embeddings)
        if max_norm is not None:
            mine = input[(input >= start) & (input < start + height)] - start
            torch.embedding_renorm_(table.detach(), mine, max_norm, norm_type)
        row = -1 if padding is None or not start <= padding < start + height else padding - start
        local = to_local(weight)
        function = _ScaledByFrequency if scale_grad_by_freq else _VocabularyEmbedding
        return function.apply(local, input, start, row, scale_grad_by_freq, process_group)
    check_indices(input, table.size(0), "index", "embeddings")
    if max_norm is not None:
        _renormalize_features(table.detach(), input, max_norm, norm_type, process_group)
    output = F.embedding(input, to_local(weight), padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    return gather(output, -1, process_group, size=embedding_dim)


class _ScaledByFrequency(_VocabularyEmbedding):
    """How often an index occurs is counted over whole sequences."""

    acts_on_parts = False


def _rows_of(num_embeddings: int | None, height: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """The first row of this rank's shard of the table, and how many it has."""
    if num_embeddings is None:
        raise ValueError(
            "parallel_embedding with dim=0 was given a local weight without num_embeddings=: give the number of rows "
            "of the full table"
        )
    start, expected = shard_range(num_embeddings, group.size(), group.rank())
    if height != expected:
        raise ValueError(
            f"num_embeddings={num_embeddings} was given, of which rank {group.rank()} of {group.size()} "
            f"holds {expected} rows; its weight has {height}"
        )
    return start, height


def _positive(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"padding_idx={padding_idx} is outside the {num_embeddings} embeddings")
    return padding_idx % num_embeddings


def _renormalize_features(
    weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float, group: dist.ProcessGroup
) -> None:
    """``embedding_renorm_`` where each rank holds some features of each row: it goes by the norms of full rows."""
    rows = indices.unique()
    parts = primitives.gather_flat(torch.linalg.vector_norm(weight[rows], norm_type, dim=1), group)
    norms = torch.linalg.vector_norm(parts, norm_type, dim=0)
    scale = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)  # 1e-7: as embedding_renorm_ has it
    weight[rows] *= scale.unsqueeze(1)
