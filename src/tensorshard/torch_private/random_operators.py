"""Torch's random operators: other kernels behind them, and what a run draws.

Why: random numbers that belong to elements need other kernels. Below autograd they cost ordinary operators nothing. A
mode would cost each operator several microseconds, and a patched function would miss what C++ code calls.

Checked: torch 2.13.

Public way: ``torch.library.Library("aten", "IMPL")`` and ``torch.library.get_kernel`` are public; whether an operator
has a kernel of its own on a device is not.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Kernel", "draws_at_random", "put_kernels_behind"]

Kernel = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called as ``kernel(torchs_own, args, kwargs)``."""

_libraries: list[torch.library.Library] = []  # kernels are in place as long as their library is referred to


def put_kernels_behind(kernels: dict[str, Kernel], device: str) -> None:
    """Calls each of `kernels` in place of torch's own, for the operator of its name, on ``"CPU"`` or ``"CUDA"``.

    Operators that are composed of others have no kernel of their own there, and are left alone.

    Why: numbers that belong to elements are drawn there.

    Checked: torch 2.13.

    Public way: none that says whether an operator has a kernel of its own on a device.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # that kernels are replaced is the purpose
        for name, kernel in kernels.items():
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device):
                library.impl(name, _calling(kernel, f"aten::{name}", device), device, with_keyset=True)
    _libraries.append(library)


def _calling(kernel: Kernel, name: str, device: str) -> Callable[..., Any]:
    own = torch.library.get_kernel(name, device)

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(lambda *a, **k: own.call_boxed(keyset, *a, **k), args, kwargs)

    return call


def draws_at_random(operator: Any) -> bool:
    """Whether `operator`, as a dispatch mode sees it, draws from torch's generators.

    Why: a trial run notes what a model draws.

    Checked: torch 2.13.

    Public way: none.
    """
    return torch.Tag.nondeterministic_seeded in operator.tags
