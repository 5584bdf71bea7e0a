"""How a module of stacked experts is called, and how it computes some of the experts, for the tokens that chose them.

Its parameters are [experts, ...]. It gets tokens [tokens, features], the experts that each token has chosen, [tokens,
choices], and a weight of each choice; it returns, for each token, the weighted sum of what its experts make of it. So
every choice can be computed by itself, where its expert is, as that of a token with a single choice.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.expert_parallel.exchange import exchange_counts, exchange_rows
from tensorshard.model.forwards import Forward, Role, own_forward, wrap_forward


@dataclass(frozen=True)
class RoutedCall:
    """How the experts of a module are called. :func:`tensorshard.expert_parallel.search.find_call` finds it.

    Args:
        tokens, choices, weights: the names of these arguments of its forward.
        counts: the module's attributes that are the number of experts.
        experts: how many there are.
    """

    tokens: str
    choices: str
    weights: str
    counts: tuple[str, ...]
    experts: int

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Tokens, choices and weights among the arguments of a call.

        Raises:
            TypeError: the call is of another kind.
        """
        given = inspect.signature(own_forward(module)).bind(*args, **kwargs).arguments
        expected = {self.tokens, self.choices, self.weights}
        rest = [name for name, value in given.items() if name not in expected and value is not None]
        found = [given.get(name) for name in (self.tokens, self.choices, self.weights)]
        if rest or not all(isinstance(tensor, torch.Tensor) and tensor.dim() == 2 for tensor in found):
            shown = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            raise TypeError(
                f"{type(module).__name__} was called with {shown}, and ep splits experts that are called with "
                f"{self.tokens} [tokens, features], {self.choices} and {self.weights} [tokens, choices] alone; set ep=1"
            )
        return found  # type: ignore[return-value]

    @contextmanager
    def local(self, module: nn.Module, ranks: int) -> Iterator[None]:
        """Within this, the module says that it has as many experts as one of `ranks` has."""
        for name in self.counts:
            setattr(module, name, self.experts // ranks)
        try:
            yield
        finally:
            for name in self.counts:
                setattr(module, name, self.experts)


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
    return forward(**{call.tokens: tokens, call.choices: experts, call.weights: weights})[:n]


def split_experts(module: nn.Module, call: RoutedCall, group: dist.ProcessGroup) -> None:
    """Makes `module` compute this rank's experts, for the tokens of all ranks of `group` that chose them."""
    wrap_forward(module, Role.ROUTED_EXPERTS, partial(_compute, module, call, group))


def _compute(
    module: nn.Module, call: RoutedCall, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    tokens, choices, weights = call.bind(module, args, kwargs)
    routes = Routes(choices, call.experts // group.size(), group.size())
    sent, received = exchange_counts(routes.counts, group)
    rows = exchange_rows(tokens[routes.tokens], sent, received, group)
    experts = exchange_rows(routes.experts, sent, received, group)
    row_weights = exchange_rows(routes.arrange(weights), sent, received, group)
    with call.local(module, group.size()):
        results = compute_rows(forward, call, rows, experts, row_weights)
    return routes.add_up(exchange_rows(results, received, sent, group))
