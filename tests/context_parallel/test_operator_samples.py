"""torch's own samples of its operators: on tensors that are cut along any dimension, every result and every gradient is
that of whole tensors."""

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from simulated_ranks import simulate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tensorshard.context_parallel import cut, whole

if find_spec("expecttest") is None:  # torch's samples import a test class from it, which is not needed here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
from torch.testing._internal.common_methods_invocations import op_db

_SKIPPED = (
    "empty", "bernoulli", "rand", "multinomial", "normal", "dropout", "cauchy", "exponential", "geometric",
    "log_normal",
    "uniform", "rrelu", "sparse", "to_sparse", "stft", "istft", "fft", "linalg", "svd", "eig", "qr", "lu", "cholesky",
    "pca", "special", "jiterator", "nested", "fractional", "gumbel", "multi_head_attention",
    "scaled_dot_product_attention", "item", "resize", "set_", "svd_lowrank", "ormqr", "geqrf",
)  # fmt: skip
_FAST = (
    "add", "where", "softmax", "log_softmax", "cumsum", "sum", "mean", "std", "amax", "matmul", "einsum", "cat",
    "stack",
    "split", "gather", "index_select", "transpose", "reshape", "unfold", "roll", "flip", "nn.functional.linear",
    "nn.functional.layer_norm", "nn.functional.conv1d", "nn.functional.pad", "nn.functional.cross_entropy",
    "nn.functional.batch_norm", "nn.functional.group_norm", "masked_fill", "topk", "__getitem__", "expand", "repeat",
)  # fmt: skip


def _operators() -> Iterator[Any]:
    for operator in op_db:
        skipped = any(
            operator.name.startswith(s) or f".{s}" in operator.name or f"_{s}" in operator.name for s in _SKIPPED
        )
        if not skipped and torch.float64 in operator.dtypes:
            name = operator.name + (f"-{operator.variant_test_name}" if operator.variant_test_name else "")
            yield pytest.param(operator, id=name, marks=[] if operator.name in _FAST else pytest.mark.slow)


def _run(
    operator: Any, leaves: list[Any], spec: Any, cut_at: dict[int, int], ranks: int
) -> tuple[list[Any], list[Any]]:
    """Results, and gradients of all tensors, of a random combination of the results."""
    leaves = [
        leaf.detach().clone().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    given = [cut(leaf, cut_at[i]) if i in cut_at else leaf for i, leaf in enumerate(leaves)]
    first, args, kwargs = tree_unflatten(given, spec)
    outs = [whole(out) for out in tree_leaves(operator(first, *args, **kwargs)) if isinstance(out, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        if out.is_floating_point() and out.requires_grad:
            total = total + (out * torch.rand(out.shape, generator=generator, dtype=torch.float64)).sum()
    if total.requires_grad:
        (total / ranks).backward()
    return [out.detach() for out in outs], [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _cuts(leaves: list[Any]) -> Iterator[dict[int, int]]:
    tensors = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.numel() < 4000
    ]
    for i in tensors[:2]:
        yield from ({i: dim} for dim in range(leaves[i].ndim) if leaves[i].shape[dim] >= 4)
    alike = [i for i in tensors if leaves[i].shape == leaves[tensors[0]].shape]
    if len(alike) > 1:
        shape = leaves[tensors[0]].shape
        yield from (dict.fromkeys(alike, dim) for dim in range(len(shape)) if shape[dim] >= 4)


def _alike(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.shape == expected.shape and torch.allclose(
        got.to(expected.dtype), expected, rtol=1e-8, atol=1e-8, equal_nan=True
    )


@pytest.mark.parametrize("operator", list(_operators()))
def test_an_operator_computes_what_it_computes_on_whole_tensors(operator):
    tried = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in list(operator.sample_inputs("cpu", torch.float64, requires_grad=False))[:12]:
            if not isinstance(sample.input, torch.Tensor | list | tuple):
                continue
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            for cut_at in list(_cuts(leaves))[:6]:
                if tried > 14:
                    return
                try:
                    expected, gradients = _run(operator, leaves, spec, {}, 1)
                except Exception:
                    continue  # a sample that torch itself refuses
                if any(out.is_floating_point() and not torch.isfinite(out).all() for out in expected):
                    continue
                tried += 1
                _check(operator, leaves, spec, cut_at, expected, gradients)


def _check(operator: Any, leaves: Any, spec: Any, cut_at: Any, expected: Any, gradients: Any) -> None:
    def on_rank(group: Any) -> Any:
        with group.active():
            return _run(operator, leaves, spec, cut_at, 2)

    results = simulate(2, on_rank)
    about = f"cut at {cut_at} of {[tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves]}"
    for outs, _ in results:
        assert len(outs) == len(expected), about
        assert all(_alike(out, other) for out, other in zip(outs, expected, strict=True)), about
    for i, gradient in enumerate(gradients):
        parts = [parts[i] for _, parts in results if parts[i] is not None]
        total = sum(parts) if parts else None
        if gradient is None or total is None:
            assert not any(each is not None and each.any() for each in (gradient, total)), f"gradient {i}, {about}"
        else:
            assert _alike(total, gradient), f"gradient {i}, {about}"
