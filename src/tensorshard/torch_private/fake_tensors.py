"""Running a model in shapes alone, without memory for what it computes.

Why: a constructor is recorded, a model is traced and a plan is tried on fake tensors. ``torch.device("meta")`` gives
shapes too, but has no device, and no error where a value is asked for.

- `FakeTensor`, `FakeTensorMode`: the tensors, and the mode under which operations make them.
- `unset_fake_temporarily`: leaves that mode for something real, such as building a mesh.
- `active_fake_mode`, `detect_fake_mode`: whether such a mode is on, or some of the given tensors are fake. Code that
  would read a value asks this first.
- `DataDependentOutputException`, `DynamicOutputShapeException`, `UnsupportedFakeTensorException`,
  `UnsupportedOperatorException`: raised by code that needs values, or an operator without a fake kernel.

Checked: torch 2.13 and 2.15, for all of these and, where nothing else is said, the functions below.

Public way: none in these versions. ``torch.export`` makes fake tensors by itself, but runs whole programs.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import active_fake_mode, detect_fake_mode
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors when code asks for their values."""

DEVICE = torch.ops.prim.device.default
"""The operator that asks a tensor for its device."""

__all__ = [
    "DEVICE",
    "NEEDS_VALUES",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "active_fake_mode",
    "detect_fake_mode",
    "fake_device",
    "grouped_products_of_any_dtype",
    "layout_in_file",
    "unset_fake_temporarily",
    "without_fake_kernel_reports",
]


def layout_in_file(load: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """What `load`, a ``torch.load`` of one tensor, returns, without its values, which are not read: a fake tensor, and
    the byte of the file at which its storage begins.

    Why: a checkpoint's tensor lies within a larger file, of which a rank needs some rows.

    Checked: torch 2.13.

    Public way: ``torch.load(path, mmap=True)``, where the file holds nothing else.
    """
    with FakeTensorMode():
        tensor = load()
    start = tensor.untyped_storage()._checkpoint_offset
    assert start is not None  # under this mode
    return tensor, start


def fake_device(tensor: Any) -> torch.device | None:
    """The device that a fake tensor simulates; None for other tensors, and within a fake kernel.

    Why: autograd asks each tensor for its device again and again. Each time, a mode that watches would be called.

    Checked: torch 2.13 and 2.15.

    Public way: ``tensor.device``, which calls the mode.
    """
    if type(tensor) is not FakeTensor or tensor.fake_mode.in_kernel_invocation:
        return None
    return tensor.fake_device


@contextmanager
def without_fake_kernel_reports() -> Iterator[None]:
    """Inside, torch does not log that an operator has no fake kernel, or cannot run on the shapes that it was given.

    Why: it logs the whole traceback, and then raises the error. The tracer then runs the unit for real, so there is
    nothing to report. An estimate raises the error.

    Checked: torch 2.13 and 2.15, by the name of the logger.

    Public way: none; ``torch._logging`` is private as well.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def grouped_products_of_any_dtype() -> Iterator[None]:
    """Inside, fake tensors of any dtype take ``_grouped_mm``, the product of each expert's tokens with its weights.

    Why: the real kernel for CPUs takes fp32, but the fake one wants bf16. So a mixture of experts in fp32 could not be
    tried on fake tensors.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``torch.library.register_fake`` is for operators of one's own.
    """
    operator = torch.ops.aten._grouped_mm.default

    def product(
        mode: FakeTensorMode,
        func: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        shape = [*a.shape[:-1], b.size(-1)]
        if b.dim() == 2:
            shape = [a.size(-2), b.size(-1)]
            if a.dim() == 2 and offs is not None:  # groups along the inner dimension: one matrix for each
                shape.insert(0, offs.size(0))
        aligned = 16 // a.element_size()  # rows begin at multiples of 16 bytes
        row = (shape[-1] + aligned - 1) // aligned * aligned
        strides = [shape[-2] * row, row, 1][-len(shape) :]
        with mode:
            return torch.empty_strided(shape, strides, dtype=a.dtype, device=a.device)

    if operator in op_implementations_dict:  # within another call
        yield
        return
    op_implementations_dict[operator] = product
    try:
        yield
    finally:
        del op_implementations_dict[operator]
