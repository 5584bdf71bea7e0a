"""A tensor that looks whole, and holds this rank's positions of one dimension.

Its values are those of the whole tensor: every operation means what it means there, on every rank. The layout says only
where the numbers are, so a poor choice costs time and never exactness. (DTensor with ``Shard(dim)`` has the same idea;
it knows contiguous parts only, and fails where it has no rule.)

Gradients: each rank's graph is one summand of the whole gradient. The gradient of a plain tensor, such as a parameter,
is a partial sum over the ranks; that of a sequence tensor is complete for its positions. The caller seeds a plain loss
with 1/N, and sums the gradients of the parameters.

Also here: results that are views in torch and copies here, and writes through them.

A slice of a sequence tensor mostly shares its memory, and a write reaches the whole. Two kinds of results do not: plain
tensors, which were fetched, and parts whose positions had to be moved. Writes to the former are carried over when the
sequence tensor is used next. Writes to the latter are refused.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tensorshard.context_parallel.context_group import ContextGroup
from tensorshard.context_parallel.exchanges import take
from tensorshard.context_parallel.layouts import SequenceLayout
from tensorshard.context_parallel.rule_table import name_of, writes
from tensorshard.torch_private.dispatch import make_wrapper_tensor
from tensorshard.torch_private.tensors import storage_owners, tensor_version

Handler = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
"""Does an operation: ``handler(func, args, kwargs)``."""
_OWN_REFERENCES = 2


class SequenceTensor(torch.Tensor):
    """Stands for a whole tensor of which this rank has some positions.

    Attributes:
        local: this rank's positions, in its order: a plain tensor, in autograd's graph.
        split_dim: the dimension of the positions.
        sequence: which rank holds which.
        group: the ranks.
        handlers: what does each operation.
    """

    takes_precedence = True
    """Other tensor classes among the arguments of a function leave it to this one."""

    handlers: ClassVar[Any]

    local: torch.Tensor
    split_dim: int
    sequence: SequenceLayout
    group: ContextGroup

    _whole_shape: torch.Size
    _gathered: tuple[torch.Tensor, int, int] | None
    _turned: tuple["SequenceTensor | None", int] | None
    _reads: int
    _copied_from: Any

    @staticmethod
    def __new__(cls, local: torch.Tensor, dim: int, layout: SequenceLayout, group: ContextGroup) -> "SequenceTensor":
        shape = list(local.shape)
        if shape[dim] != layout.sizes[group.rank]:
            raise AssertionError(
                f"a sequence of {layout.length} positions, of which this rank has {layout.sizes[group.rank]}, was "
                f"given a part of shape {shape}, cut along dimension {dim}"
            )
        shape[dim] = layout.length
        self: SequenceTensor = make_wrapper_tensor(cls, tuple(shape), local.dtype, local.device)
        self.local, self.split_dim, self.sequence, self.group = local, dim, layout, group
        self._whole_shape = torch.Size(shape)
        self._gathered = self._turned = self._copied_from = None
        self._reads = 0
        return self

    # These are asked for all the time, and answered without torch's dispatch.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._whole_shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._whole_shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.local.device

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self.local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self.local.grad_fn

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad_(value)

    @property
    def grad(self) -> torch.Tensor | None:
        return None if self.local.grad is None else self.like(self.local.grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and not isinstance(value, SequenceTensor):
            raise TypeError("the gradient of a sequence tensor is a sequence tensor; cut the whole one first")
        self.local.grad = None if value is None else value.local

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._whole_shape if dim is None else self._whole_shape[dim]

    def dim(self) -> int:
        return len(self._whole_shape)

    def numel(self) -> int:
        return self._whole_shape.numel()

    def __len__(self) -> int:
        return self._whole_shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SequenceTensor({list(self._whole_shape)}, {self.dtype}, positions along dimension {self.split_dim})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceTensor":
        import copy

        return self.like(copy.deepcopy(self.local, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a tensor of which each rank has some positions cannot be pickled or saved; use "
            "tensorshard.context_parallel.whole(tensor), which all ranks have to call"
        )

    def like(self, local: torch.Tensor) -> "SequenceTensor":
        """A sequence tensor of other values in the same layout."""
        return SequenceTensor(local, self.split_dim, self.sequence, self.group)

    def taken_apart(self) -> tuple[torch.Tensor, Callable[[torch.Tensor], "SequenceTensor"]]:
        """This rank's part, and what makes such a tensor of a copy of it, for code that keeps it elsewhere."""
        dim, layout, group, needs = self.split_dim, self.sequence, self.group, self.local.requires_grad
        return self.local, lambda local: SequenceTensor(local.detach().requires_grad_(needs), dim, layout, group)

    @property
    def version(self) -> int:
        """How often its values were changed in place."""
        return tensor_version(self.local)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.handlers[func](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise RuntimeError(
            f"{func} was given a tensor of which each rank has some positions, below autograd, where it has no values. "
            "Give it tensorshard.context_parallel.whole(tensor)"
        )


@dataclass
class _Piece:
    """A plain tensor that stands for ``source[index]``."""

    source: SequenceTensor
    index: Any
    tensor: torch.Tensor
    version: int


def note_piece(x: SequenceTensor, index: Any, piece: Any) -> Any:
    """Remembers that `piece` stands for ``x[index]``, while somebody has it. Returns it."""
    if isinstance(piece, torch.Tensor) and not isinstance(piece, SequenceTensor):
        if x.group.pieces:
            _carry_over(x.group)
        x.group.pieces.append(_Piece(x, index, piece, tensor_version(piece)))
    return piece


def note_copy(x: SequenceTensor, copy: Any) -> Any:
    """Remembers that `copy` would be a view of `x`. Returns it."""
    if isinstance(copy, SequenceTensor) and copy is not x:
        copy._copied_from = weakref.ref(x), x.version
    return copy


def before_use(x: SequenceTensor, func: Callable[..., Any]) -> None:
    """Carries over writes to plain tensors that are views of `x`; refuses what would write to a copy of a view.

    Raises:
        RuntimeError: `func` writes to a copy, or the tensor was written to since the copy was made.
    """
    if x._gathered is not None and tensor_version(x._gathered[0]) != x._gathered[2]:
        values, _, _ = x._gathered
        x.local.copy_(take(values, x.split_dim, x.sequence.index(x.group.rank)))
        x._gathered = values, x.version, tensor_version(values)
    if x.group.pieces:
        _carry_over(x.group)
    if x._copied_from is not None:
        _check_copy(x, name_of(func))


def _carry_over(group: ContextGroup) -> None:
    pieces: list[_Piece] = group.pieces
    group.pieces = []
    kept = []
    for each in pieces:
        if tensor_version(each.tensor) != each.version:
            each.source[each.index] = each.tensor
            each.version = tensor_version(each.tensor)
        if sys.getrefcount(each.tensor) > _OWN_REFERENCES or storage_owners(each.tensor) > 1:
            kept.append(each)  # somebody may still write to it
    group.pieces = kept


def _check_copy(x: SequenceTensor, name: str) -> None:
    reference, version = x._copied_from
    source = reference()
    if source is None or (source.version == version and not writes(name)):
        return
    raise RuntimeError(
        f"{name} uses a slice or a reshape of a sequence whose positions are on several ranks. It is a copy here, and "
        "a view without context parallelism, so that a write to one would have to reach the other. Use x[...] = value, "
        "or write into a clone"
    )
