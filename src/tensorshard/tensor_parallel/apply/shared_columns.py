"""Column layers that read the same input: one sum of its gradients for all of them.

Query, key and value, or gate and up, have one input. Split one by one, each would sum that input's gradient over the
ranks on its own. Here the first to be called computes the others' outputs too; in backward one sum travels, and it does
so while all the weights' gradients are computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tensorshard.comm import primitives
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharding import to_local
from tensorshard.layers.arguments import as_rows, autocast
from tensorshard.tensor_parallel.table.layer_kinds import is_transposed
from tensorshard.torch_private.tensors import tensor_version


class _Columns(Function):
    """A whole input, this rank's rows of several weights: this rank's columns of their outputs."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup, *parameters: Any) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group = group
        ctx.save_for_backward(input, *weights)
        ctx.set_materialize_grads(False)  # a layer whose output goes unused costs nothing
        return tuple(F.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        input, *weights = ctx.saved_tensors
        grad_input = reduction = None
        if ctx.needs_input_grad[0]:
            flat = torch.zeros_like(as_rows(input)) if all(grad is None for grad in grads) else None
            for grad, weight in zip(grads, weights, strict=True):
                if grad is not None:
                    flat = as_rows(grad).mm(weight) if flat is None else flat.addmm_(as_rows(grad), weight)
            assert flat is not None
            reduction = primitives.all_reduce(flat, ctx.group, async_op=True)
            grad_input = flat.view(input.shape)
        grad_parameters: list[torch.Tensor | None] = []
        for index, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[2 + 2 * index : 4 + 2 * index]
            rows = None if grad is None else as_rows(grad)
            grad_parameters.append(None if rows is None or not needs_weight else rows.t().mm(as_rows(input)))
            grad_parameters.append(None if rows is None or not needs_bias else rows.sum(0))
        if reduction is not None:
            reduction.wait()
        return grad_input, None, *grad_parameters


@dataclass
class _Ready:
    """An output that was computed for a layer before it was called."""

    input: torch.Tensor
    version: int
    with_gradients: bool
    output: torch.Tensor


class SharedColumns:
    """The column layers of one input, on the ranks of a group.

    What is computed together depends on nothing but the calls, so that recomputation repeats it. A layer that is called
    with something else than the first of them was is computed on its own.

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
        outputs = self._outputs(input, parameters)
        return [set_mark(output, ParallelMark(-1, None, self._group)) for output in outputs]

    def _outputs(
        self, input: torch.Tensor, parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> Sequence[torch.Tensor]:
        """This rank's columns of the outputs of layers of these weights and biases."""
        computed, *flat = autocast(input, *(tensor for pair in parameters for tensor in pair))
        return _Columns.apply(computed, self._group, *flat)
