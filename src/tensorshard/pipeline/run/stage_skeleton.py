"""A model's skeleton that has the parameters and buffers of one stage alone; stand-ins for those of other ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.comm.world import world
from tensorshard.common.words import is_inside
from tensorshard.model.copies import copy_module
from tensorshard.model.fake_copies import keep_padding
from tensorshard.model.parameters import buffer_aliases, parameter_aliases
from tensorshard.model.references import update_references
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.modules import own_buffers, own_parameters
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only

# Properties and methods that say what a tensor is like, without its values.
_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu", "is_meta", "is_leaf",
    "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "grad_fn",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "get_device", "type", "__len__",
)  # fmt: skip
_ALLOWED = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)


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


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


class AbsentTensor(torch.Tensor):
    """Has the shape, type and device of a tensor that this rank does not have. Reading or writing its values raises.

    While a stage computes, code between its units may compute with it: what comes out is used on no stage.

    Attributes:
        is_absent: that it has no values of its own, which code for any tensor may ask.
        plain: zeros of its shape, with one element in memory.
        computes: says whether the stage computes now.
        sentence: what the error says.
    """

    is_absent = True
    plain: torch.Tensor
    computes: Callable[[], bool]
    sentence: Callable[[], str]

    @staticmethod
    def make(plain: torch.Tensor, computes: Callable[[], bool], sentence: Callable[[], str]) -> "AbsentTensor":
        made = plain.detach().as_subclass(AbsentTensor)
        made.plain, made.computes, made.sentence = plain, computes, sentence
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stand_in = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentTensor))
        if func not in _ALLOWED and not stand_in.computes() and not is_in_backward():
            raise RuntimeError(stand_in.sentence())
        if args and args[0] is stand_in and _writes(func):
            return stand_in  # the stages that have it write to it, too
        args, kwargs = tree_map_only(AbsentTensor, lambda tensor: tensor.plain, (args, kwargs))
        return func(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> "AbsentTensor":
        """Does nothing: the rank that holds the tensor does it, and a script says the same on all ranks."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.sentence()}>"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(self.sentence())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(self.sentence())
