"""Running a model in shapes alone, without memory for what it computes.

Why: a constructor is recorded, a model is traced and a plan is tried on fake tensors. ``torch.device("meta")`` gives
shapes too, but has no device, and no error where a value is asked for.

- `FakeTensor`, `FakeTensorMode`: the tensors, and the mode under which operations make them.
- `unset_fake_temporarily`: leaves that mode for something real, such as building a mesh.
- `active_fake_mode`, `detect_fake_mode`: whether such a mode is on, or some of the given tensors are fake. Code that
  would read a value asks this first.
- `DataDependentOutputException`, `DynamicOutputShapeException`, `UnsupportedFakeTensorException`,
  `UnsupportedOperatorException`: what code raises that needs values, or an operator without a fake kernel.

Checked: torch 2.11 and 2.13, for all of these and :func:`without_fake_kernel_reports`.

Public way: none in these versions. ``torch.export`` makes fake tensors by itself, but runs whole programs.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._guards import active_fake_mode, detect_fake_mode
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
"""What fake tensors raise where their values are asked for."""

__all__ = [
    "NEEDS_VALUES",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "active_fake_mode",
    "detect_fake_mode",
    "unset_fake_temporarily",
    "without_fake_kernel_reports",
]


@contextmanager
def without_fake_kernel_reports() -> Iterator[None]:
    """Inside, torch does not log that a kernel has no fake one.

    Why: the tracer then runs the unit for real, so the report would name an error that is none.

    Checked: torch 2.11 and 2.13, by the name of the logger.

    Public way: none; ``torch._logging`` is private as well.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
