"""Products of tensors, as in Einstein's notation: every dimension has a letter.

If the positions are a dimension of the result, each rank computes its own part of that. If they are summed over, each
rank sums over its own, and the ranks' sums are added.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorshard.context_parallel.exchanges import sum_ranks
from tensorshard.context_parallel.layout_changes import part_of
from tensorshard.context_parallel.rule_table import Signature, name_of, rule
from tensorshard.context_parallel.sequence_tensor import SequenceTensor

Letters = list[str | None]
"""Names a tensor's dimensions; None for one that is broadcast."""

_FEW = 4
"""The first operand's layout prevails unless another operand is more than this many times larger."""


def contract(
    func: Callable[..., Any],
    operands: Sequence[torch.Tensor | None],
    letters: Sequence[Letters],
    result: Letters,
    call: Callable[..., torch.Tensor],
    is_sum: bool,
) -> Any:
    """Computes a product of sequence tensors.

    Args:
        letters: of each operand.
        result: the letters of the result.
        call: computes the product of this rank's parts.
        is_sum: whether the product may be computed as a sum of products of parts.
    """
    name = name_of(func)
    candidates = []
    for position, (operand, names) in enumerate(zip(operands, letters, strict=True)):
        if isinstance(operand, SequenceTensor):
            letter = names[operand.split_dim]
            weight = operand.numel() * (1 if operand.sequence.is_home else 1e-9)
            candidates.append((letter in result, weight, -position, letter, operand.sequence, operand.group))
    best = max(candidates, key=lambda each: each[:3])
    first = next(each for each in candidates if each[0] == best[0])
    is_kept, _, _, letter, layout, group = first if best[1] <= _FEW * first[1] else best
    if letter is None or (not is_kept and not is_sum):
        return NotImplemented

    def part(operand: torch.Tensor | None, names: Letters) -> torch.Tensor | None:
        if operand is None:
            return None
        return part_of(operand, names.index(letter) if letter in names else None, layout, name, group)

    parts = list(map(part, operands, letters))
    if is_kept:
        return SequenceTensor(call(*parts), result.index(letter), layout, group)
    return sum_ranks(call(*parts), name, group)


def batch_letters(tensor: torch.Tensor, last: int) -> Letters:
    """Letters for all dimensions but the last ones."""
    return [f"b{i}" if tensor.shape[tensor.ndim - i] > 1 else None for i in range(tensor.ndim, last, -1)]


@rule("matmul", "bmm", "mm", "__matmul__", "__rmatmul__", "mv", "dot", "inner")
def matmul(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``a @ b``."""
    name = name_of(func)
    if kwargs or len(args) != 2 or (name == "inner" and not args[0].ndim == args[1].ndim == 1):
        return NotImplemented
    a, b = args if name != "__rmatmul__" else args[::-1]
    if a.ndim == 0 or b.ndim == 0:
        return NotImplemented
    left: Letters = [*batch_letters(a, 2), *"mk"[-a.ndim :]]
    right: Letters = [*batch_letters(b, 2), *("kn" if b.ndim > 1 else "k")]
    batches = max(len(left), len(right), 2) - 2
    result: Letters = [f"b{i + 2}" for i in range(batches, 0, -1)]
    result += (["m"] if a.ndim > 1 else []) + (["n"] if b.ndim > 1 else [])
    return contract(func, [a, b], [left, right], result, torch.matmul, True)


@rule("linear")
def linear(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A linear layer."""
    if len(args) < 2:
        kwargs = dict(kwargs)
        args = (*args, *(kwargs.pop(key) for key in ("input", "weight")[len(args) :]))
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    is_usual = type(x) is SequenceTensor and x.split_dim < len(x._whole_shape) - 1
    if is_usual and not isinstance(weight, SequenceTensor) and not isinstance(bias, SequenceTensor):
        return SequenceTensor(func(x.local, weight, bias), x.split_dim, x.sequence, x.group)
    rows: Letters = [f"x{i}" for i in range(x.ndim - 1)]
    names: Letters = [*"nk"[-weight.ndim :]]
    out = contract(func, [x, weight], [[*rows, "k"], names], rows + names[:-1], func, True)
    return out if out is NotImplemented or bias is None else out + bias


@rule("addmm", "baddbmm")
def addmm(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``c + a @ b``."""
    keys = ("batch1", "batch2") if name_of(func).startswith("b") else ("mat1", "mat2")
    kwargs = dict(kwargs)
    args = [*args, *(kwargs.pop(key) for key in ("input", *keys) if key in kwargs)]
    if len(args) != 3 or not set(kwargs) <= {"alpha", "beta"} or name_of(func).endswith("_"):
        return NotImplemented
    c, a, b = args
    left: Letters = [*"bmk"[-a.ndim :]]
    right: Letters = ["b", "k", "n"] if b.ndim == 3 else ["k", "n"]
    result: Letters = [*"bmn"[-a.ndim :]]
    added: Letters = [
        name if size > 1 else None for name, size in zip(result[len(result) - c.ndim :], c.shape, strict=True)
    ]
    return contract(func, [c, a, b], [added, left, right], result, lambda *parts: func(*parts, **kwargs), False)


@rule("einsum")
def einsum(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Einstein's notation itself."""
    if not isinstance(args[0], str) or kwargs:
        return NotImplemented
    equation = args[0].replace(" ", "")
    operands = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    left, _, right = equation.partition("->")
    if not right:
        return NotImplemented
    terms = [_einsum_letters(term, tensor.ndim) for term, tensor in zip(left.split(","), operands, strict=True)]
    dots = max(sum(len(letter) > 1 for letter in term) for term in terms)
    plain = len(right.replace("...", ""))
    result: Letters = list(_einsum_letters(right, plain + dots * ("..." in right)))
    named: list[Letters] = [
        [letter if size > 1 else None for letter, size in zip(term, tensor.shape, strict=True)]
        for term, tensor in zip(terms, operands, strict=True)
    ]
    if any(len(set(term)) < len(term) for term in terms):  # a diagonal
        return NotImplemented
    return contract(func, operands, named, result, lambda *parts: torch.einsum(equation, *parts), True)


def _einsum_letters(term: str, ndim: int) -> list[str]:
    before, dots, after = term.partition("...")
    hidden = ndim - len(before) - len(after)
    return [*before, *([f"d{i}" for i in range(hidden, 0, -1)] if dots else []), *after]


_BILINEAR = Signature(lambda input1, input2, weight, bias=None: 0)


@rule("bilinear")
def bilinear(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A bilinear layer on positions."""
    call = _BILINEAR.bind(args, kwargs)
    if call is None:
        return NotImplemented
    x, y = call["input1"], call["input2"]
    lead = x if isinstance(x, SequenceTensor) else y
    if not isinstance(lead, SequenceTensor) or lead.split_dim == lead.ndim - 1 or x.shape[:-1] != y.shape[:-1]:
        return NotImplemented
    if isinstance(call["weight"], SequenceTensor) or isinstance(call["bias"], SequenceTensor):
        return NotImplemented
    parts = [part_of(t, lead.split_dim, lead.sequence, "bilinear", lead.group) for t in (x, y)]
    return lead.like(func(*parts, call["weight"], call["bias"]))
