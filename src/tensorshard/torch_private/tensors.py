"""A tensor's memory, version and kind."""

import torch

PARAMETER_FLAG = "_is_param"
"""In a tensor's ``__dict__``, says that it counts as an ``nn.Parameter``, as :func:`mark_as_parameter` does."""


def storage_address(storage: torch.UntypedStorage) -> int:
    """The same number for all tensors on one storage, as long as it lives; also for fake and meta tensors.

    Why: which tensors share memory is asked of fake tensors too, whose ``data_ptr()`` is 0 or an error.

    Checked: torch 2.11 and 2.13.

    Public way: ``storage.data_ptr()``, for tensors with memory that is not empty.
    """
    return storage._cdata


def detached_alike(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias of `tensor` that shares its version, made below autograd, in a dispatch mode.

    Why: there ``detach`` gives an alias with a version of its own, so that changes in place do not show.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def tensor_version(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` was changed in place, as autograd counts.

    Why: what was computed from a tensor can be used again only if the tensor is as it was.

    Checked: torch 2.11 and 2.13.

    Public way: none. The autograd notes name it, but it has no public name.
    """
    return tensor._version


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` true.

    Why: ``nn.Parameter(...)`` would make another tensor of it, and takes no subclass of DTensor.

    Checked: torch 2.11 and 2.13.

    Public way: ``nn.Parameter``, for plain tensors that may become another object.
    """
    tensor._is_param = True  # type: ignore[attr-defined]


def count_gradient_hooks(tensor: torch.Tensor) -> int:
    """How often ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on `tensor`.

    Why: a plan lays parameters out anew, and their hooks would be lost without a word.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return len(tensor._backward_hooks or ()) + len(tensor._post_accumulate_grad_hooks or ())


def tensor_base_getter() -> object:
    """What ``__torch_function__`` is called with where somebody asks a tensor which other one it is a view of.

    Why: FSDP asks it of every output, and a tensor that only looks whole can answer without being computed.

    Checked: torch 2.11 and 2.13.

    Public way: none.
    """
    return torch.Tensor._base.__get__  # type: ignore[union-attr]
