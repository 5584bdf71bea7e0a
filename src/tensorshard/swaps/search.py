"""Finds what a model computes by running parts of it, and comparing what comes out with what a recipe would give.

Names of classes, functions and attributes decide nothing. Parameters get random values meanwhile, as fresh weights of
ones or zeros would hide what they do.
"""

import dis
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tensorshard.model.fake_copies import copy_with
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.swaps.measure import difference, fresh
from tensorshard.swaps.recipes import (
    AttentionCall,
    FunctionRecipe,
    Loss,
    ModuleRecipe,
    Norm,
    Rotary,
    SelfAttention,
    Slot,
    SwiGLU,
    as_constant,
)
from tensorshard.torch_private.modules import own_buffers, own_parameters

_CLOSE = 1e-4  # between what a recipe gives and what was computed, in fp32
_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
_SCALES = (1.0, 1e-2, 1e-5)  # of inputs: a small one tells one eps from another
_MOST_CLASSES = 512
_NARROW = (torch.bfloat16, torch.float16)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def looks_like_part(module: nn.Module) -> bool:
    """Whether `module` may be one of the parts that are looked for: it has few children and no buffers."""
    children = list(module.children())
    if not children:
        return all(p.ndim == 1 for p in module.parameters()) and not own_buffers(module)
    return len(children) < 9 and not own_parameters(module)


def find_recipe(module: nn.Module, call: Call) -> ModuleRecipe | None:
    """What `module` computes, tried on the arguments of one `call`; None if it is nothing that is looked for."""
    if any(t.dtype in _NARROW for t in (*module.parameters(), *tensor_leaves(call))):
        module = copy_with(module, lambda _, tensor: _widened(tensor.detach()))
        call = map_tensors_once(_widened, call)
    args, kwargs = call
    tensors = tensor_leaves((args, kwargs))
    if not tensors:
        return None
    was = {id(m): m.training for m in module.modules()}
    module.eval()
    try:
        if any(module.children()):
            return _find_mlp(module, call) or _find_attention(module, call)
        if len(tensors) == 1 and tensors[0].is_floating_point():
            return _find_norm(module, args, kwargs)
        if next(module.parameters(), None) is None:
            loss = find_loss(module, call)
            return None if loss is None else loss.of_module()
        return None
    finally:
        for submodule in module.modules():
            submodule.training = was[id(submodule)]


# -- norms --


def _find_norm(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Norm | None:
    (x,) = tensor_leaves((args, kwargs))
    size = x.shape[-1] if x.ndim else 0
    names = list(own_parameters(module))
    if len(args) + len(kwargs) != 1 or len(names) > 2 or any(p.shape != (size,) for p in module.parameters()):
        return None
    generator = torch.Generator().manual_seed(1)
    values = {name: (torch.rand(size, generator=generator) + 0.5).to(x.device) for name in names}
    shape = (*(2,) * (x.ndim - 1), size)
    base = (torch.randn(shape, generator=generator) + 0.3).to(x.device)
    probes = [base * scale for scale in _SCALES]

    def run(value: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor | None:
        given = (value,) if args else ()
        named = {} if args else {next(iter(kwargs)): value}
        try:
            with torch.no_grad():
                output = functional_call(module, parameters, given, named)
        except (RuntimeError, TypeError, ValueError):
            return None  # of these types
        return output if isinstance(output, torch.Tensor) and output.shape == value.shape else None

    outputs = [run(probe, values) for probe in probes]
    if any(output is None for output in outputs):
        return None
    numbers = [v for v in vars(module).values() if type(v) is float and 0 <= v < 0.1]
    for recipe in _norms(names, [*numbers, *_EPS]):
        if all(
            difference([_normed(recipe, probe, values)], [output]) < _CLOSE
            for probe, output in zip(probes, outputs, strict=True)
        ):
            mixed = run(base.bfloat16(), values)  # with fp32 weights
            keeps = mixed is None or mixed.dtype == torch.bfloat16
            return Norm(recipe.kind, recipe.weight, recipe.bias, recipe.offset, recipe.eps, keeps)
    return None


def _norms(names: list[str], eps: list[float]) -> Iterator[Norm]:
    pairs = set(itertools.permutations([*names, None, None], 2))
    complete_pairs = [pair for pair in pairs if len([name for name in pair if name]) == len(names)]
    for kind, (weight, bias), offset, number in itertools.product(
        ("rms_norm", "layer_norm"), complete_pairs, (0.0, 1.0), dict.fromkeys(eps)
    ):
        if not (kind == "rms_norm" and bias) and not (offset and not weight):
            yield Norm(kind, weight, bias, offset, number, True)


def _normed(recipe: Norm, x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """In fp64."""
    wide = x.double()
    if recipe.kind == "layer_norm":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * (wide.square().mean(-1, keepdim=True) + recipe.eps).rsqrt()
    if recipe.weight is not None:
        wide = wide * (values[recipe.weight].double() + recipe.offset)
    if recipe.bias is not None:
        wide = wide + values[recipe.bias].double()
    return wide.float()


# -- MLPs and attention: what is between a module's layers --


class _Layers:
    """The calls of a module's children that have parameters, in one run: names, inputs and outputs, in order."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.names: list[str] = []
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.output: Any = None
        self._given: list[tuple[Any, ...]] = []
        hooks = [
            child.register_forward_hook(self._note(name))
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        ]
        try:
            with torch.no_grad():
                args, kwargs = fresh(call)
                self.output = module(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        self.simple = all(len(arguments) == 1 for arguments in self._given) and len(set(self.names)) == len(self.names)

    def _note(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._given.append(args if isinstance(output, torch.Tensor) else ())
            self.names.append(name)
            if args and isinstance(output, torch.Tensor):
                self.inputs.append(args[0])
                self.outputs.append(output)

        return note

    def ends_with_last(self) -> bool:
        """Whether the module returns what its last layer does, and the others all take the module's input."""
        first = tensor_leaves(self.output)[:1]
        return (
            self.simple
            and len(self.names) > 1
            and bool(first)
            and difference(first, self.outputs[-1:]) == 0
            and all(tensor.shape == self.inputs[0].shape for tensor in self.inputs[:-1])
            and difference(self.inputs[:-1], [self.inputs[0]] * (len(self.inputs) - 1)) == 0
        )


def _find_mlp(module: nn.Module, call: Call) -> SwiGLU | None:
    args, kwargs = call
    if len(args) + len(kwargs) != 1:
        return None
    layers = _Layers(module, call)
    if not layers.ends_with_last() or len(layers.names) > 3:
        return None
    *inner, down = layers.names
    product = layers.inputs[-1]
    if len(inner) == 2:
        pairs = [(0, 1), (1, 0)]
        states = layers.outputs[:2]
    else:
        if layers.outputs[0].shape[-1] != 2 * product.shape[-1]:
            return None
        pairs = [(0, 1), (1, 0)]
        states = list(layers.outputs[0].chunk(2, -1))
    for gate, up in pairs:
        if difference([F.silu(states[gate]) * states[up]], [product]) < _CLOSE:
            return SwiGLU(inner[gate], inner[up], down) if len(inner) == 2 else SwiGLU(inner[0], None, down, gate == 0)
    return None


def _find_attention(module: nn.Module, call: Call) -> SelfAttention | None:
    args, kwargs = call
    others: dict[Slot, Any] = dict(enumerate(args[1:], 1))
    others.update(kwargs)
    if not args or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3 or tensor_leaves(others):
        return None
    layers = _Layers(module, call)
    output = layers.output
    rest = output[1:] if isinstance(output, tuple) else ()
    if not layers.ends_with_last() or len(layers.names) not in (2, 4) or any(value is not None for value in rest):
        return None
    *inner, last = layers.names
    mixed = layers.inputs[-1]
    widths = [tensor.shape[-1] for tensor in layers.outputs[:-1]]
    width = mixed.shape[-1]
    if mixed.ndim != 3 or widths[0] != (width if len(inner) == 3 else 3 * width):
        return None
    scales = [v for v in vars(module).values() if type(v) is float and 0 < v <= 1]
    sizes = [n for n in range(1, width + 1) if width % n == 0 and all(w % n == 0 for w in widths)]
    fixed = tuple((slot, as_constant(value)) for slot, value in others.items())
    nones = len(rest) if isinstance(output, tuple) else None
    for size, causal, scale, layout in itertools.product(
        reversed(sizes), (True, False), (None, 1.0, *scales), ("parts", "heads")[: 1 if len(inner) == 3 else 2]
    ):
        recipe = SelfAttention(tuple(inner), last, size, causal, scale, layout, fixed, nones)
        if difference([recipe.mixed(F.scaled_dot_product_attention, layers.outputs[:-1])], [mixed]) < _CLOSE:
            return recipe
    return None


# -- functions --


def find_function_recipe(function: Callable[..., Any], call: Call) -> FunctionRecipe | None:
    """What a `function` computes that a forward calls; None if it is nothing that is looked for."""
    args, kwargs = map_tensors_once(_widened, call)
    slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    states = [(slot, v) for slot, v in slots if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if len(states) == 1 and any(isinstance(v, torch.Tensor) and not v.is_floating_point() for _, v in slots):
        return find_loss(function, call)
    if len(states) < 3 or any(v.ndim != 4 for _, v in states[:2]):
        return None
    with torch.no_grad():
        output = function(*fresh(args), **fresh(kwargs))
    return _find_rotary(output, slots, states) or _find_attention_call(function, output, slots, states)


def _find_rotary(output: Any, slots: list[tuple[Slot, Any]], states: list[tuple[Slot, torch.Tensor]]) -> Rotary | None:
    if len(states) != 4 or not (isinstance(output, tuple | list) and len(output) == 2):
        return None
    (_, query), (_, key), (_, cos), (_, sin) = states
    if cos.ndim != 3 or cos.shape != sin.shape or cos.shape[-1] != query.shape[-1]:
        return None
    others = _constants(slots, [slot for slot, _ in states])
    try:
        expected = [_rotated(state, cos, sin) for state in (query, key)]
    except RuntimeError:  # heads are not the second dimension
        return None
    if others is None or difference(list(output), expected) > _CLOSE:
        return None
    return Rotary(tuple(slot for slot, _ in states), others)  # type: ignore[arg-type]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Su et al., "RoFormer", 2021, with the halves of a head's features as the two coordinates."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def _find_attention_call(
    function: Callable[..., Any], output: Any, slots: list[tuple[Slot, Any]], states: list[tuple[Slot, torch.Tensor]]
) -> AttentionCall | None:
    (_, query), (_, key), (_, value) = states[:3]
    attended = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(attended, torch.Tensor) or attended.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return None
    masks = [(s, v) for s, v in slots if isinstance(v, torch.Tensor) and s not in [slot for slot, _ in states[:3]]]
    unread = _unread_keywords(function, [slot for slot, _ in slots])
    masks = [(s, v) for s, v in masks if s not in unread]
    if len(masks) > 1:
        return None
    mask = masks[0] if masks else None
    used = (states[0][0], states[1][0], states[2][0])
    scales: list[tuple[Slot | None, Any]] = [(None, None)]
    scales += [(slot, v) for slot, v in slots if type(v) is float and v > 0]
    for heads_first, out_first, causal, (scale, number) in itertools.product(
        (True, False), (False, True), (False,) if mask else (False, True), scales
    ):
        given = [query, key, value] if heads_first else [state.transpose(1, 2) for state in (query, key, value)]
        if given[0].shape[1] % given[1].shape[1] or given[1].shape[:3] != given[2].shape[:3]:
            continue
        try:
            mixed = F.scaled_dot_product_attention(
                given[0], given[1], given[2], attn_mask=mask[1] if mask else None, is_causal=causal, scale=number,
                enable_gqa=given[0].shape[1] != given[1].shape[1],
            )  # fmt: skip
        except RuntimeError:  # shapes of another layout
            continue
        if difference([mixed if out_first else mixed.transpose(1, 2)], [attended]) < _CLOSE:
            others = _constants(slots, [*used, scale, *unread, *([mask[0]] if mask else [])])
            if others is None:
                return None
            nones = len(output) - 1 if isinstance(output, tuple) else None
            return AttentionCall(
                used, mask[0] if mask else None, scale, causal, heads_first, out_first, others, tuple(unread), nones
            )  # type: ignore[arg-type]
    return None


def find_loss(function: Callable[..., Any], call: Call) -> Loss | None:
    """Whether `function` is the cross entropy of logits [..., classes] and targets [...]."""
    args, kwargs = call
    slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    logits = [(s, v) for s, v in slots if isinstance(v, torch.Tensor) and v.is_floating_point() and v.ndim > 1]
    targets = [(s, v) for s, v in slots if isinstance(v, torch.Tensor) and v.dtype == torch.int64]
    if len(logits) != 1 or len(targets) != 1 or logits[0][1].shape[:-1] != targets[0][1].shape:
        return None
    others = _constants(slots, [logits[0][0], targets[0][0]])
    if others is None:
        return None
    classes, device = logits[0][1].shape[-1], logits[0][1].device
    ranks = logits[0][1].ndim - 1
    # Every class once, as far as there are not too many: one of them may be padding.
    labels = torch.tensor([*range(min(classes, _MOST_CLASSES)), classes - 1], device=device)
    values = torch.randn(len(labels), classes, generator=torch.Generator().manual_seed(1)).to(device)
    named = [v for _, v in (*slots, *vars(function).items()) if type(v) is int]

    def run(labels: torch.Tensor) -> torch.Tensor | None:
        shape = (1,) * (ranks - 1)
        given = {logits[0][0]: values.view(*shape, *values.shape), targets[0][0]: labels.view(*shape, len(labels))}
        replaced = [given.get(slot, value) for slot, value in enumerate(args)]
        try:
            with torch.no_grad():
                loss = function(*replaced, **{name: given.get(name, value) for name, value in kwargs.items()})
        except (RuntimeError, IndexError, ValueError):
            return None
        return loss if isinstance(loss, torch.Tensor) and loss.ndim == 0 else None

    for reduction, ignored in itertools.product(("mean", "sum"), dict.fromkeys((*named, -100, -1))):
        some = labels.clone()
        some[:2] = ignored
        expected = [F.cross_entropy(values, t, ignore_index=ignored, reduction=reduction) for t in (labels, some)]
        for tried, wanted in zip((labels, some), expected, strict=True):
            loss = run(tried)
            if loss is None and tried is some:
                loss = wanted  # its own code fails on such a label, so that none of them is ever there
            if loss is None or difference([loss], [wanted]) > _CLOSE:
                break
        else:
            return Loss(logits[0][0], targets[0][0], reduction, ignored, others)
    return None


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _constants(slots: list[tuple[Slot, Any]], used: list[Slot | None]) -> tuple[tuple[Slot, Any], ...] | None:
    """The arguments beside those that are `used`; None if one of them is a tensor."""
    rest = tuple((slot, as_constant(value)) for slot, value in slots if slot not in used)
    return None if tensor_leaves([value for _, value in rest]) else rest


def _unread_keywords(function: Any, slots: list[Slot]) -> list[str]:
    """Keywords that `function` collects in its ``**kwargs``, if its code never reads these."""
    code = function.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    index = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
    if not code.co_flags & 8:
        return []
    collected = code.co_varnames[index]
    if collected in code.co_cellvars or any(
        i.argval == collected and i.opname.startswith("LOAD") for i in dis.get_instructions(code)
    ):
        return []
    return [slot for slot in slots if isinstance(slot, str) and slot not in named]
