"""Logits for evaluation, and the tiles of a head outside its loss."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tensorshard.comm.sharding import to_local
from tensorshard.layers.arguments import autocast
from tensorshard.layers.split_linear import parallel_linear
from tensorshard.loss.heads.loss.head_spec import autocast_dtype
from tensorshard.loss.heads.tiles.precision import Precision
from tensorshard.loss.heads.tiles.tiles import Tiles


def head_tiles(
    features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, normalize: bool, scale: float
) -> Tiles:
    """The tiles of this rank's classes for an input [*, D]. They have no gradients.

    Raises:
        ValueError: the input has another width.
    """
    _check_width(features, weight)
    precision = Precision.choose(features, autocast_dtype(features))
    flat = features.detach().reshape(-1, features.size(-1)).to(precision.wide)
    flat = (F.normalize(flat, dim=1) if normalize else flat) * scale
    local, local_bias = to_local(weight).detach(), None if bias is None else to_local(bias).detach()
    norms = flat.new_empty(len(local), dtype=precision.wide) if normalize else None
    return Tiles(flat.to(precision.compute), local, local_bias, None, norms, precision)


def local_logits(
    features: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normalize: bool,
    scale: float,
    softcap: float | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """This rank's columns of the logits of an input [*, D], differentiable.

    Raises:
        ValueError: the input has another width.
    """
    _check_width(features, weight)
    local, local_bias = to_local(weight), None if bias is None else to_local(bias)
    features, local, local_bias = autocast(features, local, local_bias)  # type: ignore[assignment]
    if normalize:
        features = F.normalize(features, dim=-1)
    if group is None:
        logits = F.linear(features, local.to(features.dtype), local_bias)
    else:
        logits = parallel_linear(features, local.to(features.dtype), local_bias, 1, group)
    if normalize:
        logits = logits / torch.linalg.vector_norm(local, dim=1).clamp(min=1e-12)
    logits = logits * scale if scale != 1.0 else logits
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _check_width(features: torch.Tensor, weight: torch.Tensor) -> None:
    if features.ndim < 1 or features.size(-1) != weight.size(1):
        raise ValueError(
            f"an input {list(features.shape)} was given to a head of {weight.size(1)} features: expected "
            f"[*, {weight.size(1)}]"
        )
