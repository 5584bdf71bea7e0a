"""Initial weights for a module on the meta device, if the code that built it is not known."""

from collections.abc import Callable

import torch
from torch import nn

from tensorshard.torch_private.modules import own_buffers, own_parameters, reset_method, set_buffer, set_parameter
from tensorshard.weights.initial.recording import Recording, record
from tensorshard.weights.initial.source import TensorSource, named_tensors

REMEDY = "pass the callable that builds the model, instead of a module on the meta device"


def from_meta(module: nn.Module, *, seed: int) -> TensorSource:
    """The values that a meta module's parts set themselves, by `reset_parameters` of those that hold tensors.

    That is PyTorch's convention for deferred initialisation. Children are reset before their parents, the
    order in which constructors finish. Tensors of the model that are not on the meta device keep their
    values.

    Known limit: whatever else the model's constructor did (`self.apply(init)`, scaling the weights of some
    layers, copying one weight to another) is not known here, and is lost. Where that matters, pass the
    callable.

    Args:
        module: A model with tensors on the meta device. It is changed in place and becomes the source's
            `module`.
        seed: Determines all random values.

    Raises:
        ValueError: A module holds tensors on the meta device but has no `reset_parameters`, or has one that
            leaves some of them unset.
    """
    blanks: list[tuple[nn.Module, str, torch.Tensor]] = []
    resets: list[Callable[[], object]] = []
    for path, owner in module.named_modules():
        held = [
            (owner, name, tensor)
            for name, tensor in (*own_parameters(owner).items(), *own_buffers(owner).items())
            if tensor.is_meta
        ]
        if held:
            blanks.extend(held)
            resets.append(_reset_method(owner, path, held[0][1]))
    names = [name for name, tensor in named_tensors(module) if tensor.is_meta]

    def build() -> nn.Module:
        made: dict[int, torch.Tensor] = {}  # a tied tensor is made once
        for owner, name, blank in blanks:
            if id(blank) not in made:
                made[id(blank)] = _with_memory(blank)
            put = set_parameter if name in own_parameters(owner) else set_buffer
            put(owner, name, made[id(blank)])
        for reset in reversed(resets):
            reset()
        return module

    source = record(build, seed=seed)
    if isinstance(source, Recording):
        for name in names:
            if not source.is_written(name):
                raise ValueError(f"no reset_parameters() of the model sets {name!r}; {REMEDY}")
    return source


def _reset_method(owner: nn.Module, path: str, tensor_name: str) -> Callable[[], object]:
    reset = reset_method(owner)
    if reset is None:
        raise ValueError(
            f"module {path!r} ({type(owner).__name__}) holds {tensor_name!r} on the meta device and has no "
            f"reset_parameters() that would initialise it; {REMEDY}"
        )
    return reset


def _with_memory(blank: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_strided(blank.size(), blank.stride(), dtype=blank.dtype, device="cpu")
    if isinstance(blank, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=blank.requires_grad)
    for name, value in vars(blank).items():
        setattr(tensor, name, value)
    return tensor
