"""A model's skeleton that has the parameters and buffers of one stage alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tensorshard.comm.world import world
from tensorshard.common.dotted_names import is_inside
from tensorshard.model.copies import copy_module
from tensorshard.model.fake_copies import keep_padding
from tensorshard.model.parameters import buffer_aliases, parameter_aliases
from tensorshard.model.references import update_references
from tensorshard.pipeline.run.absent_tensors import AbsentTensor
from tensorshard.torch_private.modules import own_buffers, own_parameters


@dataclass(frozen=True)
class Removed:
    """A parameter or buffer that was taken from `owner`, where code may still ask for its shape, type and device.

    Args:
        path: its first name in the model.
    """

    path: str
    owner: nn.Module
    name: str
    shape: torch.Size
    dtype: torch.dtype
    shown: list[torch.Tensor]  # what other places of it hold now

    def show(self, value: torch.Tensor) -> None:
        """Puts `value` in its place, and in the other places of the tensor that was there."""
        vars(self.owner)[self.name] = value
        update_references(self.owner, self.name, self.shown[0], value)
        self.shown[0] = value

    def put_own_placeholder(self, device: torch.device) -> None:
        """Puts a tensor of its shape there that is not a parameter, and that code may write into."""
        self.show(torch.zeros(self.shape, dtype=self.dtype, device=device))


def put_placeholders(
    removed: Iterable[Removed],
    device: torch.device,
    *,
    computes: Callable[[], bool] | None = None,
    sentence: Callable[[str], str] | None = None,
) -> None:
    """Puts a tensor of its shape, with one element in memory, in the place of each. Those of one shape share it.

    Args:
        computes: says whether the stage computes now; at other times reading the tensors raises. None for plain zeros.
        sentence: what the error says of a path.
    """
    made: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    guarded = computes is not None and sentence is not None and not world().is_simulated
    for each in removed:
        key = (each.shape, each.dtype)
        if key not in made:
            made[key] = torch.zeros((), dtype=each.dtype, device=device).expand(each.shape)
        plain = made[key]
        if guarded:
            assert computes is not None and sentence is not None
            each.show(AbsentTensor.make(plain, computes, partial(sentence, each.path)))
        else:
            each.show(plain.detach())  # an object of its own, which its other places hold


def skeleton(model: nn.Module, keep: frozenset[str], stubs: set[str]) -> tuple[nn.Module, list[Removed]]:
    """A copy of `model`'s modules, under their names, with some of its own parameters and buffers.

    Tensors that are kept are the model's own, not copies, so that ties are kept.

    Args:
        keep: first names of the parameters to keep, and of buffers to keep in stubs. Each is kept at all of its places.
        stubs: names of modules that lose their buffers, unless these modules have another name outside of the stubs.
    """
    copied = copy_module(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    keep_padding(copied)
    removed: list[Removed] = []
    aliases = parameter_aliases(copied) | buffer_aliases(copied)
    inside = {path: is_inside(path, stubs) for path, _ in copied.named_modules(remove_duplicate=False)}
    kept = {module for path, module in copied.named_modules(remove_duplicate=False) if not inside[path]}
    for path, module in copied.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in own_parameters(module).items():
            if aliases[prefix + name] not in keep:
                removed.append(_remove(aliases[prefix + name], module, name, parameter))
        if module not in kept:
            for name, buffer in own_buffers(module).items():
                if aliases[prefix + name] not in keep:
                    removed.append(_remove(aliases[prefix + name], module, name, buffer))
    put_placeholders(removed, torch.device("meta"))
    return copied, removed


def _remove(path: str, module: nn.Module, name: str, tensor: torch.Tensor) -> Removed:
    nn.Module.__delattr__(module, name)
    return Removed(path, module, name, tensor.shape, tensor.dtype, [tensor])
