"""Decides which parts of a model change: runs it, finds recipes, compares numbers and times."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tensorshard.model.batches import call_model
from tensorshard.model.fake_copies import copy_with
from tensorshard.model.forwards import has_users_forward
from tensorshard.model.sample_inputs import example_inputs
from tensorshard.model.tensors import map_tensors_once
from tensorshard.swaps.changes import (
    Change,
    Decisions,
    LeftAlone,
    apply_decisions,
    called_functions,
    class_key,
    family_of,
    signature_of,
)
from tensorshard.swaps.functions import KINDS, NO_FUSED_FORM, TORCH, without_liger
from tensorshard.swaps.measure import bound, difference, fresh, results, rounding, seconds, timed
from tensorshard.swaps.recipes import Function, FunctionRecipe, ModuleRecipe, Norm, forget, rebound
from tensorshard.swaps.search import Call, find_function_recipe, find_recipe, looks_like_part

_MODEL_BOUND = 10.0  # times that of one part: what the parts' rounding may add up to
_RECORDED = "_tensorshard_recorded"


class Search:
    """One search, on a copy of the model that shares its weights."""

    def __init__(
        self,
        model: nn.Module,
        choices: dict[str, dict[str, Function]],
        table: dict[tuple[str, str], Function],
        sample_inputs: Any,
        device: torch.device,
        min_speedup: float,
    ) -> None:
        self._model = copy_with(model, lambda _, tensor: tensor.detach().clone() if _is_buffer(tensor) else tensor)
        self._choices = choices
        self._table = table
        self._device = device
        self._min_speedup = min_speedup
        self._already: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self._calls: dict[str, Call] = {}  # of modules, by family
        self._function_calls: dict[tuple[str, str], tuple[Function, Call]] = {}
        self._decisions = Decisions()
        self._sample = self._capture(sample_inputs)

    def decide(self) -> Decisions:
        before = [self._whole(training) for training in (True, False)]
        self._check_parts()
        self._check_functions()
        self._note_others()
        if not self._decisions.changed:
            return self._decisions
        changed = copy_with(self._model, lambda _, tensor: tensor)
        apply_decisions(changed, self._decisions, self._table)
        after = [self._whole(training, changed) for training in (True, False)]
        for (outputs, grads), (new_outputs, new_grads) in zip(before, after, strict=True):
            apart = max(difference(new_outputs, outputs), difference(new_grads, grads))
            if not apart <= _MODEL_BOUND * bound(outputs):
                reason = f"each part agreed alone, and the whole model differs by {apart:.0e}, so nothing was changed"
                left = [LeftAlone(c.kind, c.name, c.modules, reason) for c in self._decisions.changed]
                return Decisions(left=[*self._decisions.left, *left])
        self._model.train()
        changed.train()
        calls = [
            timed(partial(call_model, model), (self._sample,), {}, list(model.parameters()))
            for model in (self._model, changed)
        ]
        first, second = seconds(calls, self._device)
        self._decisions.step = first, second
        return self._decisions

    # -- runs of the whole model --

    def _capture(self, sample_inputs: Any) -> Any:
        """Runs the model, and keeps what its parts and functions were called with. The inputs that it ran on."""
        if sample_inputs is not None:
            given = map_tensors_once(lambda t: t.to(self._device), sample_inputs)
            self._run_watched(given)
            return given
        for candidate in example_inputs(self._model):
            given = map_tensors_once(lambda t: t.to(self._device), candidate)
            with suppress(Exception):  # a guess; the next one may fit
                self._run_watched(given)
                return given
        raise ValueError(
            f"ts.swap runs the model, and no inputs could be guessed for this {type(self._model).__name__}: pass "
            f"sample_inputs, such as those of one step"
        )

    def _run_watched(self, inputs: Any) -> None:
        self._calls.clear()
        self._function_calls.clear()
        self._model.eval()
        names = {id(module): name for name, module in self._model.named_modules()}
        watched = _Watched(names)
        hooks = []
        for module in self._model.modules():
            hooks.append(module.register_forward_pre_hook(self._note(watched), with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(watched.leave, always_call=True))
            self._record_functions(module)
        try:
            with torch.no_grad(), torch.random.fork_rng([]), watched:
                call_model(self._model, fresh(inputs))
        finally:
            for hook in hooks:
                hook.remove()
            for module in self._model.modules():
                if vars(module).pop(_RECORDED, False):
                    forget(module.forward)
                    del module.forward
        self._already = watched.callers

    def _note(self, watched: "_Watched") -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watched.enter(module)
            if looks_like_part(module):
                key = family_of(module)
                if key not in self._calls:
                    self._calls[key] = _kept((args, kwargs))

        return note

    def _record_functions(self, module: nn.Module) -> None:
        """Lets the forward of `module` call its global functions through what keeps their arguments."""
        if has_users_forward(module):
            return
        original = type(module).forward
        names = {
            name: self._recorder(class_key(module), name, called) for name, called in called_functions(original).items()
        }
        if names:
            vars(module)["forward"] = MethodType(rebound(original, names), module)
            vars(module)[_RECORDED] = True

    def _recorder(self, key: str, name: str, function: Function) -> Function:
        def record(*args: Any, **kwargs: Any) -> Any:
            if (key, name) not in self._function_calls:
                with suppress(Exception):  # of arguments that cannot be copied
                    self._function_calls[key, name] = function, _kept((args, kwargs))
            return function(*args, **kwargs)

        return record

    def _whole(self, training: bool, model: nn.Module | None = None) -> Any:
        model = self._model if model is None else model
        model.train(training)
        return results(partial(call_model, model), (self._sample,), {}, list(model.parameters()))

    # -- parts --

    def _check_parts(self) -> None:
        recipes: dict[str, ModuleRecipe | None] = {}
        groups: dict[tuple[str, str], list[tuple[str, nn.Module]]] = {}
        for name, module in self._model.named_modules():
            call = self._calls.get(family_of(module))
            if call is None:
                continue
            key = signature_of(module)
            if key not in recipes:
                recipes[key] = None
                with suppress(Exception), torch.random.fork_rng([]):  # a part may not run outside of its model
                    recipes[key] = find_recipe(module, call)
            recipe = recipes[key]
            if recipe is not None and recipe.kind in self._choices:
                groups.setdefault((recipe.kind, key), []).append((name, module))
        for (_, key), members in groups.items():
            recipe = recipes[key]
            assert recipe is not None
            self._check_part(key, recipe, members)

    def _check_part(self, key: str, recipe: ModuleRecipe, members: list[tuple[str, nn.Module]]) -> None:
        kind = recipe.kind
        names, module = tuple(name for name, _ in members), members[0][1]
        label = type(module).__name__

        def leave(reason: str) -> None:
            self._decisions.left.append(LeftAlone(kind, label, names, reason))

        if any(has_users_forward(member) for _, member in members):
            return leave("its forward was set on the instance, and stays")
        candidates = self._candidates(kind, any(name in self._already[kind] for name in names))
        if isinstance(candidates, str):
            return leave(candidates)
        call, original = self._calls[family_of(module)], type(module).forward
        best: tuple[float, float, str, float] | None = None
        reasons = []
        for function, fast in candidates.items():
            new = recipe.build(fast, original)
            worst, reason = 0.0, None
            for _, member in members:
                apart, reason = _compare_part(member, new, call, mixed=isinstance(recipe, Norm))
                worst = max(worst, apart)
                if reason is not None:
                    break
            if reason is not None:
                reasons.append(f"{function} {reason}")
                continue
            before, after = self._timed(original, new, call, module)
            if before / after < self._min_speedup:
                reasons.append(f"{function} takes {as_time(after)} a call, and its own code {as_time(before)}")
            elif best is None or after / before < best[1] / best[0]:
                best = before, after, function, worst
        if best is None:
            return leave("; ".join(reasons))
        before, after, function, worst = best
        self._decisions.changed.append(Change(kind, label, names, function, before, after, worst))
        self._decisions.parts[key] = recipe, function
        return None

    def _candidates(self, kind: str, already: bool) -> dict[str, Function] | str:
        """The functions to try; or why there are none."""
        functions = dict(self._choices[kind])
        if already:
            functions.pop(f"torch's {kind}", None)
        if functions:
            return functions
        if already:
            return _already_torchs(kind)
        return f"{NO_FUSED_FORM}, and of Liger's, {without_liger(self._device)}"

    def _timed(self, original: Function, new: Function, call: Call, module: nn.Module) -> list[float]:
        module.train()
        parameters = list(module.parameters())
        return seconds(
            [timed(MethodType(forward, module), *call, parameters) for forward in (original, new)], self._device
        )

    def _note_others(self) -> None:
        """Modules that call torch's functions in code that was not taken apart."""
        modules = dict(self._model.named_modules())
        for kind in self._choices:
            entries: list[Change | LeftAlone] = [*self._decisions.changed, *self._decisions.left]
            known = {name for entry in entries if entry.kind == kind for name in entry.modules}
            groups: dict[str, list[str]] = {}
            for name in sorted(self._already[kind] - known):
                groups.setdefault(type(modules[name]).__name__, []).append(name)
            for label, names in groups.items():
                self._decisions.left.append(LeftAlone(kind, label, tuple(names), _already_torchs(kind)))

    # -- functions that forwards call --

    def _check_functions(self) -> None:
        for (key, name), (function, call) in self._function_calls.items():
            recipe = None
            with suppress(Exception), torch.random.fork_rng([]):  # a function may not run outside of its forward
                recipe = find_function_recipe(function, call)
            if recipe is not None and recipe.kind in self._choices:
                self._check_function(key, name, function, call, recipe)

    def _check_function(self, key: str, name: str, function: Function, call: Call, recipe: FunctionRecipe) -> None:
        kind = recipe.kind
        members = tuple(n for n, m in self._model.named_modules() if class_key(m) == key and not has_users_forward(m))
        label = f"{name}()"
        already = any(member in self._already[kind] for member in members)
        candidates = self._candidates(kind, already)
        if isinstance(candidates, str):
            self._decisions.left.append(LeftAlone(kind, label, members, candidates))
            return
        used = _first_output if kind == "attention" else _as_it_is  # attention weights are not computed
        best: tuple[float, float, str, float] | None = None
        reasons = []
        for chosen, fast in candidates.items():
            new = recipe.build(fast, function)
            try:
                apart, reason = _compare(lambda f: results(used(f), *call), function, new)
            except Exception as error:  # of somebody else's function
                apart, reason = 0.0, f"raised {type(error).__name__}: {error}"
            if reason is not None:
                reasons.append(f"{chosen} {reason}")
                continue
            before, after = seconds([timed(used(variant), *call) for variant in (function, new)], self._device)
            if before / after < self._min_speedup:
                reasons.append(f"{chosen} takes {as_time(after)} a call, and its own code {as_time(before)}")
            elif best is None or after / before < best[1] / best[0]:
                best = before, after, chosen, apart
        if best is None:
            self._decisions.left.append(LeftAlone(kind, label, members, "; ".join(reasons)))
            return
        before, after, chosen, apart = best
        self._decisions.changed.append(Change(kind, label, members, chosen, before, after, apart))
        self._decisions.called[key, name] = recipe, chosen


def _already_torchs(kind: str) -> str:
    return f"it is torch's {TORCH[kind].__name__} already"


def _compare_part(module: nn.Module, new: Function, call: Call, *, mixed: bool) -> tuple[float, str | None]:
    """The difference that the forward `new` makes, in training and evaluation; and why it cannot be used, if so."""
    worst = 0.0
    original = type(module).forward
    types: list[tuple[torch.dtype | None, torch.dtype | None]] = [(None, None)]
    if mixed:
        types += [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    for training in (True, False):
        module.train(training)
        for inputs, weights in types:

            def run(forward: Function, inputs: Any = inputs, weights: Any = weights) -> Any:
                cast: dict[str, torch.Tensor] = dict(module.named_parameters())
                given = call
                if inputs is not None:
                    cast = {n: p.detach().to(weights).requires_grad_(p.requires_grad) for n, p in cast.items()}
                    given = map_tensors_once(lambda t: t.to(inputs) if t.is_floating_point() else t, call)

                def called(*args: Any, **kwargs: Any) -> Any:
                    vars(module)["forward"] = MethodType(forward, module)
                    try:
                        return functional_call(module, cast, args, kwargs)
                    finally:
                        del module.forward

                return results(called, *given, list(cast.values()))

            if inputs is not None:
                try:
                    run(original)
                except (RuntimeError, TypeError):
                    continue  # its own code does not take these types
            try:
                apart, reason = _compare(run, original, new, 0.0 if inputs is None else rounding(inputs))
            except Exception as error:  # of somebody else's function
                return worst, f"raised {type(error).__name__}: {error}"
            if reason is not None:
                where = "in training" if training else "in evaluation"
                return apart, f"{reason} {where}{'' if inputs is None else f' in {str(inputs)[6:]}'}"
            if inputs is None:
                worst = max(worst, apart)
    return worst, None


def _compare(
    run: Callable[[Function], Any], original: Function, new: Function, least: float = 0.0
) -> tuple[float, str | None]:
    """The difference of two functions, and what to say if it is above rounding, which is at `least` so much."""
    (expected, expected_grads), (actual, actual_grads) = run(original), run(new)
    apart = max(difference(actual, expected), difference(actual_grads, expected_grads))
    if apart <= max(least, bound(expected)):
        return apart, None
    return apart, "gives tensors of another shape or type" if apart == float("inf") else f"differs by {apart:.0e}"


def _as_it_is(function: Function) -> Function:
    return function


def _first_output(function: Function) -> Function:
    def first(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    return first


def _kept(call: Any) -> Any:
    return map_tensors_once(lambda t: t.detach().clone(), call)


def _is_buffer(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter)


class _Watched(TorchFunctionMode):
    """Notes which modules call torch's own fused functions."""

    _OF = {
        F.rms_norm: "rms_norm", torch.rms_norm: "rms_norm",
        F.layer_norm: "layer_norm", torch.layer_norm: "layer_norm",
        F.scaled_dot_product_attention: "attention", F.cross_entropy: "cross_entropy",
    }  # fmt: skip

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self._stack: list[str] = []
        self.callers: dict[str, set[str]] = {kind: set() for kind in KINDS}

    def enter(self, module: nn.Module) -> None:
        self._stack.append(self._names.get(id(module), ""))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._OF.get(func)
        if kind is not None and self._stack:
            self.callers[kind].add(self._stack[-1])
        return func(*args, **(kwargs or {}))


def as_time(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
