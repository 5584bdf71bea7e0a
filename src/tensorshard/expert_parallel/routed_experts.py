"""Stacked experts that are given the choice of each token, and compute the tokens of all ranks that chose them.

The module gets tokens [tokens, features], the experts that each token has chosen, [tokens,
choices], and a weight of each choice; it returns, for each token, the weighted sum of what its experts make of it. So
every choice can be computed by itself, where its expert is, as that of a token with a single choice.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.expert_parallel.exchange import exchange_counts, exchange_rows
from tensorshard.expert_parallel.stacked_experts import TOKENS, StackedExperts
from tensorshard.model.forwards import Forward, Role, own_forward, wrap_forward


@dataclass(frozen=True)
class RoutedCall(StackedExperts):
    """Stacked experts that are given the experts that each token has chosen.

    Args:
        tokens, choices, weights: the names of these arguments of its forward.
        counts: the module's attributes that are the number of experts.
        experts: how many there are.
        order: the names as positions of a call; () to call by names.
    """

    tokens: str
    choices: str
    weights: str
    counts: tuple[str, ...]
    experts: int
    order: tuple[str, ...] = ()

    @classmethod
    def proposals(cls, module: nn.Module, experts: int) -> Iterator["RoutedCall"]:
        parameters = inspect.signature(own_forward(module)).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = [p.name for p in parameters if p.kind in by_name and p.default is p.empty]
        optional = [p.name for p in parameters if p.kind in by_name and p.default is None]
        equal = [key for key, value in vars(module).items() if type(value) is int and value == experts]
        subsets = [tuple(s) for n in range(len(equal), -1, -1) for s in itertools.combinations(equal, n)]
        subsets.sort(key=lambda subset: any("expert" not in key for key in subset))
        for given in itertools.combinations(optional, 3 - len(required)) if len(required) <= 3 else ():
            for counts in subsets:
                for tokens, choices, weights in itertools.permutations((*required, *given)):
                    # transformers runs other functions in a forward's place, whose arguments have other names.
                    leading = tuple(p.name for p in list(parameters)[:3] if p.kind is p.POSITIONAL_OR_KEYWORD)
                    order = leading if set(leading) == {tokens, choices, weights} else ()
                    yield cls(tokens, choices, weights, counts, experts, order)

    def samples(self, width: int, ranks: int, random: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
        for choices in _routings(self.experts, ranks, random):
            tokens = torch.randn(TOKENS, width, generator=random).requires_grad_()
            weights = torch.rand(choices.shape, generator=random).requires_grad_()
            yield {self.tokens: tokens, self.choices: choices, self.weights: weights}

    def on_ranks(
        self,
        module: nn.Module,
        arguments: Mapping[str, torch.Tensor],
        ranks: int,
        forward_of: Callable[[int], Callable[..., torch.Tensor]],
    ) -> torch.Tensor:
        tokens, choices, weights = (arguments[name] for name in (self.tokens, self.choices, self.weights))
        routes = Routes(choices, self.experts // ranks, ranks)
        sent = (tokens[routes.tokens], routes.experts, routes.arrange(weights))
        with self.local(module, ranks):
            results = [
                compute_rows(forward_of(rank), self, *rows)
                for rank, rows in enumerate(zip(*(t.split(routes.counts.tolist()) for t in sent), strict=True))
            ]
        return routes.add_up(torch.cat(results))

    def run(self, forward: Callable[..., torch.Tensor], arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.order:
            return forward(*(arguments[name] for name in self.order))
        return forward(**arguments)

    def split(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        wrap_forward(module, Role.ROUTED_EXPERTS, partial(_compute, module, self, group))

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Tokens, choices and weights among the arguments of a call.

        Raises:
            TypeError: the call is of another kind.
        """
        given = inspect.signature(own_forward(module)).bind(*args, **kwargs).arguments
        expected = {self.tokens, self.choices, self.weights}
        rest = [name for name, value in given.items() if name not in expected and value is not None]
        tensors = [given.get(name) for name in (self.tokens, self.choices, self.weights)]
        if rest or not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 2 for tensor in tensors):
            shown = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            raise TypeError(
                f"{type(module).__name__} was called with {shown}, and ep splits experts that are called with "
                f"{self.tokens} [tokens, features], {self.choices} and {self.weights} [tokens, choices] alone; set ep=1"
            )
        return tensors  # type: ignore[return-value]


class Routes:
    """Which rank each choice goes to.

    Args:
        choices: [tokens, choices], indices of experts.
        experts: how many each rank has.

    Attributes:
        tokens: [choices of all tokens], the token of each, in the order in which they are sent: by rank.
        experts: [choices of all tokens, 1], the expert's index on its rank, in this order.
        counts: [ranks], how many go to each.
    """

    def __init__(self, choices: torch.Tensor, experts: int, ranks: int) -> None:
        self._shape = choices.shape
        flat = choices.reshape(-1)
        owners = flat.div(experts, rounding_mode="floor")
        self._order = owners.argsort(stable=True)
        self.tokens = self._order.div(max(1, choices.size(1)), rounding_mode="floor")
        self.experts = (flat - owners * experts)[self._order, None]
        self.counts = torch.zeros(ranks, dtype=torch.int64, device=flat.device)
        self.counts.scatter_add_(0, owners.long(), torch.ones_like(owners, dtype=torch.int64))

    def arrange(self, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, choices] as [choices of all tokens, 1], in the order in which they are sent."""
        return weights.reshape(-1, 1)[self._order]

    def add_up(self, results: torch.Tensor) -> torch.Tensor:
        """[tokens, features]: the sum over each token's choices of `results`, which are in the order of sending."""
        back = torch.empty_like(self._order)
        back[self._order] = torch.arange(len(back), device=back.device)
        return results[back].view(*self._shape, *results.shape[1:]).sum(1)


def compute_rows(
    forward: Callable[..., torch.Tensor],
    call: RoutedCall,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """What this rank's experts make of tokens [n, features], each with one choice, [n, 1]. `n` may be 0."""
    n = len(tokens)
    if not n:  # one token of zeros that counts nothing: parameters get gradients on every rank
        tokens, experts, weights = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (tokens, experts, weights))
    return call.run(forward, {call.tokens: tokens, call.choices: experts, call.weights: weights})[:n]


def _routings(experts: int, ranks: int, random: torch.Generator) -> Iterator[torch.Tensor]:
    """Choices of experts, [tokens, choices]."""
    each = experts // ranks
    scores = torch.rand(TOKENS, experts, generator=random)
    scores[:, -1] = -1.0  # nobody chooses the last one
    yield scores.topk(min(2, experts - 1)).indices
    yield torch.rand(TOKENS, each, generator=random).topk(min(2, each)).indices  # the others' experts get no tokens
    yield torch.full((TOKENS, 1), experts - 1)  # all tokens on one


def _compute(
    module: nn.Module, call: RoutedCall, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    tokens, choices, weights = call.bind(module, args, kwargs)
    routes = Routes(choices, call.experts // group.size(), group.size())
    sent, received = exchange_counts(routes.counts, choices.numel(), group)
    outgoing = [tokens[routes.tokens], routes.experts, routes.arrange(weights)]
    rows = exchange_rows(outgoing, sent, received, group)
    with call.local(module, group.size()):
        results = compute_rows(forward, call, *rows)
    return routes.add_up(*exchange_rows([results], received, sent, group))
