"""States of torch's optimizers with split parameters: noting whose shards they are, loading one's own, saving all.

TorchShard's scripts call ``collect_state_dict(model, model.state_dict())`` on every rank. Then the first rank saves
``optimizer.state_dict()``, which has only its own shards, and later all ranks load that file. So the first of these
calls, which every rank makes, gathers the states, and the second returns them in full.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharded_tensors import gather_full, own_group, own_part, say_whose

# Optimizers that have stepped with split parameters, in the order of their first step, which is the same on all ranks.
_stepped: "list[ref[Optimizer]]" = []
# Of each optimizer whose state dict holds full states until its next step: the hook that puts them there.
_completed: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()


def forget_optimizers() -> None:
    """Called when the model-parallel groups end."""
    _stepped.clear()
    for optimizer in list(_completed):
        _completed.pop(optimizer).remove()


def note_whose_states(optimizer: Optimizer, *_: Any) -> None:
    """Called after every optimizer's step: notes on each state of a split parameter which rank's shard it is."""
    split = [p for p in _parameters_of(optimizer) if get_mark(p) is not None]
    if not split:
        return
    _forget_full_states(optimizer)
    if not any(known() is optimizer for known in _stepped):
        _stepped.append(ref(optimizer))
    for parameter in split:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor) and value.ndim:
                say_whose(value, own_group(parameter))


@torch.no_grad()
def complete_states(model: nn.Module) -> None:
    """Makes ``state_dict()`` of the optimizers of `model` return full states on the first rank of each group.

    This holds until their next step. Every rank calls this. A ``ZeroRedundancyOptimizer`` is consolidated on the first
    rank of its group.
    """
    own = {id(parameter) for parameter in model.parameters()}
    _stepped[:] = [known for known in _stepped if known() is not None]
    optimizers = [optimizer for known in _stepped if (optimizer := known()) is not None]
    inner = {id(getattr(optimizer, "split_optim", None)) for optimizer in optimizers}
    for optimizer in optimizers:
        parameters = _parameters_of(optimizer)
        if id(optimizer) in inner or not any(id(p) in own and get_mark(p) is not None for p in parameters):
            continue
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=0)
            continue
        _forget_full_states(optimizer)
        full = {index: _full_states(optimizer, parameter) for index, parameter in enumerate(parameters)}
        _completed[optimizer] = optimizer.register_state_dict_post_hook(_with_full_states(full))


def _full_states(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The full states of `parameter`, on the CPU, of those that are split as it is; {} on all ranks but the first."""
    mark, states = get_mark(parameter), optimizer.state.get(parameter, {})
    if mark is None or own_group(parameter).size() == 1:
        return {}
    cut = {name: v for name, v in states.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape}
    gathered = {name: gather_full(value, mark).cpu() for name, value in cut.items()}
    return gathered if own_group(parameter).rank() == 0 else {}


def _with_full_states(full: dict[int, dict[str, torch.Tensor]]) -> Callable[..., dict[str, Any]]:
    def complete(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {index: {**values, **full.get(index, {})} for index, values in state_dict["state"].items()}
        return {**state_dict, "state": states}

    return complete


def _forget_full_states(optimizer: Optimizer) -> None:
    handle = _completed.pop(optimizer, None)
    if handle is not None:
        handle.remove()


def taking_own_shards(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``Optimizer.load_state_dict``: it takes this rank's shards of full states, and refuses another rank's.

    ``torch.save(optimizer.state_dict())`` on the first rank saves that rank's momenta of split parameters. Without this
    check, the other ranks would load them as their own.
    """

    def load_state_dict(self: Any, state_dict: Any) -> None:
        names = [name for group in state_dict.get("param_groups", ()) for name in group["params"]]
        states = dict(state_dict.get("state", {}))
        for name, parameter in zip(names, _parameters_of(self), strict=False):  # torch refuses what does not fit
            if get_mark(parameter) is not None and isinstance(states.get(name), dict):
                states[name] = {
                    key: own_part(value, parameter, f"{key} of parameter {name}") if torch.is_tensor(value) else value
                    for key, value in states[name].items()
                }
        original(self, {**state_dict, "state": states})
        _forget_full_states(self)

    return load_state_dict


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
