"""Modules that hold all experts of a mixture in parameters [experts, ...], however they are called."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

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
