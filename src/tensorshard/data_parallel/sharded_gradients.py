"""Gradients under FSDP2 where the ranks use different parameters, and FSDP2's state after a failed backward.

FSDP2 reduces the gradients that a rank has. A rank that did not use a parameter would send a shorter message than the
others, so here it sends zeros for it. A parameter that no rank used must end without a gradient, as on one device: with
a gradient of zeros, weight decay would change it. So the ranks count how many have used each parameter. FSDP2 ignores
parameters without dimensions; their gradients are averaged in the same message. So are those of parameters that were
read outside of their units, after the message has said which ones there are on any rank.
"""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.sharding import dtensor_like
from tensorshard.comm.world import world
from tensorshard.data_parallel.unit_calls import UnitCalls
from tensorshard.data_parallel.unit_values import WrittenShards
from tensorshard.plan.storage import TakeGradient
from tensorshard.torch_private.autograd import call_after_backward
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.fsdp import (
    has_gradient,
    members,
    parameter_groups,
    reduces_gradients,
    refresh_dtypes,
    sharded_parameter,
    surround_reduction,
    unsharded_parameter,
)

# In the message that counts: what a rank adds that read a parameter outside of its unit. One that used it adds 1.
_READ = float(1 << 24)

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)
_FROZEN = "One of the differentiated Tensors does not require grad"


class ShardedGradients:
    """Makes every rank of a model under FSDP2 reduce the same gradients.

    Args:
        model: after ``fully_shard``.
        masters: its parameters, by name.
        scalars: the parameters without dimensions, which FSDP2 ignores.
        group: the data ranks.
        device: where they send tensors from.

    Attributes:
        last: whether the gradients are complete after the next backward.
        take: called with each parameter whose gradient was reduced; None to leave them.
        finish: called before a gradient that was taken is added to, and at the end of each backward; None for nothing.
        calls: learns at the end of each step whether the ranks called different units.
        written: what user code wrote to parameters; None for nothing.
        writers: above 0 if some data rank has written any, when the last gradients were completed.
        after_backward: called at the end of each backward; None for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: Mapping[str, nn.Parameter],
        scalars: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._device = device
        self.last = True
        self.take: TakeGradient | None = None
        self.finish: Callable[[], None] | None = None
        self.after_backward: Callable[[], None] | None = None
        self.calls: UnitCalls | None = None
        self.written: WrittenShards | None = None
        self.writers: torch.Tensor | None = None
        self._group = group
        self._scalars = list(scalars)
        self._masters = list(masters.values())
        self._used: set[nn.Parameter] = set()  # since gradients were last cleared
        self._whole: dict[torch.Tensor, torch.Tensor] = {}  # sums of gradients that were not reduced with their unit's
        self._by_hand: dict[DTensor, torch.Tensor] = {}
        self._averaged: dict[nn.Parameter, torch.Tensor] = {}  # gradients of scalars as they were averaged
        self._leaves: dict[DTensor, list[weakref.ref[torch.Tensor]]] = {}
        self._in_backward = False
        groups = parameter_groups(model)
        self._members = {sharded_parameter(member): member for group in groups for member in members(group)}
        this = weakref.ref(self)  # else the model would never be freed
        for fsdp_group in groups:
            surround_reduction(fsdp_group, partial(_around_reduction, this))

    def forget(self) -> None:
        """Called after a failed backward."""
        self._in_backward = False
        self._used.clear()
        self._whole.clear()
        self._by_hand.clear()

    # -- gradients that FSDP2 does not see --

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds a whole `gradient` of this rank and this backward to the one that FSDP2 reduces."""
        self._enter_backward()
        before = self._whole.get(parameter)
        self._whole[parameter] = gradient if before is None else before + gradient

    def note_leaf(self, parameter: DTensor, leaf: torch.Tensor) -> None:
        """Notes a tensor that stands for the whole `parameter` in graphs."""
        living = [each for each in self._leaves.get(parameter, []) if each() is not None]
        self._leaves[parameter] = [*living, weakref.ref(leaf)]

    def set_by_hand(self, parameter: DTensor, gradient: torch.Tensor) -> None:
        """Notes a whole gradient of this rank that the user gave in place of the parameter's own."""
        parameter.grad = None
        vars(parameter)["_whole_gradient"] = gradient
        self._by_hand[parameter] = gradient

    @torch.no_grad()
    def average_by_hand(self) -> None:
        """Averages the gradients that the user gave, over the data ranks. A collective if there are any."""
        given = {p: vars(p).get("_whole_gradient") for p in self._by_hand}
        given = {p: gradient for p, gradient in given.items() if gradient is not None}
        self._by_hand.clear()
        mine = [s for s in self._scalars if s.numel() and s.grad is not None]  # empty ones are other ranks'
        scalars = {s for s in mine if s.grad is not self._averaged.get(s)}
        if not given and not scalars:
            return
        trained = self._trained()
        counts = self.sum_over_ranks([float(p in given or p in scalars) for p in trained])
        for parameter, count in zip(trained, counts, strict=True):
            if count < 0.5:
                continue
            if isinstance(parameter, DTensor):
                # That of an expert is the mean over the ranks that share it already.
                parameter.grad = averaged_shard(given.get(parameter), parameter, parameter.device_mesh.size())
            else:
                parameter.grad = averaged(parameter.grad, parameter, self._group)
                self._averaged[parameter] = parameter.grad
            self._used.add(parameter)

    def differentiate(self, arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad``, by parameters as well: their gradients are averaged over the data ranks."""

        def leaves_of(parameter: torch.Tensor) -> list[torch.Tensor]:
            if not isinstance(parameter, DTensor):
                return [parameter]
            full = unsharded_parameter(self._members[parameter])  # type: ignore[index]
            read = [leaf() for leaf in self._leaves.get(parameter, [])]
            return [leaf for leaf in (full, *read) if leaf is not None]

        return differentiate(arguments, set(self._masters), leaves_of, self._group, self.sum_over_ranks)

    # -- gradients of FSDP2's groups --

    def fill(self, fsdp_group: Any) -> None:
        """Gives those parameters of `fsdp_group` that have no gradient a gradient of zeros."""
        self._enter_backward()
        refresh_dtypes(fsdp_group)
        if self.finish is not None and any(sharded_parameter(m).grad is not None for m in members(fsdp_group)):
            self.finish()  # a unit that is used twice: this backward adds to gradients that were taken before
        for member in members(fsdp_group):
            unsharded = unsharded_parameter(member)
            if unsharded is None or not unsharded.requires_grad:
                continue
            if has_gradient(member):
                self._used.add(sharded_parameter(member))
            elif reduces_gradients(fsdp_group):
                unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            if self.calls is not None:
                self.calls.gradient_arrived()  # on all ranks, FSDP2's own end of the backward comes first
            self._used = {p for p in self._used if p.grad is not None}
            call_after_backward(self._end_backward)

    def reduced(self, fsdp_group: Any) -> None:
        """Called when the gradients of `fsdp_group` were reduced, if they were to be."""
        if self.take is not None:
            for member in members(fsdp_group):
                self.take(sharded_parameter(member))

    def _end_backward(self) -> None:
        self._complete()
        if self.finish is not None:
            self.finish()
        if self.after_backward is not None:
            self.after_backward()

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._masters if p.requires_grad]

    @torch.no_grad()
    def _complete(self) -> None:
        self._in_backward = False
        self._used.update(scalar for scalar in self._scalars if scalar.grad is not None)
        if not self.last:
            return
        trained = self._trained()
        scalars = [scalar for scalar in self._scalars if scalar.requires_grad and scalar.numel()]
        gradients = [0.0 if s.grad is None else s.grad for s in scalars]
        gradients.append(float(self.calls is not None and self.calls.differed))
        gradients.append(float(bool(self.written)))
        sums = self.sum_over_ranks([float(p in self._used) + _READ * (p in self._whole) for p in trained], gradients)
        self.writers = torch.tensor(sums.pop(), device=self._device)
        differed = sums.pop() > 0.5
        if self.calls is not None:
            self.calls.take_note(differed)
        for scalar, total in zip(scalars, sums[len(trained) :], strict=True):
            scalar.grad = torch.full_like(scalar, total / self._group.size())
            self._averaged[scalar] = scalar.grad
        for parameter, count in zip(trained, sums[: len(trained)], strict=True):
            if not isinstance(parameter, DTensor) and not parameter.numel():  # the same on ranks that used it or not
                if count > 0.5:
                    parameter.grad = self._averaged[parameter] = torch.zeros_like(parameter)
                else:
                    parameter.grad = None
            elif count >= _READ:
                assert isinstance(parameter, DTensor)
                average = averaged_shard(self._whole.get(parameter), parameter, self._group.size())
                parameter.grad = average if parameter.grad is None else parameter.grad + average
                self._used.add(parameter)
            elif count < 0.5:
                parameter.grad = None
        self._whole.clear()

    def sum_over_ranks(self, numbers: Sequence[float], scalars: Sequence[torch.Tensor | float] = ()) -> list[float]:
        """The sums of `numbers` over the data ranks, and those of `scalars`."""
        plain = [*numbers, *(0.0 if isinstance(s, torch.Tensor) else s for s in scalars)]
        message = torch.tensor(plain, dtype=torch.float64, device=self._device)
        for place, scalar in enumerate(scalars, start=len(numbers)):
            if isinstance(scalar, torch.Tensor):
                message[place] = scalar
        all_reduce_(message, self._group, what="which parameters were used")
        simulated = [*numbers, *(0.0 for _ in scalars)]  # whose ranks use the same parameters
        return world().known(message, simulated)  # type: ignore[no-any-return]


def _around_reduction(this: Any, fsdp_group: Any, original: Any, *args: Any) -> None:
    gradients = this()
    if gradients is not None:
        gradients.fill(fsdp_group)
    original(*args)
    if gradients is not None:
        gradients.reduced(fsdp_group)


def averaged_shard(gradient: torch.Tensor | None, parameter: DTensor, ranks: int) -> DTensor:
    """This rank's shard of the average of the data ranks' whole gradients. A collective.

    Args:
        gradient: this rank's; None for zeros.
    """
    mesh = parameter.device_mesh
    with without_torch_functions_of_tensors():
        if gradient is None:
            gradient = torch.zeros(parameter.shape, dtype=parameter.dtype, device=mesh.device_type)
        partial = DTensor.from_local(
            gradient.detach().to(mesh.device_type, parameter.dtype), mesh, [Partial()] * mesh.ndim, run_check=False
        )
        local = partial.redistribute(placements=parameter.placements).to_local()
        return dtensor_like((local / ranks).to(parameter.to_local().device), parameter)


def averaged(gradient: torch.Tensor | None, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The average of the data ranks' gradients by a `parameter` that is not sharded.

    A collective, unless it is empty, as an expert in a list is on ranks that have others.
    """
    if not parameter.numel():
        return torch.zeros_like(parameter)
    total = torch.zeros_like(parameter) if gradient is None else gradient.detach().clone()
    all_reduce_(total, group, what="a gradient")
    return total / group.size()


def differentiate(
    arguments: dict[str, Any],
    parameters: Container[torch.Tensor],
    leaves_of: Callable[[torch.Tensor], list[torch.Tensor]],
    group: dist.ProcessGroup,
    count: Callable[[Sequence[float]], list[float]],
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` where some inputs are `parameters`, whose gradients are averaged over the data ranks.

    Args:
        arguments: of ``torch.autograd.grad``, by name.
        leaves_of: the tensors that stand for a parameter in graphs.
        group: the data ranks.
        count: sums numbers over them.

    Raises:
        RuntimeError: as torch raises it; or the gradients would have to be differentiable, or batched.
    """
    inputs: Sequence[torch.Tensor] = arguments["inputs"]
    for field, value in (
        ("create_graph", arguments.get("create_graph")),
        ("is_grads_batched", arguments.get("is_grads_batched")),
    ):
        if value:
            raise RuntimeError(
                f"torch.autograd.grad was called with {field}=True by parameters that zero=3 shards, whose gradients "
                f"are averaged over the ranks, outside of the graph: use zero=2, where they are plain tensors, or give "
                f"the model plain weights of yours by torch.func.functional_call, and differentiate by those"
            )
    if not all(one.requires_grad for one in inputs):
        raise RuntimeError(_FROZEN)
    leaves = [leaves_of(one) if one in parameters else [one] for one in inputs]
    flat = [leaf for each in leaves for leaf in each if leaf.requires_grad]
    plain = {"materialize_grads": False, "allow_unused": True, "inputs": flat}
    gradients = iter(torch.autograd.grad(**{**arguments, **plain}) if flat else ())
    sums: list[torch.Tensor | None] = []
    for each in leaves:
        parts = [part for leaf in each if leaf.requires_grad and (part := next(gradients)) is not None]
        sums.append(sum(parts[1:], start=parts[0]) if parts else None)
    used = count([float(each is not None) for each in sums])
    materialize = arguments.get("materialize_grads", False)
    if any(number < 0.5 for number in used) and not (materialize or arguments.get("allow_unused")):
        raise RuntimeError(_UNUSED)
    results: list[torch.Tensor | None] = []
    for one, total, number in zip(inputs, sums, used, strict=True):
        if number < 0.5:
            results.append(torch.zeros_like(one) if materialize else None)
        elif one not in parameters:
            results.append(total)
        elif isinstance(one, DTensor):
            shard = averaged_shard(total, one, group.size())
            shard.__class__ = type(one)
            results.append(shard)
        else:
            results.append(averaged(total, one, group))
    return tuple(results)
