"""The layers that tensor parallelism can split, whatever names their classes give to sizes."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensorshard.model.forwards import own_forward, runs_forward_of
from tensorshard.model.special_layers import is_transposed
from tensorshard.model.trains_itself import TrainsItself
from tensorshard.torch_private.modules import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    overrides_convolution,
    own_parameters,
)

_IN_PROJECTIONS = {"in_proj_weight", "q_proj_weight"}  # an nn.MultiheadAttention has one of them


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


def as_splittable(module: nn.Module) -> SplittableLayer | None:
    """How `module` could be split, or None if it is no layer that could.

    A linear layer or an embedding may have its own forward, from a subclass or set on the instance. It is kept; a check
    by numbers decides whether it computes the same on parts of the weight. A layer whose weight is computed from other
    parameters cannot be split.
    """
    if isinstance(module, TrainsItself) and (sizes := module.linear_sizes()) is not None:  # it splits itself
        return SplittableLayer("head", *sizes, 1, 0)
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
