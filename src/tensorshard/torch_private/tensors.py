"""A tensor's memory, version and kind, and when storages are resized.

Also here: references by a storage's and by an object's identity, that keep neither.

Why: what is known of a tensor is kept as long as the tensor, or its memory, whatever it equals.

Checked: torch 2.13 and 2.15.

Public way: ``weakref`` for tensors, but not as keys, which are compared; none for storages, whose Python objects
differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils import weak
from torch.utils.hooks import RemovableHandle

StorageWeakRef = reductions.StorageWeakRef
WeakIdKeyDictionary = weak.WeakIdKeyDictionary

PARAMETER_FLAG = "_is_param"
"""A key in a tensor's ``__dict__`` that makes it count as an ``nn.Parameter``, see :func:`mark_as_parameter`."""

_VERSION = attrgetter("_version")

QUESTIONS = ("_is_view", "_has_compatible_shallow_copy_type")
"""Names of functions by which torch's own Python code asks what kind of tensor one is, without reading values."""


_OBJECT_ATTRIBUTES = (
    *("requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_quantized", "is_mkldnn", "is_nested", "is_sparse_csr", "is_xpu", "is_mps", "is_mtia", "is_xla", "names"),
    *("output_nr", "retains_grad", "name", "_version", "_base", "_cdata", "_grad", "_backward_hooks"),
    "_post_accumulate_grad_hooks",
)


def storage_address(storage: torch.UntypedStorage) -> int:
    """The same number for all tensors on one storage, as long as it exists; also for fake and meta tensors.

    Why: tensorshard also has to know which fake tensors share memory, whose ``data_ptr()`` is 0 or an error.

    Checked: torch 2.13 and 2.15.

    Public way: ``storage.data_ptr()``, for tensors with memory that is not empty.
    """
    return storage._cdata


def set_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Makes `tensor` one of `kind`, a Python class, the same object with the same memory.

    Why: whoever holds the tensor, as optimizers and hooks do, has it as a rank's part from then on, or as watched.

    Checked: torch 2.13 and 2.15, between classes that are written in Python.

    Public way: none; ``Tensor.as_subclass`` makes another object.
    """
    tensor.__class__ = kind  # type: ignore[assignment]


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are on one storage; also for fake and meta tensors.

    Why: as for :func:`storage_address`.

    Checked: torch 2.13 and 2.15.

    Public way: as for :func:`storage_address`.
    """
    return storage_address(one.untyped_storage()) == storage_address(other.untyped_storage())


def detached_alike(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias of `tensor` that shares its version, made below autograd, in a dispatch mode.

    Why: in a dispatch mode, ``detach`` gives an alias with its own version, which does not show changes in place.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def tensor_version(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` was changed in place, as autograd counts.

    Why: results computed from a tensor can be used again only if the tensor has not changed.

    Checked: torch 2.13 and 2.15.

    Public way: none. The autograd notes name it, but it has no public name.
    """
    return tensor._version


def tensor_versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The :func:`tensor_version` of each.

    Why: each step looks at all parameters of a model, and a call for each takes longer than the look.

    Checked: torch 2.13 and 2.15.

    Public way: none, as for :func:`tensor_version`.
    """
    return list(map(_VERSION, tensors))


def storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors (and storages in Python) share the memory of `tensor`.

    Why: code that kept ``parameter.data`` reads the parameter's memory without using the parameter.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_saved(leaf: torch.Tensor) -> bool:
    """Whether a graph of autograd has saved `leaf` itself for a backward.

    Why: its memory may not be given back before that. A graph that has to add to its gradient holds it once as well.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return leaf._use_count() > 1 + leaf.requires_grad  # type: ignore[attr-defined, no-any-return]


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` true.

    Why: ``nn.Parameter(...)`` would make another tensor, and takes no subclass of DTensor.

    Checked: torch 2.13 and 2.15.

    Public way: ``nn.Parameter``, for plain tensors that may be replaced by another object.
    """
    tensor._is_param = True  # type: ignore[attr-defined]


class PausedHooks:
    """Hooks that can be taken away for a while, all of them at the cost of a loop, and come back as they were.

    Why: autograd calls Python for each hook, which costs a small parameter more than its gradient. Another registration
    of each would cost as much.

    Checked: torch 2.13 and 2.15.

    Public way: ``RemovableHandle.remove`` and another registration.
    """

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._hooks = []
        for handle in handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                self._hooks.append((hooks, handle.id, hooks[handle.id]))

    def pause(self) -> None:
        """From now on, they are not called."""
        for hooks, number, _ in self._hooks:
            hooks.pop(number, None)

    def resume(self) -> None:
        """They are called again."""
        for hooks, number, hook in self._hooks:
            hooks[number] = hook


def gradient_hooks(tensor: torch.Tensor) -> list[tuple[str, Callable[..., Any]]]:
    """The hooks of `tensor`, each with the name of the method that registered it, in their order.

    Why: a plan replaces parameters, and their hooks would be lost silently.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    of_each = {
        "register_hook": tensor._backward_hooks,
        "register_post_accumulate_grad_hook": tensor._post_accumulate_grad_hooks,
    }
    return [(method, hook) for method, hooks in of_each.items() for hook in (hooks or {}).values()]


def reshaped_product(product: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`product`, which nothing else refers to, in another shape of as many elements; no view to autograd.

    Why: autograd forbids operations in place on a view that a custom function returns.

    Checked: torch 2.13 and 2.15.

    Public way: ``matmul`` does so for a product without a bias.
    """
    result: torch.Tensor = torch.ops.aten._unsafe_view(product, shape)
    return result


def tensor_base_getter() -> object:
    """The function that ``__torch_function__`` gets when code asks a tensor which other tensor it is a view of.

    Why: FSDP asks this of every output. A tensor whose values are not computed yet can answer without computing them.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return torch.Tensor._base.__get__  # type: ignore[union-attr]


def object_attributes() -> list[object]:
    """What ``__torch_function__`` gets when code reads or sets an attribute that says nothing of a tensor's values.

    Why: of a parameter that is split over ranks, this rank's part answers such questions as the whole would.

    Checked: torch 2.13 and 2.15.

    Public way: none for those with a private name, which torch's own Python code reads.
    """
    named = [getattr(torch.Tensor, name, None) for name in _OBJECT_ATTRIBUTES]
    getters = [attribute.__get__ for attribute in named if attribute is not None]
    return getters + [getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks", "_grad")]


@contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `resized` is called after each ``UntypedStorage.resize_``.

    Why: ZeRO 3 frees gathered parameters by making their storages empty, which no dispatch mode sees.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, *args: Any) -> Any:
        result = original(storage, *args)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
