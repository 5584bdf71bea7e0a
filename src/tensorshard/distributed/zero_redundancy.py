"""torch's ``ZeroRedundancyOptimizer`` on models of which some parameters are split.

It gives each parameter to one rank, which updates it and sends it to the others. For a split parameter that is wrong:
each rank's part is another one, and would be overwritten. So split parameters are left out of that: each rank updates
its own part and keeps the optimizer's state for it, which is as little memory as ZeRO would have left.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from tensorshard.comm.sharded_tensors import gather_full, is_split, own_shard


class SplitParameters:
    """Mixed into a ``ZeroRedundancyOptimizer``: a second local optimizer for this rank's parts of split parameters.

    ``param_groups`` holds all parameters, as ever. A consolidated state holds split parameters' states whole: it is the
    state of a model that is not parallel, and can be loaded on any number of ranks.
    """

    split_optim: Optimizer

    def _verify_same_dense_param_type(self: Any) -> None:
        everything = self._all_params
        self._all_params = [p for p in everything if not is_split(p)]
        try:
            if self._all_params:
                super()._verify_same_dense_param_type()  # type: ignore[misc]
        finally:
            self._all_params = everything

    def _partition_parameters(self: Any, *args: Any) -> Any:
        everything = self.param_groups
        self.param_groups = _groups_of(everything, split=False)
        try:
            return super()._partition_parameters(*args)  # type: ignore[misc]
        finally:
            self.param_groups = everything

    def _init_local_optimizer(self: Any) -> None:
        super()._init_local_optimizer()  # type: ignore[misc]
        # As torch does, so that a group may be empty: an optimizer refuses no list of groups, only one of parameters.
        self.split_optim = self._optim_constructor(_groups_of(self.param_groups, split=True), **self._optim_defaults)
        self._split_states: dict[int, dict[str, Any]] = {}

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        if self.initialized:
            self._param_to_index_cache.clear()
            self.split_optim.add_param_group(_groups_of(self.param_groups[-1:], split=True)[0])

    def _local_step(self: Any, gradients: Any = None, closure: Any = None, **kwargs: Any) -> float | None:
        loss = super()._local_step(gradients, closure, **kwargs)  # type: ignore[misc]
        self._sync_param_groups(self.param_groups, self.split_optim.param_groups)
        self.split_optim.step(**kwargs)
        return loss

    @torch.no_grad()
    def consolidate_state_dict(self: Any, to: int = 0) -> None:
        super().consolidate_state_dict(to)  # type: ignore[misc]
        self._split_states = {}
        for index, parameter in enumerate(self._index_to_param):
            state = self.split_optim.state.get(parameter) if is_split(parameter) else None
            if not state:
                continue
            # Every rank helps to put together what one of them keeps.
            whole = {name: _collect(value, parameter) for name, value in state.items()}
            if self.rank == to:
                self._split_states[index] = whole

    def state_dict(self: Any) -> dict[str, Any]:
        state_dict = super().state_dict()  # type: ignore[misc]
        state_dict["state"] = dict(sorted({**state_dict["state"], **self._split_states}.items()))
        return state_dict

    @torch.no_grad()
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        states = dict(state_dict["state"])
        for index, parameter in enumerate(self._index_to_param):
            if is_split(parameter):
                held = states.pop(index, None) or {}
                self.split_optim.state[parameter] = {
                    name: _relocate(value, parameter, f"{name} of parameter {index}") for name, value in held.items()
                }
        super().load_state_dict({**state_dict, "state": states})  # type: ignore[misc]
        self._sync_param_groups(self.param_groups, self.split_optim.param_groups)


def with_split_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of ``ZeroRedundancyOptimizer``, which adds :class:`SplitParameters` where they are needed.

    Optimizers of models without split parameters are exactly torch's.

    Args:
        original: torch's constructor.

    Returns:
        One that takes the same arguments. It raises ValueError where ``overlap_with_ddp=True`` is asked for with split
        parameters, as that updates parameters from DDP's buckets, where split ones are not.
    """

    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(params, (torch.Tensor, list)) and hasattr(params, "__iter__"):
            params = list(params)  # a generator can be read only once
        if isinstance(params, list) and any(is_split(parameter) for parameter in _listed(params)):
            given = inspect.signature(original).bind(self, params, *args, **kwargs).arguments
            if given.get("overlap_with_ddp"):
                raise ValueError(
                    "overlap_with_ddp=True was given for a model with split parameters: it updates parameters from "
                    "the buckets of DistributedDataParallel, which split ones are not in. Leave it out"
                )
            self.__class__ = _with_split_parameters(type(self))  # type: ignore[arg-type]
        original(self, params, *args, **kwargs)

    return __init__


@cache
def _with_split_parameters(optimizer_class: type) -> type:
    if issubclass(optimizer_class, SplitParameters):
        return optimizer_class
    return type(optimizer_class.__name__, (SplitParameters, optimizer_class), {})


def _listed(params: list[Any]) -> list[torch.Tensor]:
    """The parameters among `params`, which are parameters, or groups of them, or something for torch to refuse."""
    found: list[torch.Tensor] = []
    for entry in params:
        if isinstance(entry, dict):
            members = entry.get("params", [])
            if not isinstance(members, (torch.Tensor, list)):
                entry["params"] = members = list(members)
            found += [members] if isinstance(members, torch.Tensor) else members
        elif isinstance(entry, torch.Tensor):
            found.append(entry)
    return found


def _groups_of(param_groups: list[dict[str, Any]], *, split: bool) -> list[dict[str, Any]]:
    """The groups with all their settings, but only their split parameters, or only the others."""
    return [{**group, "params": [p for p in group["params"] if is_split(p) == split]} for group in param_groups]


def _collect(value: Any, parameter: torch.Tensor) -> Any:
    """A state of `parameter`, whole and on the CPU; step counts and the like as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    laid_out_alike = value.shape == parameter.shape
    return (gather_full(value, parameter) if laid_out_alike else value).detach().cpu().clone()


def _relocate(value: Any, parameter: torch.Tensor, what: str) -> Any:
    """This rank's part of what :func:`_collect` gave."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value.cpu() if isinstance(value, torch.Tensor) else value  # step counts stay there, as torch has it
    try:
        return own_shard(value, parameter).to(parameter.device)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


__all__ = ["SplitParameters", "ZeroRedundancyOptimizer", "with_split_parameters"]
