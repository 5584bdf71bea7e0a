"""``state_dict`` and ``load_state_dict`` of an Engine's optimizer: a rank does not load another rank's states.

Each rank may keep its own states in its own file. But scripts for one device let the first rank write and all ranks
read. The first rank's states would often have the right shapes, and belong to other parameters.
"""

from typing import Any

import torch

from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan

_HELD_BY = "tensorshard"
"""The key that says which rank's states these are. torch ignores keys that it does not know."""


def guard_optimizer_states(optimizer: torch.optim.Optimizer, plan: Plan, mesh: Mesh) -> None:
    """Makes `optimizer`, which holds parts of the model's parameters, refuse the states of other parts."""
    axes = ("pp", "dp_shard", "tp") if plan.zero else ("pp", "tp")
    own = {axis: f"{mesh.index(axis)} of {mesh.degrees[axis]}" for axis in axes}

    def note(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[_HELD_BY] = dict(own)

    def check(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        held = state.get(_HELD_BY, own)
        if held != own:
            raise RuntimeError(
                f"engine.optimizer.load_state_dict was given the states of another rank's parameters ({_listed(held)}; "
                f"here {_listed(own)}), as where one rank's file is read by all. Call engine.save(path) and "
                f"engine.load(path), whose checkpoints any plan reads, or keep a file for each rank"
            )

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(check)


def _listed(places: dict[str, str]) -> str:
    return ", ".join(f"{axis} {place}" for axis, place in places.items() if not place.endswith(" of 1"))
