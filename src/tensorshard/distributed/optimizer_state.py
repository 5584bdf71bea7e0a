"""States of torch's optimizers whose parameters are split: whose shards they are, and taking one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharded_tensors import own_group, own_part, say_whose


def note_whose_states(optimizer: Optimizer, *_: Any) -> None:
    """Called after every optimizer's step: notes on the states of split parameters which rank's they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if get_mark(parameter) is not None:
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        say_whose(value, own_group(parameter))


def taking_own_shards(original: Callable[..., None]) -> Callable[..., None]:
    """``Optimizer.load_state_dict``, which takes this rank's shards of full states, and refuses another rank's shards.

    ``torch.save(optimizer.state_dict())`` on the first rank keeps that rank's momenta of split parameters; loaded
    everywhere, they would go on as those of the others.
    """

    def load_state_dict(self: Any, state_dict: Any) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        names = [name for group in state_dict.get("param_groups", ()) for name in group["params"]]
        states = dict(state_dict.get("state", {}))
        for name, parameter in zip(names, parameters, strict=False):  # torch refuses what does not fit
            if get_mark(parameter) is not None and isinstance(states.get(name), dict):
                states[name] = {
                    key: own_part(value, parameter, f"{key} of parameter {name}") if torch.is_tensor(value) else value
                    for key, value in states[name].items()
                }
        original(self, {**state_dict, "state": states})

    return load_state_dict
