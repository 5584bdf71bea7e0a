"""Parameters that have no gradient because backward updates them itself."""

from typing import Any

from torch import nn

from tensorshard.loss.heads.update.head_sgd import HeadSGD

_REFUSAL = (
    "a head built with update= changes its weight during backward: there is no .grad, so what needs one "
    "(clip_grad_norm_, a GradScaler, another optimizer, gradient hooks) would leave the head out. Build the head "
    "without update= to use it; or pass it the other parameters, and call head.optimizer.step() at the end of each "
    "step"
)


class UpdatedParameter(nn.Parameter):
    """A parameter whose ``.grad`` raises an error after a backward pass, until the head's optimizer has made its
    step."""

    _optimizer: HeadSGD | None = None

    @property
    def grad(self) -> None:  # type: ignore[override]
        if self._optimizer is not None and self._optimizer.gradient_went_by:
            raise RuntimeError(_REFUSAL)

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise RuntimeError(_REFUSAL)


def without_grad(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that shares the memory of `parameter` and requires no gradient, for a head that updates it."""
    return UpdatedParameter(parameter.detach(), requires_grad=False)


def as_torch_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The reverse of `without_grad`, except that the result does not require a gradient either."""
    return nn.Parameter(parameter.detach(), requires_grad=False)


def refuse_grad_when(parameter: nn.Parameter, optimizer: HeadSGD) -> None:
    """Makes reading ``parameter.grad`` an error between a backward pass and the optimizer's step."""
    parameter._optimizer = optimizer  # type: ignore[attr-defined]
