"""Tensors whose values belong elsewhere: what is written to them is written there."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import storage_address, tensor_version


class Source:
    """Values that are held in another form, and one tensor of them.

    Args:
        base: the tensor.
        version: counts the changes of them where they are held.
        read: makes a tensor such as `base` from it.
        write: stores such a tensor in it.
    """

    def __init__(
        self,
        base: torch.Tensor,
        version: Callable[[], int],
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
    ) -> None:
        self.base = base
        self._version, self._read, self._write = version, read, write
        self._graph = base.grad_fn
        self._note()

    def _note(self) -> None:
        self._versions = tensor_version(self.base), self._version()

    @torch.no_grad()
    def refresh(self) -> None:
        """Reads the values again if they were changed where they are held."""
        if self._version() != self._versions[1] and not self.base.requires_grad:
            self.base.copy_(self._read())
            self._note()

    @torch.no_grad()
    def store(self) -> None:
        """Stores the values if the tensor was changed.

        Raises:
            RuntimeError: autograd records the change. torch refuses it, too, for leaves.
        """
        if tensor_version(self.base) == self._versions[0]:
            return
        if self.base.grad_fn is not self._graph:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: write to parameters under "
                "torch.no_grad()"
            )
        self._write(self.base)
        self._note()

    def shown(self, result: Any) -> Any:
        """`result`, with those tensors in it that share memory with the base as :class:`WrittenThrough`."""
        if isinstance(result, torch.Tensor):
            return WrittenThrough.of(result, self) if self._shares_memory(result) else result
        if type(result) in (tuple, list):
            return type(result)(map(self.shown, result))
        return result

    def _shares_memory(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        return storage_address(tensor.untyped_storage()) == storage_address(self.base.untyped_storage())


class WrittenThrough(torch.Tensor):
    """A view of a :class:`Source`'s tensor. Changes in place reach the place where the values are held."""

    _plain: torch.Tensor
    _source: Source

    @classmethod
    def of(cls, plain: torch.Tensor, source: Source) -> "WrittenThrough":
        """`plain`, a view of the tensor of `source`."""
        shown = plain.as_subclass(cls)
        shown._plain, shown._source = plain, source
        return shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = {id(leaf._source): leaf._source for leaf in _shown((args, kwargs))}
        for source in sources.values():
            source.refresh()
        given, options = tree_map_only(WrittenThrough, lambda leaf: leaf._plain, (tuple(args), kwargs))
        return run(func, given, options, sources.values(), {id(leaf._plain): leaf for leaf in _shown((args, kwargs))})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    sources: Iterable[Source],
    same: Mapping[int, torch.Tensor],
) -> Any:
    """``function(*args, **kwargs)`` on the tensors of `sources`. What it changes is stored.

    Args:
        same: what to return in place of an argument, by the argument's ``id``.
    """
    # `.data` would have a version of its own.
    result = (torch.Tensor.detach if function == _DATA else function)(*args, **kwargs)
    for source in sources:
        source.store()
    if id(result) in same:
        return same[id(result)]
    for source in sources:
        result = source.shown(result)
    return result


def _shown(tree: Any) -> list[WrittenThrough]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, WrittenThrough)]


_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
