"""What was decided, as data that travels between ranks, and how a model is changed by it."""

from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from tensorshard.model.forwards import has_users_forward
from tensorshard.swaps.recipes import Function, FunctionRecipe, ModuleRecipe, innermost, rebound

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Change:
    """One kind of part that computes by another function now.

    Args:
        kind: what it computes, one of :data:`KINDS`.
        name: the class of the modules; or the function that their forwards called.
        modules: names of the modules.
        function: what computes it now.
        before, after: seconds of a call, forward and backward.
        difference: the largest one between outputs and gradients, in parts of their largest value.
    """

    kind: str
    name: str
    modules: tuple[str, ...]
    function: str
    before: float
    after: float
    difference: float


@dataclass(frozen=True)
class LeftAlone:
    """One kind of part that computes as it did; `kind`, `name` and `modules` as of :class:`Change`."""

    kind: str
    name: str
    modules: tuple[str, ...]
    reason: str


@dataclass
class Decisions:
    """What travels between ranks.

    Args:
        parts: recipe and the name of its function, by a module's signature.
        called: the same, by a module's class and the name that its forward calls.
        step: seconds of the model's forward and backward, before and after.
    """

    changed: list[Change] = field(default_factory=list)
    left: list[LeftAlone] = field(default_factory=list)
    parts: dict[str, tuple[ModuleRecipe, str]] = field(default_factory=dict)
    called: dict[tuple[str, str], tuple[FunctionRecipe, str]] = field(default_factory=dict)
    step: tuple[float, float] | None = None


def apply_decisions(model: nn.Module, decisions: Decisions, table: dict[tuple[str, str], Function]) -> int:
    """Gives modules of `model` their new forwards. How many there are."""
    built: dict[Any, Function] = {}
    count = 0
    for module in model.modules():
        if has_users_forward(module):
            continue
        original = type(module).forward
        if (part := decisions.parts.get(signature_of(module))) is not None:
            recipe, label = part
            key: Any = (original, recipe, label)
            if key not in built:
                built[key] = recipe.build(table[recipe.kind, label], original)
        else:
            key = class_key(module)
            names = {name: choice for (cls, name), choice in decisions.called.items() if cls == key}
            if not names:
                continue
            if key not in built:
                called = called_functions(original)
                built[key] = rebound(
                    original,
                    {n: r.build(table[r.kind, label], called[n]) for n, (r, label) in names.items() if n in called},
                )
        vars(module)["forward"] = MethodType(built[key], module)
        count += 1
    return count


# -- what identifies modules and functions --


def called_functions(forward: Any) -> dict[str, Function]:
    """The Python functions that `forward` calls by global names, but for torch's."""
    inner = innermost(forward)
    if inner is None:
        return {}
    referenced = {name: inner.__globals__.get(name) for name in inner.__code__.co_names}
    return {
        name: value
        for name, value in referenced.items()
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] != "torch"
    }


def class_key(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def family_of(module: nn.Module) -> str:
    """Class and sizes."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    return f"{class_key(module)} {shapes}"


def signature_of(module: nn.Module) -> str:
    """Class, sizes and settings, of the module and those within."""
    settings = []
    for name, submodule in module.named_modules():
        plain = {
            key: value if isinstance(value, _PLAIN) else getattr(value, "__qualname__", "")
            for key, value in vars(submodule).items()
            if key != "training" and isinstance(value, (*_PLAIN, FunctionType))
        }
        settings.append((name, class_key(submodule), sorted(plain.items(), key=lambda item: item[0])))
    return f"{family_of(module)} {settings}"
