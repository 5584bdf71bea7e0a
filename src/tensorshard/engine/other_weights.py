"""Computing with other weights for a while, such as an average of a run's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from tensorshard.comm.sharding import to_local
from tensorshard.sharded_model import ShardedModel


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
