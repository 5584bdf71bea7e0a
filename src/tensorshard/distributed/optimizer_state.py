"""Refusing an optimizer's state in which another rank's shards are, before it is trained with."""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from tensorshard.comm.sharded_tensors import refuse_foreign_part


def refusing_foreign_parts(original: Callable[..., None]) -> Callable[..., None]:
    """``Optimizer.load_state_dict`` that refuses what one rank saved of split parameters and all have loaded.

    ``torch.save(optimizer.state_dict())`` on the first rank keeps that rank's momenta of split parameters; loaded
    everywhere, they would go on as those of the others.
    """

    def load_state_dict(self: Any, state_dict: Any) -> None:
        for index, values in state_dict.get("state", {}).items():
            for name, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, DTensor):
                    refuse_foreign_part(value, f"{name} of parameter {index}")
        original(self, state_dict)

    return load_state_dict
