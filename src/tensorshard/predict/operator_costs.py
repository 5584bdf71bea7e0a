"""What one call of an operator costs: floating-point operations, and bytes read and written."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tensorshard.torch_private.operators import flop_formula, schema
from tensorshard.torch_private.pytree import tree_leaves

# Operators that make a tensor without writing to it, or a view of one.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")
# Operators that read as much of their first argument as they return.
_READ_ROWS = ("embedding", "index_select", "gather", "index")
# Operators that write to their first argument without reading it.
_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_")
# Flash attention on the CPU, which has no formula in torch's registry.
_FLASH_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_GROUPED = "_grouped_mm"
# A recurrent layer on the CPU. One call runs all steps of the sequence; its arguments begin with the input and two
# matrices.
_RECURRENT = "mkldnn_rnn_layer"


@dataclass(frozen=True)
class _Operator:
    """What an operator does to memory.

    Args:
        free: whether it neither reads nor writes.
        written: the positions and names of arguments that it writes to.
        returns_new: whether its outputs are new tensors.
    """

    name: str
    free: bool
    written: frozenset[int | str]
    returns_new: bool
    formula: Callable[..., int] | None


@dataclass(frozen=True)
class Cost:
    """The cost of one call. Args: as for :class:`tensorshard.predict.operation_ledger.Kernel`."""

    flops: int
    nbytes: int
    dtype: str


def cost_of(func: Any, args: Any, kwargs: Any, output: Any) -> Cost | None:
    """The cost of a call of the operator `func`; None if it computes nothing, such as a view."""
    operator = _describe(func)
    if operator.free:
        return None
    read = written = 0
    largest: torch.Tensor | None = None
    for place, value in [*enumerate(args), *kwargs.items()]:
        tensors = _tensors(value)
        size = sum(map(moved_bytes, tensors))
        if place in operator.written:
            written += size
        if place == 0 and operator.name in _READ_ROWS:
            size = min(size, sum(map(moved_bytes, _tensors(output))))
        if not (place == 0 and operator.name in _OVERWRITE):
            read += size
        largest = max([*tensors, *([] if largest is None else [largest])], key=torch.Tensor.numel, default=None)
    if operator.returns_new:
        made = _tensors(output)
        written += sum(map(moved_bytes, made))
        largest = max([*made, *([] if largest is None else [largest])], key=torch.Tensor.numel, default=None)
    if not read + written:
        return None
    if operator.name.startswith(_RECURRENT):
        read += _weights_of_other_steps(*args)
    flops = int(operator.formula(*args, **kwargs, out_val=output)) if operator.formula is not None else 0
    dtype = largest.dtype if largest is not None else torch.float32
    if flops:  # products are computed in the type of their arguments
        dtype = next(t.dtype for t in _tensors(args) if t.is_floating_point())
    return Cost(flops, read + written, str(dtype).removeprefix("torch."))


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes that are read if all of a tensor is read. An expanded tensor counts once, as it is in memory."""
    size = tensor.numel() * tensor.element_size()
    if 0 in tensor.stride() and size:
        return min(size, tensor.untyped_storage().nbytes())
    return size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple | dict):
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return []


@cache
def _describe(func: Any) -> _Operator:
    described = schema(func)
    name = described.name.split("::")[-1]
    written: set[int | str] = set()
    for place, argument in enumerate(described.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    returns_new = any(result.alias_info is None for result in described.returns)
    is_view = bool(described.returns) and not written and not returns_new
    free = name in _FREE or is_view or described.name.startswith("prim::")
    formula = flop_formula(func.overloadpacket)
    if formula is None and name.endswith("_"):  # addmm_ does what addmm does
        formula = flop_formula(getattr(torch.ops.aten, name[:-1], None))
    if name == _FLASH_FOR_CPU:
        formula = _attention_flops
    elif name == f"{_FLASH_FOR_CPU}_backward":
        formula = _attention_backward_flops
    elif name == _GROUPED:
        formula = _grouped_flops
    elif name == _RECURRENT:
        formula = _recurrent_flops
    elif name == f"{_RECURRENT}_backward":
        formula = _recurrent_backward_flops
    return _Operator(name, free, frozenset(written), returns_new, formula)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Two products: the scores, and the scores times the values. Masks do not count, as in torch's own formulas."""
    (queries, width), (keys, value_width) = query.shape[-2:], value.shape[-2:]
    return 2 * _product(query.shape[:-2]) * queries * keys * (width + value_width)


def _attention_backward_flops(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> int:
    """Five products: the scores once more, and two for each of the two products of forward."""
    (queries, width), (keys, value_width) = query.shape[-2:], value.shape[-2:]
    return 2 * _product(query.shape[:-2]) * queries * keys * (3 * width + 2 * value_width)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Products of groups of rows, columns or inner elements, each of which is in one group; or of separate matrices."""
    rows_and_inner = a.numel() if a.dim() == 2 or b.dim() == 3 else _product(a.shape[1:])
    return 2 * rows_and_inner * b.size(-1)


def _recurrent_flops(sequence: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor, *_: Any, **__: Any) -> int:
    """One product for each element of a sequence, and one for each state."""
    return 2 * _product(sequence.shape[:-1]) * (of_input.numel() + of_state.numel())


def _recurrent_backward_flops(*args: Any, **kwargs: Any) -> int:
    """Twice those of forward: the gradients of elements and states, and those of the matrices."""
    return 2 * _recurrent_flops(*args, **kwargs)


def _weights_of_other_steps(sequence: torch.Tensor, _: torch.Tensor, of_state: torch.Tensor, *__: Any) -> int:
    """Bytes of the states' matrix for all steps of the sequence but the first: each step reads the matrix again."""
    return (sequence.size(0) - 1) * moved_bytes(of_state)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
