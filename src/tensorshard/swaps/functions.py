"""The functions that may be put in place: torch's fused ones, Liger-Kernel's, and the user's."""

import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tensorshard.common.words import kind_of
from tensorshard.swaps.recipes import Function

KINDS = ("rms_norm", "layer_norm", "swiglu", "rotary", "attention", "cross_entropy")

TORCH: dict[str, Function] = {
    "rms_norm": F.rms_norm,
    "layer_norm": F.layer_norm,
    "attention": F.scaled_dot_product_attention,
    "cross_entropy": F.cross_entropy,
}
_CALLED_AS = {
    "rms_norm": "as torch.nn.functional.rms_norm: (x, shape, weight, eps)",
    "layer_norm": "as torch.nn.functional.layer_norm: (x, shape, weight, bias, eps)",
    "swiglu": "as (gate, up), and returns silu(gate) * up",
    "rotary": "as (q, k, cos, sin), and returns both rotated",
    "attention": "as torch.nn.functional.scaled_dot_product_attention",
    "cross_entropy": "as torch.nn.functional.cross_entropy",
}
NO_FUSED_FORM = "torch has no fused form of it"


def choices_of(functions: Any, device: torch.device) -> dict[str, dict[str, Function]]:
    """The functions to try of each kind, by their names."""
    if not isinstance(functions, Mapping):
        raise TypeError(f'functions is {kind_of(functions)}; it must be a dict such as {{"rms_norm": "torch"}}')
    choices = {}
    for kind, given in functions.items():
        if kind not in KINDS:
            near = difflib.get_close_matches(str(kind), KINDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KINDS)}"
            raise ValueError(f"functions has the unknown kind {kind!r}; {hint}")
        choices[kind] = _functions_of(kind, given, device)
    return choices


def _functions_of(kind: str, given: Any, device: torch.device) -> dict[str, Function]:
    if given == "torch":
        if kind not in TORCH:
            raise ValueError(
                f"functions[{kind!r}] is 'torch', and {NO_FUSED_FORM}: give a function, which is called "
                f"{_CALLED_AS[kind]}; or 'liger' on a GPU"
            )
        return {f"torch's {kind}": TORCH[kind]}
    if given == "liger":
        missing = without_liger(device)
        if missing:
            raise ValueError(f"functions[{kind!r}] is 'liger', and {missing}: take 'torch', or a function of your own")
        return {f"Liger's {kind}": _liger()[kind]}
    if given == "auto":
        fused = {f"torch's {kind}": TORCH[kind]} if kind in TORCH else {}
        return fused if without_liger(device) else {**fused, f"Liger's {kind}": _liger()[kind]}
    if isinstance(given, type) and issubclass(given, nn.Module):
        if kind not in ("rms_norm", "layer_norm"):
            raise ValueError(
                f"functions[{kind!r}] is the class {given.__name__}; classes are taken for norms. Give a function, "
                f"which is called {_CALLED_AS[kind]}"
            )
        return {given.__name__: _by_module(kind, given)}
    if isinstance(given, str) or not callable(given):
        raise ValueError(
            f"functions[{kind!r}] is {given!r}; it must be 'torch', 'liger', 'auto', or a function that is called "
            f"{_CALLED_AS[kind]}"
        )
    return {getattr(given, "__name__", type(given).__name__): given}


def without_liger(device: torch.device) -> str | None:
    """Why Liger's functions cannot be tried; None if they can."""
    if device.type != "cuda":
        return f"its kernels need a GPU; the model is on {device.type}"
    if importlib.util.find_spec("liger_kernel") is None:
        return "Liger-Kernel is not installed (pip install liger-kernel)"
    return None


def _liger() -> dict[str, Function]:
    from liger_kernel.transformers import functional as liger  # type: ignore[import-not-found]

    def layer_norm(x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        return liger.liger_layer_norm(x, weight, bias, eps)

    def rms_norm(x: torch.Tensor, shape: Any, weight: Any, eps: float) -> Any:
        return liger.liger_rms_norm(x, weight, eps, 0.0, "llama", False)  # not in place: the caller may keep x

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int, reduction: str) -> Any:
        # Its gradient is written over its input.
        return liger.liger_cross_entropy(logits.clone(), targets, ignore_index=ignore_index, reduction=reduction)

    return {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "swiglu": liger.liger_swiglu,
        "rotary": liger.liger_rope,
        "cross_entropy": cross_entropy,
        "attention": F.scaled_dot_product_attention,
    }


def _by_module(kind: str, cls: type[nn.Module]) -> Function:
    """A function that computes as a module of class `cls` does, with the parameters that it is given."""

    @cache
    def made(size: int, eps: float, device: torch.device) -> nn.Module:
        with torch.device(device):
            return cls(size, eps=eps)

    def call(x: torch.Tensor, shape: Any, *rest: Any) -> Any:
        *parameters, eps = rest
        module = made(shape[-1], eps, x.device)
        given = {name: p for name, p in zip(("weight", "bias"), parameters, strict=False) if p is not None}
        return functional_call(module, given, (x,), strict=True)

    return call
