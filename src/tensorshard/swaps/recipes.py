"""What was found in a model, as plain data, and the code that calls a faster function in its place.

A recipe says which function a piece of code computes, and where its arguments are: in which parameters, children or
arguments. It travels between ranks, and builds the new code of any module of the same kind. That code leaves a call to
the module's own when it comes with other arguments than the ones that were checked.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]
_COPIES = itertools.count()
Slot = int | str
"""Where an argument is in a call: its position, or its keyword."""


def argument(slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at `slot`; None if the call has none there."""
    if isinstance(slot, str):
        return kwargs.get(slot)
    return args[slot] if slot < len(args) else None


# -- modules: the recipe builds a forward --


@dataclass(frozen=True)
class Norm:
    """``layer_norm`` or ``rms_norm`` over the last dimension.

    Args:
        kind: "layer_norm" or "rms_norm".
        weight, bias: names of the module's parameters.
        offset: what the module adds to its weight (1 in Gemma's).
        keeps_type: whether 16-bit inputs with an fp32 weight give 16-bit outputs.
    """

    kind: str
    weight: str | None
    bias: str | None
    offset: float
    eps: float
    keeps_type: bool

    def build(self, fast: Function, original: Function) -> Function:
        """The new forward. `original` is the module's own, which is called as ``original(module, ...)``."""

        @functools.wraps(original)
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if len(args) + len(kwargs) != 1:
                return original(module, *args, **kwargs)
            given = args[0] if args else next(iter(kwargs.values()))
            x = given
            parameters: list[Any] = [
                None if name is None else getattr(module, name) for name in (self.weight, self.bias)
            ]
            if self.offset:
                parameters[0] = parameters[0].float() + self.offset
            if any(p is not None and p.dtype != x.dtype for p in parameters):
                wide = torch.promote_types(x.dtype, next(p.dtype for p in parameters if p is not None))
                x, parameters = x.to(wide), [None if p is None else p.to(wide) for p in parameters]
            if self.kind == "rms_norm":
                normalized = fast(x, (x.shape[-1],), parameters[0], self.eps)
            else:
                normalized = fast(x, (x.shape[-1],), *parameters, self.eps)
            return normalized.to(given.dtype) if self.keeps_type else normalized

        return forward


@dataclass(frozen=True)
class SwiGLU:
    """``down(silu(gate(x)) * up(x))``, of the module's children by these names.

    Args:
        up: None where `gate` computes both, the gate's features first if `gate_first`.
    """

    gate: str
    up: str | None
    down: str
    gate_first: bool = True
    kind = "swiglu"

    def build(self, fast: Function, original: Function) -> Function:
        """As :meth:`Norm.build`."""

        @functools.wraps(original)
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if len(args) + len(kwargs) != 1:
                return original(module, *args, **kwargs)
            x = args[0] if args else next(iter(kwargs.values()))
            if self.up is None:
                first, second = getattr(module, self.gate)(x).chunk(2, -1)
                gate, up = (first, second) if self.gate_first else (second, first)
            else:
                gate, up = getattr(module, self.gate)(x), getattr(module, self.up)(x)
            return getattr(module, self.down)(fast(gate, up))

        return forward


@dataclass(frozen=True)
class SelfAttention:
    """Attention of ``x`` [batch, time, features] to itself, between the module's linear layers.

    Args:
        inputs: names of the children for queries, keys and values; of one child, if it computes all three.
        output: name of the child after attention.
        head_size: features of a head.
        layout: of one child's features: "parts" (all queries, keys, values) or "heads" (each head's three together).
        others: further arguments of the call, which must have these values.
        nones: how many values follow the output in a tuple, all None; None if the output is no tuple.
    """

    inputs: tuple[str, ...]
    output: str
    head_size: int
    causal: bool
    scale: float | None
    layout: str = "parts"
    others: tuple[tuple[Slot, Any], ...] = ()
    nones: int | None = None
    kind = "attention"

    def heads(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Queries, keys and values [batch, heads, time, head size] of the input layers' `outputs`."""
        if len(outputs) == 3:
            return [tensor.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for tensor in outputs]
        if self.layout == "parts":
            return [tensor.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for tensor in outputs[0].chunk(3, -1)]
        return [tensor.transpose(1, 2) for tensor in outputs[0].unflatten(-1, (-1, 3, self.head_size)).unbind(-2)]

    def mixed(self, fast: Function, outputs: list[torch.Tensor]) -> torch.Tensor:
        """What the output layer gets: [batch, time, features]."""
        query, key, value = self.heads(outputs)
        grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        attended = fast(
            query, key, value, attn_mask=None, dropout_p=0.0, is_causal=self.causal, scale=self.scale, **grouped
        )
        mixed: torch.Tensor = attended.transpose(1, 2).flatten(2)
        return mixed

    def build(self, fast: Function, original: Function) -> Function:
        """As :meth:`Norm.build`."""
        expected = dict(self.others)

        @functools.wraps(original)
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            given: dict[Slot, Any] = dict(enumerate(args[1:], 1))
            given.update(kwargs)
            if not args or given.keys() != expected.keys() or any(not _same(given[k], expected[k]) for k in given):
                return original(module, *args, **kwargs)
            outputs = [getattr(module, name)(args[0]) for name in self.inputs]
            output = getattr(module, self.output)(self.mixed(fast, outputs))
            return output if self.nones is None else (output, *(None,) * self.nones)

        return forward


@dataclass(frozen=True)
class Loss:
    """Cross entropy of logits [..., classes] and targets [...], over all of them.

    Args:
        others: as :class:`SelfAttention`.
    """

    logits: Slot
    targets: Slot
    reduction: str
    ignore_index: int
    others: tuple[tuple[Slot, Any], ...] = ()
    kind = "cross_entropy"

    def build(self, fast: Function, original: Function) -> Function:
        """As :meth:`Norm.build`; of a function, too, whose first argument is then no module."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _rest_is(self.others, {self.logits, self.targets}, args, kwargs):
                return original(*args, **kwargs)
            logits, targets = (argument(slot, args, kwargs) for slot in (self.logits, self.targets))
            return fast(
                logits.flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index, reduction=self.reduction
            )

        return call

    def of_module(self) -> "Loss":
        """The same for a forward, whose first argument is the module."""
        logits, targets = (slot + 1 if isinstance(slot, int) else slot for slot in (self.logits, self.targets))
        return Loss(logits, targets, self.reduction, self.ignore_index, ((0, _MODULE), *_moved(self.others)))


ModuleRecipe = Norm | SwiGLU | SelfAttention | Loss


# -- functions that a forward calls: the recipe builds another function --


@dataclass(frozen=True)
class Rotary:
    """Rotates queries and keys [batch, heads, time, features] by cosines and sines [batch or 1, time, features]."""

    slots: tuple[Slot, Slot, Slot, Slot]
    others: tuple[tuple[Slot, Any], ...]
    kind = "rotary"

    def build(self, fast: Function, original: Function) -> Function:
        """The new function. `original` is the one that it replaces."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _rest_is(self.others, set(self.slots), args, kwargs):
                return original(*args, **kwargs)
            return tuple(fast(*(argument(slot, args, kwargs) for slot in self.slots)))

        return call


@dataclass(frozen=True)
class AttentionCall:
    """Attention of given queries, keys and values.

    Args:
        slots: of queries, keys and values.
        mask: where the mask is; None if the call that was checked had none.
        scale: where the scale is; None for one over the root of the head size.
        heads_first: whether queries are [batch, heads, time, features]; else heads and time are exchanged.
        output_heads_first: the same of the output.
        others: as :class:`SelfAttention`.
        unread: keywords that the function takes and does not read.
        nones: as :class:`SelfAttention`. The attention weights are among what is None then.
    """

    slots: tuple[Slot, Slot, Slot]
    mask: Slot | None
    scale: Slot | None
    causal: bool
    heads_first: bool
    output_heads_first: bool
    others: tuple[tuple[Slot, Any], ...]
    unread: tuple[str, ...]
    nones: int | None
    kind = "attention"

    def build(self, fast: Function, original: Function) -> Function:
        """As :meth:`Rotary.build`."""
        known: set[Slot] = {*self.slots, *self.unread}
        known |= {slot for slot in (self.scale, self.mask) if slot is not None}

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            mask = None if self.mask is None else argument(self.mask, args, kwargs)
            if (self.mask is not None and mask is None) or not _rest_is(self.others, known, args, kwargs):
                return original(*args, **kwargs)
            states = [argument(slot, args, kwargs) for slot in self.slots]
            if not self.heads_first:
                states = [state.transpose(1, 2) for state in states]
            scale = None if self.scale is None else argument(self.scale, args, kwargs)
            grouped = {"enable_gqa": True} if states[0].shape[1] != states[1].shape[1] else {}
            output = fast(*states, attn_mask=mask, dropout_p=0.0, is_causal=self.causal, scale=scale, **grouped)
            if not self.output_heads_first:
                output = output.transpose(1, 2).contiguous()
            return output if self.nones is None else (output, *(None,) * self.nones)

        return call


FunctionRecipe = Rotary | AttentionCall | Loss


def rebound(function: Function, names: dict[str, Function]) -> Function:
    """A copy of a `function`, and of those that it wraps, whose global `names` mean other functions.

    The other global variables are those of now: a later assignment to one is not seen. They are a module of their own
    in ``sys.modules``, where ``torch.compile`` looks for the variables of what it compiles.
    """
    inner = getattr(function, "__wrapped__", None)
    assert isinstance(function, FunctionType)
    if inner is None:
        cells, variables = function.__closure__, _namespace(function, names)
    else:
        copied = rebound(inner, names)
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in function.__closure__ or ())
        variables = function.__globals__
    again = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(again, function)
    again.__kwdefaults__ = function.__kwdefaults__
    if inner is None:
        del again.__wrapped__  # type: ignore[attr-defined]
    else:
        again.__wrapped__ = copied  # type: ignore[attr-defined]
    return again


def _namespace(function: FunctionType, names: dict[str, Function]) -> dict[str, Any]:
    """The global variables of `function` with other `names`."""
    module = ModuleType(f"{function.__globals__['__name__']}__with_{'_'.join(names)}_{next(_COPIES)}")
    vars(module).update({**function.__globals__, **names, "__name__": module.__name__})
    sys.modules[module.__name__] = module
    return vars(module)


def forget(function: Any) -> None:
    """Removes what :func:`rebound` left in ``sys.modules`` for this copy, which is not used any more."""
    inner = innermost(getattr(function, "__func__", function))
    if inner is not None:
        sys.modules.pop(inner.__globals__["__name__"], None)


def innermost(function: Any) -> FunctionType | None:
    """The function within decorators that :func:`rebound` can copy; None where one keeps it elsewhere."""
    while isinstance(function, FunctionType) and (inner := getattr(function, "__wrapped__", None)) is not None:
        if not any(cell.cell_contents is inner for cell in function.__closure__ or ()):
            return None
        function = inner
    return function if isinstance(function, FunctionType) else None


_MODULE = "a module"


def as_constant(value: Any) -> Any:
    """What stands for an argument that has to be the same in each call: any module for a module."""
    return _MODULE if isinstance(value, nn.Module) else value


def _rest_is(
    others: tuple[tuple[Slot, Any], ...], known: set[Slot], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    given = {slot: value for slot, value in slots if slot not in known}
    expected = dict(others)
    return given.keys() == expected.keys() and all(_same(given[slot], expected[slot]) for slot in given)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    value = as_constant(value)
    return value is expected or (type(value) is type(expected) and bool(value == expected))


def _moved(others: tuple[tuple[Slot, Any], ...]) -> tuple[tuple[Slot, Any], ...]:
    return tuple((slot + 1 if isinstance(slot, int) else slot, value) for slot, value in others)
