"""Computing with other weights for a while, such as an average of a run's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import to_local
from tensorshard.sharded.sharded_model import ShardedModel


@contextmanager
def using_weights(
    sharded: ShardedModel, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """A context in which the parameters hold `weights`; afterwards they are as before. A collective.

    Args:
        parameters: the module's, by the names of `weights`.

    Raises:
        ValueError: no parameter has a name, or a tensor is laid out differently; nothing was changed then.
    """
    weights = {name: _own_part(sharded, name, value) for name, value in weights.items()}
    for name, value in weights.items():
        if name not in parameters:
            raise ValueError(
                f"weights hold {name!r}, which is not a parameter of the model on this rank; take names and tensors "
                f"from engine.model.named_parameters()"
            )
        if to_local(value).shape != to_local(parameters[name]).shape:
            raise ValueError(
                f"weights hold {name!r} of shape {list(to_local(value).shape)} on this rank, and the parameter has "
                f"{list(to_local(parameters[name]).shape)}; make it as parameter.detach().clone()"
            )
    sharded.finish_gather()
    restore = [sharded.kept_value(name) for name in weights]
    for name, value in weights.items():
        sharded.set_value(name, value)
    sharded.all_gather_loaded()
    try:
        yield
    finally:
        sharded.finish_gather()
        for give_back in restore:
            give_back()
        sharded.all_gather_loaded()


def _own_part(sharded: ShardedModel, name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor for a parameter that tensor-parallel ranks split."""
    whole = sharded.split.num_shards(name) > 1 and value.shape == sharded.full_shapes().get(name)
    return sharded.split.local(name, value) if whole and not isinstance(value, DTensor) else value
