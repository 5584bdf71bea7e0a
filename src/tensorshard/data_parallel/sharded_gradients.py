"""Gradients under FSDP2 where the ranks use different parameters, and FSDP2's state after a failed backward.

FSDP2 reduces the gradients that a rank has. A rank that did not use a parameter would send a shorter message than the
others, so here it sends zeros for it. A parameter that no rank used must end without a gradient, as on one device: with
a gradient of zeros, weight decay would change it. So the ranks count how many have used each parameter. FSDP2 ignores
parameters without dimensions; their gradients are averaged in the same message.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.sharded_model import TakeGradient
from tensorshard.torch_private.autograd import call_after_backward
from tensorshard.torch_private.fake_tensors import detect_fake_mode
from tensorshard.torch_private.fsdp import parameter_groups, unsharded_parameter


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
        self._group = group
        self._scalars = [scalar for scalar in scalars if scalar.requires_grad]
        self._trained = [p for p in masters.values() if p.requires_grad]
        self._used: set[nn.Parameter] = set()  # since gradients were last cleared
        self._apart: dict[nn.Parameter, torch.Tensor] = {}  # sums of gradients that were not reduced with their unit's
        self._in_backward = False
        this = weakref.ref(self)  # else the model would never be freed
        for fsdp_group in parameter_groups(model):
            fsdp_group.post_backward = partial(_post_backward, this, fsdp_group, fsdp_group.post_backward)

    def forget(self) -> None:
        """Called after a failed backward."""
        self._in_backward = False
        self._used.clear()
        self._apart.clear()

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a `gradient` of this backward, already summed over the data ranks, to the one that FSDP2 reduces."""
        self._enter_backward()
        before = self._apart.get(parameter)
        self._apart[parameter] = gradient if before is None else before + gradient

    def fill(self, fsdp_group: Any) -> None:
        """Gives those parameters of `fsdp_group` that have no gradient a gradient of zeros."""
        self._enter_backward()
        if self.finish is not None and any(p.sharded_param.grad is not None for p in fsdp_group.fsdp_params):
            self.finish()  # a unit that is used twice: this backward adds to gradients that were taken before
        for fsdp_param in fsdp_group.fsdp_params:
            unsharded = unsharded_parameter(fsdp_param)
            if unsharded is None or not unsharded.requires_grad:
                continue
            if unsharded.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
                self._used.add(fsdp_param.sharded_param)
            elif fsdp_group.reduce_grads:
                unsharded.grad = torch.zeros_like(unsharded)

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._used = {p for p in self._used if p.grad is not None}
            call_after_backward(self._end_backward)

    def reduced(self, fsdp_group: Any) -> None:
        """Called when the gradients of `fsdp_group` were reduced, if they were to be."""
        if self.take is not None:
            for fsdp_param in fsdp_group.fsdp_params:
                self.take(fsdp_param.sharded_param)

    def _end_backward(self) -> None:
        self._complete()
        if self.finish is not None:
            self.finish()

    @torch.no_grad()
    def _complete(self) -> None:
        self._in_backward = False
        for parameter, gradient in self._apart.items():
            average = (gradient / self._group.size()).to(parameter.device)
            parameter.grad = average if parameter.grad is None else parameter.grad + average
        self._used.update(self._apart)
        self._apart.clear()
        self._used.update(scalar for scalar in self._scalars if scalar.grad is not None)
        if not self.last:
            return
        sums = [float(p in self._used) for p in self._trained]
        message = torch.tensor(sums, dtype=torch.float64, device=self._device)
        gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in self._scalars]
        message = torch.cat([message, *(gradient.double().view(1) for gradient in gradients)])
        all_reduce_(message, self._group, what="which parameters were used")
        for scalar, total in zip(self._scalars, message[len(sums) :], strict=True):
            scalar.grad = (total / self._group.size()).to(scalar.dtype)
        alike = detect_fake_mode(message) is not None  # fake tensors have no numbers, and fake ranks are alike
        for parameter, count in zip(self._trained, sums if alike else message[: len(sums)].tolist(), strict=True):
            if count < 0.5:
                parameter.grad = None


def _post_backward(this: Any, fsdp_group: Any, original: Any, *args: Any) -> None:
    gradients = this()
    if gradients is not None:
        gradients.fill(fsdp_group)
    original(*args)
    if gradients is not None:
        gradients.reduced(fsdp_group)
