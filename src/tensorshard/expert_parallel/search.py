"""Finds the modules of a model that hold experts, and how each can be split. What is proposed is checked by numbers.

A proposal says which argument is what and which attributes count the experts. It holds if the ranks' experts, each
computed for the choices that it was sent, give what the whole module gives: outputs and gradients, for uneven routing,
for experts that nobody chose, for a rank without tokens and for all tokens on one expert.
"""

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from tensorshard.expert_parallel.listed_experts import (
    MODEL_ERRORS,
    ListedExperts,
    check_equal_parts,
    evaluating,
    find_lists,
    first_difference,
    gradients_of,
    random_values,
)
from tensorshard.expert_parallel.routed_experts import RoutedCall
from tensorshard.expert_parallel.stacked_experts import SortedCall, StackedExperts
from tensorshard.model.blocks import find_experts
from tensorshard.torch_private.modules import own_parameters

SplitExperts = StackedExperts | ListedExperts


def find_routed_experts(model: nn.Module, ranks: int) -> dict[str, SplitExperts]:
    """How the experts of each mixture in `model` are split, by the name of its module. `ranks` share them.

    Args:
        model: on the meta device.

    Raises:
        ValueError: there are none; or some cannot be split over `ranks`. The message names them.
    """
    calls: dict[str, SplitExperts] = {}
    known: dict[object, StackedExperts] = {}
    for name, module in find_experts(model).items():
        kind = _kind_of(module)
        if kind not in known:
            _check_unchanged(model, name, module, ranks)
            known[kind] = find_call(name, module, ranks)
        calls[name] = known[kind]
    lists, reason = find_lists(model, ranks)
    calls.update(lists)
    if not calls:
        why = f" ({reason})" if reason else ""
        raise ValueError(
            f"ep={ranks} was given, but {type(model).__name__} has no module that ep splits{why}: one with all experts "
            f"in parameters [experts, ...], two or more of them of three dimensions, that is called with the experts "
            f"that each token has chosen; or one with a list of experts, equal modules that it calls with the tokens "
            f"that chose them; set ep=1"
        )
    return calls


def _check_unchanged(model: nn.Module, name: str, module: nn.Module, ranks: int) -> None:
    """Refuses experts whose parameters a module around them changes in its forward, as those of adapters do.

    Such code sees a rank's part of the parameters, and adds what it has for all experts.
    """
    within = name.split(".")
    for depth in range(len(within)):
        around = model.get_submodule(".".join(within[:depth]))
        for key, value in vars(around).items():
            if isinstance(value, str) and value in own_parameters(module):
                raise ValueError(
                    f"ep={ranks} was given, but the experts of {name!r} ({type(module).__name__}) cannot be split over "
                    f"{ranks} ranks: {type(around).__name__} names their parameter {value!r} ({key}) and changes it "
                    f"for all experts at once, as adapters on experts do; set ep=1, or leave that parameter without one"
                )


def find_call(name: str, module: nn.Module, ranks: int) -> StackedExperts:
    """How the experts of `module` are called.

    Raises:
        ValueError: they cannot be split over `ranks`.
    """
    shapes = {key: tuple(parameter.shape) for key, parameter in own_parameters(module).items()}
    experts = max(shapes.values(), key=len)[0]
    others = [key for key, shape in shapes.items() if not shape or shape[0] != experts]
    what = (
        f"ep={ranks} was given, but the experts of {name!r} ({type(module).__name__}) cannot be split over {ranks} "
        f"ranks"
    )
    if others:
        raise ValueError(f"{what}: {others[0]} has no dimension of {experts} experts; set ep=1")
    check_equal_parts(name, module, experts, ranks)
    widths = dict.fromkeys(size for p in own_parameters(module).values() if p.dim() == 3 for size in p.shape[:0:-1])
    reason = "no argument takes the experts that each token has chosen"
    with evaluating(module):  # random numbers of dropout would differ
        for kind in (RoutedCall, SortedCall):
            for call, width in itertools.product(kind.proposals(module, experts), widths):
                failed = _why_not(module, call, width, ranks)
                if failed is None:
                    return call
                reason = failed or reason
    raise ValueError(
        f"{what}: called with tokens [tokens, features], their experts and weights [tokens, choices], {reason}; "
        f"set ep=1"
    )


def _why_not(module: nn.Module, call: StackedExperts, width: int, ranks: int) -> str | None:
    """Why the experts are not split by `call`; "" if the module does not even run; None if they can be."""
    random = torch.Generator().manual_seed(0)
    parameters = {key: random_values(p, random) for key, p in own_parameters(module).items()}
    buffers = {key: torch.zeros(b.shape, dtype=b.dtype) for key, b in module.named_buffers()}
    each = call.experts // ranks

    def forward_of(rank: int | None) -> Callable[..., torch.Tensor]:
        own = slice(None) if rank is None else slice(rank * each, (rank + 1) * each)
        values = {**{key: p[own] for key, p in parameters.items()}, **buffers}
        return lambda *args, **kwargs: functional_call(module, values, args, kwargs)

    for arguments in call.samples(width, ranks, random):
        leaves = [t for t in (*arguments.values(), *parameters.values()) if t.requires_grad]
        tokens = arguments[call.tokens]
        try:
            expected = call.run(forward_of(None), arguments)
            if not isinstance(expected, torch.Tensor) or expected.shape != tokens.shape:
                return ""
            wanted = gradients_of(expected, leaves)
        except MODEL_ERRORS:
            return ""
        try:
            result = call.on_ranks(module, arguments, ranks, forward_of)
            given = gradients_of(result, leaves)
        except MODEL_ERRORS as error:
            return f"its forward fails with the experts of one rank ({str(error).splitlines()[0]})"
        different = first_difference((result, *given), (expected, *wanted))
        if different is not None:
            what = "outputs" if different == 0 else "gradients"
            return f"its {what} are not the sums of what the ranks' experts compute"
    return None


def _kind_of(module: nn.Module) -> object:
    """Equal for modules that compute the same with other values."""
    shapes = tuple((key, tuple(p.shape)) for key, p in own_parameters(module).items())
    numbers = tuple(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and "layer" not in key and key != "training"
    )
    return type(module), module.forward.__func__ if hasattr(module.forward, "__func__") else module, shapes, numbers
