"""Finds out whether an optimizer updates each parameter by itself, and which states it keeps, on small parameters."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

_LARGEST = 3  # size of each dimension
_STEPS = 2
_COMPARED = 4  # parameters of each group


def probe_states(
    build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], masters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.dtype]]:
    """The states of a parameter's own shape that an optimizer keeps for each of `masters`, by their keys.

    Args:
        build: makes the optimizer of the parameters that it is given.

    Raises:
        ValueError: the update of one parameter depends on another parameter.
    """
    together, names = _small(build, masters)
    apart, _ = _small(build, masters)
    kind = type(together).__name__
    refused = f"offload moves the states of one parameter at a time, but {kind} couples parameters: "
    remedy = (
        "; use an optimizer that updates each parameter by itself (torch's Adam, AdamW, SGD, Adagrad, RMSprop and the "
        "like), or offload=None"
    )
    try:
        compared = []
        for group in together.param_groups:
            compared += group["params"][:_COMPARED]
        twin = {
            p: q
            for a, b in zip(together.param_groups, apart.param_groups, strict=True)
            for p, q in zip(a["params"], b["params"], strict=True)
        }
        for _ in range(_STEPS):
            _set_gradients(compared)
            gradients = {p: p.grad.clone() for p in compared if p.grad is not None}  # some change them in place
            together.step()
            for parameter, gradient in gradients.items():
                twin[parameter].grad = gradient
                apart.step()
                twin[parameter].grad = None
    except Exception as error:
        raise ValueError(f"{refused}its step fails on small tensors ({error}){remedy}") from error
    for parameter in compared:
        if not torch.equal(parameter, twin[parameter]):
            raise ValueError(f"{refused}{names[parameter]!r} becomes another when it is updated alone{remedy}")
    _set_gradients(names)
    together.step()
    return {name: _states(together, parameter) for parameter, name in names.items()}


def _small(
    build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], masters: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[nn.Parameter, str]]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(
            torch.randn([min(size, _LARGEST) for size in master.shape], generator=generator, dtype=master.dtype)
        )
        for name, master in masters.items()
    }
    return build(parameters), {parameter: name for name, parameter in parameters.items()}


def _set_gradients(parameters: Iterable[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.dtype]:
    return {
        key: value.dtype
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }
