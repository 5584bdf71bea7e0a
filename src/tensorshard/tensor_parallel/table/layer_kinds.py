"""The layers that tensor parallelism can split, whatever their class calls its sizes."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensorshard.heads.module.parallel_linear_cross_entropy import ParallelLinearCrossEntropy


@dataclass(frozen=True)
class SplittableLayer:
    """What splitting has to know of a layer.

    Args:
        kind: "linear", "embedding", or "head": a linear layer and its cross entropy in one.
        inputs, outputs: input features (rows of an embedding's table) and output features (a head's classes).
        input_dim, output_dim: the dimensions of the weight that these run along.
    """

    kind: str
    inputs: int
    outputs: int
    input_dim: int
    output_dim: int


def as_splittable(module: nn.Module) -> SplittableLayer | None:
    """How `module` could be split, or None if it is no layer that could.

    A subclass that computes something else than its base class (scaled embeddings, say) could not: its
    forward would be lost.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return SplittableLayer("linear", module.weight.shape[1], module.weight.shape[0], 1, 0)
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return SplittableLayer("embedding", module.weight.shape[0], module.weight.shape[1], 0, 1)
    if isinstance(module, ParallelLinearCrossEntropy):
        return SplittableLayer("head", module.in_features, module.num_classes, 1, 0)
    if is_transposed(module):
        inputs, outputs = (int(size) for size in module.weight.shape)  # type: ignore[union-attr]
        return SplittableLayer("linear", inputs, outputs, 0, 1)
    return None


def is_multihead_attention(module: nn.Module) -> bool:
    """Whether `module` is an unmodified ``nn.MultiheadAttention``, which reads its weights past its layers."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def signature_of(module: nn.Module) -> inspect.Signature:
    """What the forward of `module`'s class takes; that of the instance may have been replaced."""
    signature = inspect.signature(type(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module` by their names; arguments of unknown names are left out."""
    try:
        bound = signature_of(module).bind_partial(*args, **kwargs)
    except TypeError:  # a forward of its own on the instance
        return dict(kwargs)
    parameters = signature_of(module).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return kwargs | {key: value for key, value in bound.arguments.items() if parameters[key].kind not in variadic}


def is_transposed(module: nn.Module) -> bool:
    """Whether `module` is GPT-2's ``Conv1D``: a linear layer whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")
