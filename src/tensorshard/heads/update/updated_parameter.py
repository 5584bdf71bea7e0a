"""Parameters that have no gradient because backward updates them itself."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.heads.update.head_sgd import HeadSGD
from tensorshard.torch_private.dtensor import local_tensor, parameter_of_class

_REFUSAL = (
    "a head built with update= changes its weight during backward: there is no .grad, so what needs one "
    "(clip_grad_norm_, a GradScaler, another optimizer, gradient hooks) would leave the head out. Build the head "
    "without update= to use it; or pass it the other parameters, and call head.optimizer.step() at the end of each "
    "step"
)


class _Updated:
    """Refuses to be asked for a gradient after a backward pass, until the head's optimizer has made its step."""

    _optimizer: HeadSGD | None = None

    @property
    def grad(self) -> None:
        if self._optimizer is not None and self._optimizer.gradient_went_by:
            raise RuntimeError(_REFUSAL)

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise RuntimeError(_REFUSAL)


class UpdatedParameter(_Updated, nn.Parameter):  # type: ignore[misc]
    """A plain one."""


class UpdatedDTensor(_Updated, DTensor):  # type: ignore[misc]
    """One that is split."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "UpdatedDTensor":
        if id(self) not in memo:
            memo[id(self)] = _split(local_tensor(self).clone(), self)
        return memo[id(self)]


def without_grad(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that shares the memory of `parameter`, for a head that updates it: it requires no gradient."""
    if not isinstance(parameter, DTensor):
        return UpdatedParameter(parameter.detach(), requires_grad=False)
    return _split(local_tensor(parameter).detach(), parameter)


def as_torch_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The reverse of `without_grad`, but that it still does not require a gradient."""
    held = parameter.detach()  # a DTensor, of the class itself, or a tensor
    return nn.Parameter(held, requires_grad=False)


def refuse_grad_when(parameter: nn.Parameter, optimizer: HeadSGD) -> None:
    """Makes reading ``parameter.grad`` an error between a backward pass and the optimizer's step."""
    parameter._optimizer = optimizer  # type: ignore[attr-defined]


def _split(local: torch.Tensor, like: DTensor) -> Any:
    """A split parameter of the layout of `like`."""
    return parameter_of_class(UpdatedDTensor, local, like)
