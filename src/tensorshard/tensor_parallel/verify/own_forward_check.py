"""Whether a linear layer with its own forward computes the same on parts of its weight, by numbers, in training.

Blocks are compared in evaluation. Such a layer may do something else in training, so it is also compared by itself.
Torch's own convolutions and linear layers need no check.
"""

import torch
from torch import nn

from tensorshard.comm.sharding import shard_range
from tensorshard.model.fake_copies import copy_with, random_values
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable
from tensorshard.torch_private.modules import own_parameters, set_parameter

_TOLERANCE = 1e-4
# If an output layer has more classes, only this many are compared.
_MOST_OUTPUTS = 512


@torch.no_grad()
def computes_as_linear(module: nn.Module, splits_inputs: bool, size: int) -> bool:
    """Whether `size` ranks that each have a part of the weight compute what `module` does.

    Args:
        module: has its own forward; left as it is.
        splits_inputs: whether each rank has some of the inputs. Else each has some of the outputs.
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
                start, length = shard_range(layer.inputs if splits_inputs else outputs, size, rank)
                part = slice(start, start + length)
                if splits_inputs:
                    found.append(with_parameters(weight[:, part], None, input[..., part]))
                else:
                    found.append(with_parameters(weight[part], None if bias is None else bias[part], input))
    except Exception:  # any error of the forward on a part of the weight, or on a random input
        return False
    total = torch.stack(found).sum(0) if splits_inputs else torch.cat(found, -1)
    if splits_inputs and bias is not None:
        total = total + bias
    return total.shape == expected.shape and torch.allclose(total, expected, _TOLERANCE, _TOLERANCE)
