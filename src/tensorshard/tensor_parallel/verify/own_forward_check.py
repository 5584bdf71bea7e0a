"""Whether a linear layer with a forward of its own computes the same on parts of its weight, by numbers, in training.

Blocks are compared while they evaluate. Such a layer may do something else in training, so that it is compared by
itself. A convolution or a linear layer of torch's needs no check.
"""

import torch
from torch import nn

from tensorshard.comm.sharding import shard_range
from tensorshard.modules.fake_copies import copy_with, random_values
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.torch_private.modules import own_parameters, set_parameter

_TOLERANCE = 1e-4
# Of an output layer with more classes, so many are compared.
_MOST_OUTPUTS = 512


@torch.no_grad()
def computes_as_linear(module: nn.Module, style: str, size: int) -> bool:
    """Whether `size` ranks that each have a part of the weight compute what `module` does.

    Args:
        module: with a forward of its own; left as it is.
        style: "rowwise", where each rank has some of the inputs; else each has some of the outputs.
    """
    layer = as_splittable(module)
    assert layer is not None
    outputs = min(layer.outputs, _MOST_OUTPUTS * size)
    generator = torch.Generator().manual_seed(0)
    values = random_values(generator)
    given = copy_with(module, lambda name, t: values(name, t[:outputs] if t.shape[:1] == (layer.outputs,) else t))
    given.train()
    input = torch.randn((2, 3, layer.inputs), generator=generator)
    own = {key: parameter.detach() for key, parameter in own_parameters(given).items()}
    weight, bias = own["weight"], own.get("bias")

    def with_parameters(weight: torch.Tensor, bias: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor:
        set_parameter(given, "weight", weight)
        set_parameter(given, "bias", bias)
        torch.manual_seed(0)
        return given(input)

    try:
        with torch.random.fork_rng(devices=[]):
            expected = with_parameters(weight, bias, input)
            found = []
            for rank in range(size):
                start, length = shard_range(layer.inputs if style == "rowwise" else outputs, size, rank)
                part = slice(start, start + length)
                if style == "rowwise":
                    found.append(with_parameters(weight[:, part], None, input[..., part]))
                else:
                    found.append(with_parameters(weight[part], None if bias is None else bias[part], input))
    except Exception:  # whatever the forward makes of a part, or of an input that is not its own
        return False
    total = torch.stack(found).sum(0) if style == "rowwise" else torch.cat(found, -1)
    if style == "rowwise" and bias is not None:
        total = total + bias
    return total.shape == expected.shape and torch.allclose(total, expected, _TOLERANCE, _TOLERANCE)
