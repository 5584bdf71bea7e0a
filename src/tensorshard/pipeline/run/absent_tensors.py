"""Stand-ins for parameters and buffers that other ranks of a pipeline have."""

from collections.abc import Callable
from typing import Any

import torch

from tensorshard.torch_private.autograd import is_in_backward
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


class AbsentTensor(torch.Tensor):
    """Has the shape, type and device of a tensor that this rank does not have. Reading or writing its values raises.

    While a stage computes, code between its units may compute with it: what comes out is used on no stage.

    Attributes:
        plain: zeros of its shape, with one element in memory.
        computes: says whether the stage computes now.
        sentence: what the error says.
    """

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
