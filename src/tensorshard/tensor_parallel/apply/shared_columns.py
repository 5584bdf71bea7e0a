"""Column layers that read the same input: its gradients are summed once for all of them.

Query, key and value, or gate and up, have one input. Split one by one, each would sum that input's gradient over the
ranks. Here the layer that is called first computes the others' outputs too. So backward needs one sum, and the weights'
gradients are computed while it is under way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharding import to_local
from tensorshard.layers.activation_sharding import ActivationSharding, Replicated
from tensorshard.layers.split_linear import column_linear
from tensorshard.model.special_layers import is_transposed
from tensorshard.torch_private.tensors import tensor_version


@dataclass
class _Ready:
    """An output that was computed before its layer was called."""

    input: torch.Tensor
    version: int
    with_gradients: bool
    output: torch.Tensor


class SharedColumns:
    """The column layers of one input, on the ranks of a group.

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
