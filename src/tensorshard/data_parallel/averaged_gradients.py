"""``torch.autograd.grad`` by parameters: each data rank gets the average of all of them, as one process has it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.differentiable import copy, reduce
from tensorshard.comm.world import world
from tensorshard.data_parallel.zero_parameter import ZeroParameter
from tensorshard.model.watched_parameters import InUsersCode, Pause, Watch, watch
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors


class AveragesGradients(Watch):
    """Makes ``torch.autograd.grad`` by a parameter give the average over the data ranks.

    Args:
        known: all parameters of the model, by what forwards compute with; nothing if no other rank holds them.
    """

    def __init__(self, known: Mapping[nn.Parameter, ZeroParameter]) -> None:
        self._known = known

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if function is not torch.autograd.grad or not self._known or is_in_backward():
            return NotImplemented
        return differentiate(args, kwargs, self._known)


class AveragedInUsersCode(InUsersCode):
    """:class:`AveragesGradients` of parameters that are in memory at any time, in the user's code alone."""

    def __init__(self, known: Mapping[nn.Parameter, ZeroParameter]) -> None:
        super().__init__()
        watching, plain = AveragesGradients(known), [compute for compute, p in known.items() if not p.releases]
        for compute in plain:
            watch(compute, watching)
        self._pause = Pause(plain)

    def switch(self, users_code: bool) -> None:
        (self._pause.end if users_code else self._pause.begin)()


_ARGUMENTS = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


def differentiate(args: Any, kwargs: Mapping[str, Any], known: Mapping[nn.Parameter, ZeroParameter]) -> Any:
    """``torch.autograd.grad(*args, **kwargs)``, where gradients by parameters are averaged over the ranks that hold
    them. They are part of the graph if the caller says so. A collective.

    Args:
        known: the parameters of a model, by what forwards compute with.

    Raises:
        RuntimeError: as torch raises it; a parameter counts as used if some rank used it.
    """
    arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    inputs = arguments["inputs"]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    materialize = arguments.get("materialize_grads") or False
    plain = {**arguments, "inputs": inputs, "allow_unused": True, "materialize_grads": False}
    with without_torch_functions_of_tensors():
        gradients = list(torch.autograd.grad(**plain))
        of_parameters = [(index, known[one]) for index, one in enumerate(inputs) if one in known]
        used = _used_by([(p, gradients[index] is not None) for index, p in of_parameters])
        for (index, p), is_used in zip(of_parameters, used, strict=True):
            if is_used:
                gradients[index] = _average(gradients[index], inputs[index], p, arguments)
        if not (materialize or arguments.get("allow_unused")) and any(gradient is None for gradient in gradients):
            raise RuntimeError(_UNUSED)
        if materialize:
            gradients = [
                torch.zeros_like(one) if gradient is None else gradient
                for one, gradient in zip(inputs, gradients, strict=True)
            ]
    return tuple(gradients)


def _used_by(flags: list[tuple[ZeroParameter, bool]]) -> list[bool]:
    """For each, whether some rank that holds the parameter has its flag."""
    counts: dict[ZeroParameter, float] = {}
    for group in {id(p.groups.all): p.groups.all for p, _ in flags if p.groups.all is not None}.values():
        members = [(p, flag) for p, flag in flags if p.groups.all is group]
        mine = [float(flag) for _, flag in members]
        message = torch.tensor(mine, device=members[0][0].storage.device)
        all_reduce_(message, group, what="which parameters were used")
        counts.update(zip((p for p, _ in members), world().known(message, mine), strict=True))
    return [counts.get(p, float(flag)) > 0 for p, flag in flags]


def _average(
    gradient: torch.Tensor | None, parameter: torch.Tensor, p: ZeroParameter, arguments: Mapping[str, Any]
) -> torch.Tensor:
    if gradient is None:
        batch: tuple[int, ...] = ()
        if arguments.get("is_grads_batched"):
            given = arguments["grad_outputs"]
            batch = (given if isinstance(given, torch.Tensor) else given[0]).shape[:1]
        gradient = torch.zeros((*batch, *parameter.shape), dtype=parameter.dtype, device=parameter.device)
    if p.groups.all is None:
        return gradient
    ranks = p.groups.all.size()  # of an expert, those that hold it: each has the terms of all that share it
    if arguments.get("create_graph"):
        # Each rank's later loss depends on every rank's gradient: the sum's backward is a sum as well.
        return copy(reduce(gradient, p.groups.all), p.groups.all) / ranks
    total = gradient.detach().clone(memory_format=torch.contiguous_format)
    all_reduce_(total, p.groups.all, what=f"the gradient of {p.name}")
    return total.div_(ranks)
