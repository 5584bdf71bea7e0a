"""``ts.swap``: finds parts of a model that a faster function computes, and puts it there if numbers confirm it."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from tensorshard.comm.decisions import decide_once
from tensorshard.comm.world import default_device, join_world, under_torchrun
from tensorshard.common.words import kind_of
from tensorshard.model.global_state import restored_globals
from tensorshard.parallelize.parallelized_models import check_not_parallelized
from tensorshard.swaps.changes import Change, Decisions, LeftAlone, apply_decisions
from tensorshard.swaps.decide import Search, as_time
from tensorshard.swaps.functions import KINDS, choices_of
from tensorshard.swaps.recipes import Function


class Swaps:
    """What :func:`tensorshard.swap` has done.

    Attributes:
        changed: what computes by other functions now, a list of ``Change``: `kind`, `name`, `modules`, `function`,
            `before` and `after` (seconds a call), `difference`.
        left: what was found and does not, a list of ``LeftAlone``: `kind`, `name`, `modules`, `reason`.
        step: seconds of the whole model, forward and backward on the sample, before and after; None where nothing
            changed.
    """

    def __init__(self, decisions: Decisions, functions: dict[tuple[str, str], Function]) -> None:
        self._decisions = decisions
        self._functions = functions
        self.changed = decisions.changed
        self.left = decisions.left
        self.step = decisions.step

    def apply(self, model: nn.Module) -> nn.Module:
        """Makes the same changes in another `model` of the same classes and sizes, without measuring.

        It takes a model on the meta device, too, and may be called within the callable that
        :func:`tensorshard.parallelize` takes: check two blocks, and apply to eighty. Modules whose class, sizes or
        settings were not among those that were checked stay as they are.

        Returns:
            `model` itself.

        Raises:
            ValueError: something was changed in the checked model, and nothing fits in this one.
        """
        if apply_decisions(model, self._decisions, self._functions) or not self.changed:
            return model
        kinds = ", ".join(f"{change.kind} of {change.name}" for change in self.changed)
        raise ValueError(
            f"none of what was changed ({kinds}) is in this {type(model).__name__} with the same class, sizes and "
            f"settings: call ts.swap on a smaller model of the same widths"
        )

    def describe(self) -> str:
        """The changes with their gain, and what was left alone with the reason, as lines of text."""
        lines = [f"swapped ({len(self.changed)})"]
        for c in self.changed:
            lines.append(
                f"  {c.kind}: {_modules(c)} by {c.function}: {as_time(c.before)} -> {as_time(c.after)} a call "
                f"({c.before / c.after:.2f} times as fast), differs by {c.difference:.0e}"
            )
        lines.append(f"left alone ({len(self.left)})")
        lines += [f"  {entry.kind}: {_modules(entry)}: {entry.reason}" for entry in self.left]
        if self.step is not None:
            before, after = self.step
            lines.append(
                f"model: {as_time(before)} -> {as_time(after)} forward and backward ({before / after:.2f} times)"
            )
        return "\n".join(lines)

    __str__ = describe

    def __repr__(self) -> str:
        return f"Swaps(changed={len(self.changed)}, left={len(self.left)})"


def swap(
    model: nn.Module,
    functions: Mapping[str, str | Function | type[nn.Module]] | None = None,
    *,
    sample_inputs: Any = None,
    min_speedup: float = 1.0,
) -> Swaps:
    """Lets faster functions compute parts of `model`, where they give the same numbers and take less time.

    Norms, SwiGLU MLPs, rotary embeddings, attention and cross entropies are found by what they compute: parts of a copy
    run on sample inputs and random weights, and what comes out is compared with the formula. Then the part with the
    faster function is compared with the part as it was, in training and in evaluation: outputs and gradients of inputs
    and weights, norms also in bf16. At last the whole model is compared. Only then does `model` change.

    Call it before :func:`tensorshard.parallelize`, on the device where the model will train. Modules, names of
    parameters, ties, hooks and state dicts stay as they are; modules get a forward. Under torchrun rank 0 measures for
    all ranks.

    The idea of layers that are swapped for faster ones is LiBai's; Liger-Kernel and Apex do it by class names.

    Args:
        model: an ``nn.Module`` with its weights. A loss that is a module of its own is one, too.
        functions: what to put in place, by kind: "rms_norm", "layer_norm", "swiglu", "rotary", "attention",
            "cross_entropy". Each is "torch" (its fused function), "liger" (Liger-Kernel's, on a GPU), "auto" (the
            fastest of both), or your own: a function that is called as torch's of that name; ``(gate, up)`` for
            "swiglu", ``(q, k, cos, sin)`` for "rotary"; for norms also a module class that takes the size and ``eps=``.
            By default all kinds, each "auto".
        sample_inputs: inputs of `model` of the size that it trains on, as for :meth:`Engine.step`: time depends on it.
            By default small ones, guessed from its layers.
        min_speedup: how many times as fast a part must be to be changed, forward and backward. 0 takes what computes
            the same, whatever its time.

    Returns:
        What was changed and what it gained, and what was left alone and why: ``print(swaps)``.

    Raises:
        ValueError: an unknown kind or function; "torch" where torch has no such function, "liger" without a GPU or
            without Liger-Kernel; the model is laid out already or on the meta device; no inputs could be guessed.
        TypeError: an argument of another type.

    Examples:
        >>> swaps = ts.swap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)))
        >>> swaps.left[0].kind, swaps.left[0].reason
        ('layer_norm', "it is torch's layer_norm already")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ts.swap was given {kind_of(model)}; it must be an nn.Module with its weights. For a callable, call "
            f"ts.swap on a small model, and swaps.apply(model) within the callable"
        )
    check_not_parallelized(model)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model is on the meta device, and ts.swap compares numbers: call it on a model with fewer blocks, and "
            "swaps.apply(model) on this one"
        )
    if isinstance(min_speedup, bool) or not isinstance(min_speedup, int | float):
        raise TypeError(f"min_speedup={min_speedup!r} was given; it must be a number, such as 1.1")
    device = next((p.device for p in model.parameters()), default_device())
    choices = choices_of(dict.fromkeys(KINDS, "auto") if functions is None else functions, device)
    table = {(kind, label): function for kind, by_label in choices.items() for label, function in by_label.items()}

    def decide() -> Decisions:
        with restored_globals(model):
            return Search(model, choices, table, sample_inputs, device, min_speedup).decide()

    if under_torchrun() or dist.is_initialized():
        join_world(default_device())
        assert dist.group.WORLD is not None
        decisions = decide_once(decide, dist.group.WORLD)
    else:
        decisions = decide()
    apply_decisions(model, decisions, table)
    return Swaps(decisions, table)


def _modules(entry: Change | LeftAlone) -> str:
    names = [name or "the model itself" for name in entry.modules]
    few = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return f"{entry.name} ({few})"
