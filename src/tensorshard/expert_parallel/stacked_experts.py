"""Modules that hold all experts of a mixture in parameters [experts, ...], however they are called.

Also here: stacked experts whose tokens come sorted by expert, the same number for each, as where all experts see all
tokens.
"""

import inspect
from abc import ABC, abstractmethod
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
from tensorshard.torch_private.modules import own_parameters

TOKENS = 11  # in a check by numbers


class StackedExperts(ABC):
    """How a module with stacked experts is called, and how its experts are shared by ranks.

    Args:
        tokens: the name of the argument that has them.
        counts: the module's attributes that are the number of experts.
        experts: how many there are.
    """

    tokens: str
    counts: tuple[str, ...]
    experts: int

    @property
    def token_repeats(self) -> int:
        """How often the module is given all tokens, one after the other."""
        return 1

    @classmethod
    @abstractmethod
    def proposals(cls, module: nn.Module, experts: int) -> "Iterator[StackedExperts]":
        """Calls of this kind that `module` may take, the likeliest first."""

    @abstractmethod
    def samples(self, width: int, ranks: int, random: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
        """Arguments of calls, for tokens of `width` features, to compare the ranks' results with the whole module's."""

    @abstractmethod
    def on_ranks(
        self,
        module: nn.Module,
        arguments: Mapping[str, torch.Tensor],
        ranks: int,
        forward_of: Callable[[int], Callable[..., torch.Tensor]],
    ) -> torch.Tensor:
        """What the ranks compute together.

        Args:
            forward_of: gives the module's forward with the experts of a rank.
        """

    def run(self, forward: Callable[..., torch.Tensor], arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Calls `forward`, whose arguments are given by their names."""
        return forward(**arguments)

    @abstractmethod
    def split(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Makes `module` compute this rank's experts, for the tokens of all ranks of `group` that chose them."""

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

    def owners(self, module: nn.Module) -> dict[torch.Tensor, int | None]:
        """The parameters of `module` that are split. None: each rank has an equal part of the first dimension."""
        return dict.fromkeys(own_parameters(module).values())

    def describe(self, ranks: int) -> str:
        """A few words, for people."""
        return f"{self.experts} experts, {self.experts // ranks} on each of {ranks} ranks"


@dataclass(frozen=True)
class SortedCall(StackedExperts):
    """Stacked experts that are called with tokens [experts * n, features], those of the first expert first.

    Args:
        tokens: the name of the argument.
        counts: the module's attributes that are the number of experts.
        experts: how many there are.
    """

    tokens: str
    counts: tuple[str, ...]
    experts: int

    @property
    def token_repeats(self) -> int:
        return self.experts

    @classmethod
    def proposals(cls, module: nn.Module, experts: int) -> Iterator["SortedCall"]:
        parameters = inspect.signature(own_forward(module)).parameters.values()
        required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        if len(required) == 1:
            equal = tuple(key for key, value in vars(module).items() if type(value) is int and value == experts)
            for counts in dict.fromkeys((equal, tuple(key for key in equal if "expert" in key), ())):
                yield cls(required[0], counts, experts)

    def samples(self, width: int, ranks: int, random: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
        for tokens in (TOKENS, 1):
            yield {self.tokens: torch.randn(self.experts * tokens, width, generator=random).requires_grad_()}

    def on_ranks(
        self,
        module: nn.Module,
        arguments: Mapping[str, torch.Tensor],
        ranks: int,
        forward_of: Callable[[int], Callable[..., torch.Tensor]],
    ) -> torch.Tensor:
        with self.local(module, ranks):
            rows = arguments[self.tokens].chunk(ranks)
            return torch.cat([self.run(forward_of(rank), {self.tokens: rows[rank]}) for rank in range(ranks)])

    def split(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        wrap_forward(module, Role.ROUTED_EXPERTS, partial(_compute, module, self, group))

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The tokens among the arguments of a call.

        Raises:
            TypeError: the call is of another kind.
        """
        given = inspect.signature(own_forward(module)).bind(*args, **kwargs).arguments
        tokens = given.get(self.tokens)
        if len(given) != 1 or not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or len(tokens) % self.experts:
            shown = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            raise TypeError(
                f"{type(module).__name__} was called with {shown}, and ep splits experts that are called with "
                f"{self.tokens} [{self.experts} experts x tokens, features] alone; set ep=1"
            )
        return tokens


def _compute(
    module: nn.Module, call: SortedCall, group: dist.ProcessGroup, forward: Forward, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    tokens = call.bind(module, args, kwargs)
    ranks, experts = group.size(), call.experts // group.size()
    each = len(tokens) // ranks
    sent, received = exchange_counts(torch.full((ranks,), each, device=tokens.device), len(tokens), group)
    (rows,) = exchange_rows([tokens], sent, received, group)
    by_rank = [part.view(experts, -1, *rows.shape[1:]) for part in rows.split(received)]
    lengths = [part.size(1) for part in by_rank]
    with call.local(module, ranks):
        results = call.run(forward, {call.tokens: torch.cat(by_rank, 1).flatten(0, 1)})
    parts = results.view(experts, -1, *results.shape[1:]).split(lengths, 1)
    (own,) = exchange_rows([torch.cat([part.flatten(0, 1) for part in parts])], received, sent, group)
    return own
