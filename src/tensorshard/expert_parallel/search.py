"""Finds the modules of a model that hold experts, and how each can be split. What is proposed is checked by numbers.

A proposal says which argument is what and which attributes count the experts. It holds if the ranks' experts, each
computed for the choices that it was sent, give what the whole module gives: outputs and gradients, for uneven routing,
for experts that nobody chose, for a rank without tokens and for all tokens on one expert.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from tensorshard.expert_parallel.routed_experts import RoutedCall, Routes, compute_rows
from tensorshard.model.forwards import own_forward
from tensorshard.model.special_layers import find_experts
from tensorshard.torch_private.modules import own_parameters

_TOKENS = 11
_TOLERANCE = 1e-4
_LARGE = 1 << 22  # elements; larger parameters are checked with values that repeat, and without their own gradients


def find_routed_experts(model: nn.Module, ranks: int) -> dict[str, RoutedCall]:
    """How each module of stacked experts in `model` is called, by its name. `ranks` share the experts of each.

    Args:
        model: on the meta device.

    Raises:
        ValueError: there is none; or one cannot be split over `ranks`. The message names it.
    """
    found = {}
    known: dict[object, RoutedCall] = {}
    for name, module in find_experts(model).items():
        kind = _kind_of(module)
        if kind not in known:
            known[kind] = find_call(name, module, ranks)
        found[name] = known[kind]
    if not found:
        raise ValueError(
            f"ep={ranks} was given, but {type(model).__name__} has no module that ep splits: one with all experts in "
            f"parameters [experts, ...], two or more of them of three dimensions, that is called with the experts that "
            f"each token has chosen; set ep=1"
        )
    return found


def find_call(name: str, module: nn.Module, ranks: int) -> RoutedCall:
    """How the experts of `module` are called.

    Raises:
        ValueError: they cannot be split over `ranks`.
    """
    shapes = {key: tuple(parameter.shape) for key, parameter in own_parameters(module).items()}
    experts = max(shapes.values(), key=len)[0]
    others = [key for key, shape in shapes.items() if not shape or shape[0] != experts]
    described = f"the experts of {name!r} ({type(module).__name__})"
    what = f"ep={ranks} was given, but {described} cannot be split over {ranks} ranks"
    if others:
        raise ValueError(f"{what}: {others[0]} has no dimension of {experts} experts; set ep=1")
    if experts % ranks:
        ways = [str(n) for n in range(2, experts + 1) if experts % n == 0]
        raise ValueError(f"{what}: there are {experts}, which are not equal parts; ep can be {', '.join(ways)}")
    reason = "no argument takes the experts that each token has chosen"
    modes = {inner: inner.training for inner in module.modules()}
    module.eval()  # random numbers of dropout would differ
    try:
        for call, width in _proposals(module, experts):
            failed = _why_not(module, call, width, ranks)
            if failed is None:
                return call
            reason = failed or reason
    finally:
        for inner, training in modes.items():
            inner.training = training
    raise ValueError(
        f"{what}: called with tokens [tokens, features], their experts and weights [tokens, choices], {reason}; "
        f"set ep=1"
    )


def _proposals(module: nn.Module, experts: int) -> Iterator[tuple[RoutedCall, int]]:
    """Calls that may be right, each with the number of features of a token; the likeliest first."""
    parameters = inspect.signature(own_forward(module)).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
    widths = dict.fromkeys(size for p in own_parameters(module).values() if p.dim() == 3 for size in p.shape[:0:-1])
    equal = [key for key, value in vars(module).items() if type(value) is int and value == experts]
    subsets = [tuple(s) for n in range(len(equal), -1, -1) for s in itertools.combinations(equal, n)]
    subsets.sort(key=lambda subset: any("expert" not in key for key in subset))
    if len(required) == 3:
        for counts in subsets:
            for (tokens, choices, weights), width in itertools.product(itertools.permutations(required), widths):
                yield RoutedCall(tokens, choices, weights, counts, experts), width


def _why_not(module: nn.Module, call: RoutedCall, width: int, ranks: int) -> str | None:
    """Why the experts are not split by `call`; "" if the module does not even run; None if they can be."""
    random = torch.Generator().manual_seed(0)
    parameters = {key: _values(p, random) for key, p in own_parameters(module).items()}
    buffers = {key: torch.zeros(b.shape, dtype=b.dtype) for key, b in module.named_buffers()}
    trained = [p for p in parameters.values() if p.requires_grad]
    for choices in _routings(call.experts, ranks, random):
        tokens = torch.randn(_TOKENS, width, generator=random).requires_grad_()
        weights = torch.rand(choices.shape, generator=random).requires_grad_()
        leaves = [tokens, weights, *trained]

        def whole(arguments: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional_call(module, {**values, **buffers}, (), arguments)  # type: ignore[no-any-return]

        try:
            expected = whole({call.tokens: tokens, call.choices: choices, call.weights: weights}, parameters)
            if not isinstance(expected, torch.Tensor) or expected.shape != tokens.shape:
                return ""
            wanted = _gradients(expected, leaves)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            return ""
        try:
            found = _by_ranks(module, call, (tokens, choices, weights), parameters, ranks, whole)
            given = _gradients(found, leaves)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            return f"its forward fails with the experts of one rank ({str(error).splitlines()[0]})"
        for what, one, other in zip(
            ("outputs", *("gradients",) * len(leaves)), (found, *given), (expected, *wanted), strict=True
        ):
            if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * max(1e-3, other.abs().max().item())):
                return f"its {what} are not the sums of what the ranks' experts compute"
    return None


def _by_ranks(
    module: nn.Module,
    call: RoutedCall,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    parameters: dict[str, torch.Tensor],
    ranks: int,
    forward: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """What the ranks compute together: each its experts, for the choices that it is sent."""
    tokens, choices, weights = inputs
    each = call.experts // ranks
    routes = Routes(choices, each, ranks)
    sent = (tokens[routes.tokens], routes.experts, routes.arrange(weights))
    results = []
    with call.local(module, ranks):
        for rank, rows in enumerate(zip(*(t.split(routes.counts.tolist()) for t in sent), strict=True)):
            own = {key: p[rank * each : (rank + 1) * each] for key, p in parameters.items()}
            results.append(compute_rows(partial(_with_values, forward, own), call, *rows))
    return routes.add_up(torch.cat(results))


def _with_values(
    forward: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], torch.Tensor],
    values: dict[str, torch.Tensor],
    **arguments: torch.Tensor,
) -> torch.Tensor:
    return forward(arguments, values)


def _gradients(output: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    upstream = torch.linspace(-1, 1, output.numel()).view(output.shape).cos()
    return list(torch.autograd.grad(output, leaves, upstream, allow_unused=True, materialize_grads=True))


def _routings(experts: int, ranks: int, random: torch.Generator) -> Iterator[torch.Tensor]:
    """Choices of experts, [tokens, choices]."""
    each = experts // ranks
    scores = torch.rand(_TOKENS, experts, generator=random)
    scores[:, -1] = -1.0  # nobody chooses the last one
    yield scores.topk(min(2, experts - 1)).indices
    yield torch.rand(_TOKENS, each, generator=random).topk(min(2, each)).indices  # the others' experts get no tokens
    yield torch.full((_TOKENS, 1), experts - 1)  # all tokens on one


def _values(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Values of a parameter on the meta device; large ones repeat and take no memory."""
    if parameter.numel() <= _LARGE:
        values = torch.randn(parameter.shape, generator=random) / math.sqrt(parameter.shape[-1])
        return values.requires_grad_()
    rows = torch.randn(*parameter.shape[:2], *(1 for _ in parameter.shape[2:]), generator=random)
    return (rows / parameter.shape[-1]).expand(parameter.shape)


def _kind_of(module: nn.Module) -> object:
    """Equal for modules that compute the same with other values."""
    shapes = tuple((key, tuple(p.shape)) for key, p in own_parameters(module).items())
    numbers = tuple(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and "layer" not in key and key != "training"
    )
    return type(module), module.forward.__func__ if hasattr(module.forward, "__func__") else module, shapes, numbers
