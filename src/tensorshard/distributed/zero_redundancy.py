"""torch's ``ZeroRedundancyOptimizer`` on models of which some parameters are split.

torch's class gives each parameter to one rank, which updates it and sends it to the others. For a split parameter that
is wrong: each rank has a different part, which would be overwritten. So split parameters are left out. Each rank
updates its own parts and keeps the optimizer's states for them, which takes no more memory than ZeRO would.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharded_tensors import gather_full, is_split, own_part, own_shard


class SplitParameters:
    """Mixed into a ``ZeroRedundancyOptimizer``: a second local optimizer for this rank's parts of split parameters.

    torch's class gives parameters to ranks when it is built and when a group is added. Only then is it shown a
    ``param_groups`` without the split parameters. At all other times ``param_groups`` has all parameters, since
    schedulers, scalers and state dicts read it. A consolidated state has the full states of split parameters. It is
    the state of a model without parallel layers, and can be loaded on any number of ranks.
    """

    split_optim: Optimizer

    def add_split_parameters(
        self: Any, groups: list[list[torch.Tensor]], optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]
    ) -> None:
        """Called once, when the other parameters have been given to ranks.

        Args:
            groups: all parameters of each group, split and others.
            optimizer_class: makes a local optimizer from parameter groups and `defaults`.
        """
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"] = parameters
        # In groups, as torch does it: an optimizer accepts an empty group, but not an empty list of parameters.
        self.split_optim = optimizer_class(_groups_of(self.param_groups, split=True), **defaults)
        self._split_states: dict[int, dict[str, Any]] = {}
        self.register_step_post_hook(_step_split_parameters)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if not self.initialized or isinstance(param_group["params"], set):  # torch refuses a set
            super().add_param_group(param_group)  # type: ignore[misc]
            return
        added = _listed([param_group])
        known = {id(parameter) for parameter in _listed(self.param_groups)}
        if any(id(parameter) in known for parameter in added):
            raise ValueError("some parameters appear in more than one parameter group")
        groups = [*(group["params"] for group in self.param_groups), added]
        others = _groups_of([*self.param_groups, param_group], split=False)
        for group, shown in zip(self.param_groups, others, strict=False):
            group["params"] = shown["params"]
        try:
            super().add_param_group(others[-1])  # type: ignore[misc]
        finally:
            for group, parameters in zip(self.param_groups, groups, strict=False):
                group["params"] = parameters
        self.split_optim.add_param_group(_groups_of(self.param_groups[-1:], split=True)[0])

    @torch.no_grad()
    def consolidate_state_dict(self: Any, to: int = 0) -> None:
        super().consolidate_state_dict(to)  # type: ignore[misc]
        self._split_states = {}
        for index, parameter in enumerate(_listed(self.param_groups)):
            state = self.split_optim.state.get(parameter) if is_split(parameter) else None
            if not state:
                continue
            # Every rank takes part in the gather; the rank `to` keeps the result.
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
        for index, parameter in enumerate(_listed(self.param_groups)):
            if is_split(parameter):
                held = states.pop(index, None) or {}
                self.split_optim.state[parameter] = {
                    name: _relocate(value, parameter, f"{name} of parameter {index}") for name, value in held.items()
                }
        super().load_state_dict({**state_dict, "state": states})  # type: ignore[misc]
        _copy_settings(self.param_groups, self.split_optim.param_groups)


def _step_split_parameters(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs after each step of the other parameters. That step has called the closure, if there is one."""
    _copy_settings(optimizer.param_groups, optimizer.split_optim.param_groups)
    optimizer.split_optim.step(**{name: value for name, value in kwargs.items() if name != "closure"})


def with_split_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of ``ZeroRedundancyOptimizer``: it adds :class:`SplitParameters` if some are split.

    Optimizers of models without split parameters are exactly torch's.

    Args:
        original: torch's constructor.

    Returns:
        A constructor with the same arguments. It raises ValueError for ``overlap_with_ddp=True`` with split parameters:
        that option updates the parameters in DDP's buckets, and split ones are in none.
    """

    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(params, (torch.Tensor, list)) and hasattr(params, "__iter__"):
            params = list(params)  # a generator can be read only once
        if not _are_parameters_or_groups(params) or not any(is_split(parameter) for parameter in _listed(params)):
            original(self, params, *args, **kwargs)
            return
        call = inspect.signature(original).bind(self, params, *args, **kwargs)
        if call.arguments.get("overlap_with_ddp"):
            raise ValueError(
                "overlap_with_ddp=True was given for a model with split parameters: it updates parameters from "
                "the buckets of DistributedDataParallel, which split ones are not in. Leave it out"
            )
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        everything = [_listed([group]) for group in groups]
        others = _groups_of(groups, split=False)
        if not any(group["params"] for group in others):  # torch needs at least one parameter
            others[0]["params"] = [nn.Parameter(torch.zeros(1, device=everything[0][0].device), requires_grad=False)]
        self.__class__ = _with_split_parameters(type(self))  # type: ignore[arg-type]
        original(self, others, *args, **kwargs)
        self.add_split_parameters(everything, call.arguments["optimizer_class"], call.arguments.get("defaults", {}))

    return __init__


@cache
def _with_split_parameters(optimizer_class: type) -> type:
    if issubclass(optimizer_class, SplitParameters):
        return optimizer_class
    return type(optimizer_class.__name__, (SplitParameters, optimizer_class), {})


def _listed(params: list[Any]) -> list[torch.Tensor]:
    """The parameters among `params`, which are parameters, or groups of them, or something for torch to refuse."""
    parameters: list[torch.Tensor] = []
    for entry in params:
        if isinstance(entry, dict):
            members = entry.get("params", [])
            if not isinstance(members, (torch.Tensor, list)):
                entry["params"] = members = list(members)
            parameters += [members] if isinstance(members, torch.Tensor) else members
        elif isinstance(entry, torch.Tensor):
            parameters.append(entry)
    return parameters


def _are_parameters_or_groups(params: Any) -> bool:
    """Whether `params` is a list of one or the other; anything else torch refuses."""
    if not isinstance(params, list):
        return False
    of_groups = all(isinstance(entry, dict) and "params" in entry for entry in params)
    return of_groups or all(isinstance(entry, torch.Tensor) for entry in params)


def _groups_of(param_groups: list[dict[str, Any]], *, split: bool) -> list[dict[str, Any]]:
    """The groups with all their settings, but only their split parameters, or only the others."""
    return [{**group, "params": [p for p in _listed([group]) if is_split(p) == split]} for group in param_groups]


def _copy_settings(source: list[dict[str, Any]], destination: list[dict[str, Any]]) -> None:
    """Copies what parameter groups have besides their parameters, such as learning rates."""
    for given, taking in zip(source, destination, strict=True):
        taking.update({name: value for name, value in given.items() if name != "params"})


def _collect(value: Any, parameter: torch.Tensor) -> Any:
    """A state of `parameter`, in full and on the CPU; step counts and the like as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    laid_out_alike = value.shape == parameter.shape
    return (gather_full(value, get_mark(parameter)) if laid_out_alike else value).detach().cpu().clone()


def _relocate(value: Any, parameter: torch.Tensor, what: str) -> Any:
    """This rank's part of what :func:`_collect` gave."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value.cpu() if isinstance(value, torch.Tensor) else value  # torch keeps step counts on the CPU
    value = own_part(value, parameter, what)
    if value.shape == parameter.shape:
        return value.to(parameter.device)
    try:
        return own_shard(value, get_mark(parameter), parameter).to(parameter.device)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


__all__ = ["SplitParameters", "ZeroRedundancyOptimizer", "with_split_parameters"]
