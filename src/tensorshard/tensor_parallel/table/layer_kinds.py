"""The layers that tensor parallelism can split, whatever their class calls its sizes."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensorshard.heads.module.parallel_linear_cross_entropy import ParallelLinearCrossEntropy
from tensorshard.modules.forwards import own_forward, runs_forward_of
from tensorshard.modules.linear_layers import is_transposed
from tensorshard.torch_private.modules import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    overrides_convolution,
    own_parameters,
)

_IN_PROJECTIONS = {"in_proj_weight", "q_proj_weight"}  # an nn.MultiheadAttention has one of them


@dataclass(frozen=True)
class SplittableLayer:
    """What splitting has to know of a layer.

    Args:
        kind: "linear", "convolution" (transposed or not, of one group), "embedding", or "head": a linear layer and its
            cross entropy in one.
        inputs, outputs: input features or channels (rows of an embedding's table) and output ones (a head's classes).
        input_dim, output_dim: the dimensions of the weight that these run along.
        own_forward: whether it is a linear layer or an embedding with a forward of its own (a scaled embedding, say),
            which then runs on this rank's part of the weight.
    """

    kind: str
    inputs: int
    outputs: int
    input_dim: int
    output_dim: int
    own_forward: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether its input features can be split, too, so that its output is a sum over the ranks."""
        return self.kind in ("linear", "convolution")


def as_splittable(module: nn.Module) -> SplittableLayer | None:
    """How `module` could be split, or None if it is no layer that could.

    A linear layer or an embedding may have a forward of its own, be it a subclass's or set on the instance: it is kept,
    and whether it computes the same on parts of the weight is for numbers to say. A layer whose weight is computed from
    other parameters could not be split.
    """
    if isinstance(module, ParallelLinearCrossEntropy):  # it splits itself
        return SplittableLayer("head", module.in_features, module.num_classes, 1, 0)
    weight = own_parameters(module).get("weight")
    if weight is None:
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
    """A linear layer or an embedding that computes in a way of its own, with no more parameters than torch's has."""
    if weight.ndim != 2 or not own_parameters(module).keys() <= {"weight", "bias"} or any(module.children()):
        return None
    if isinstance(module, nn.Linear):
        return SplittableLayer("linear", weight.shape[1], weight.shape[0], 1, 0, own_forward=True)
    if isinstance(module, nn.Embedding) and "bias" not in own_parameters(module):
        return SplittableLayer("embedding", weight.shape[0], weight.shape[1], 0, 1, own_forward=True)
    return None


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` computes as torch's convolutions of 1, 2 or 3 dimensions do, transposed ones included."""
    return runs_forward_of(module, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS) and not overrides_convolution(module)


def is_multihead_attention(module: nn.Module) -> bool:
    """Whether `module` is an unmodified ``nn.MultiheadAttention``, which reads its weights past its layers."""
    return runs_forward_of(module, nn.MultiheadAttention) and not _IN_PROJECTIONS.isdisjoint(own_parameters(module))


def signature_of(module: nn.Module) -> inspect.Signature:
    """What the forward of `module` takes, without what tensorshard put around it."""
    return inspect.signature(own_forward(module))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module` by their names; arguments of unknown names are left out."""
    try:
        bound = signature_of(module).bind_partial(*args, **kwargs)
    except TypeError:  # a forward of its own on the instance
        return dict(kwargs)
    parameters = signature_of(module).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return kwargs | {key: value for key, value in bound.arguments.items() if parameters[key].kind not in variadic}
