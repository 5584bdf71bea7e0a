"""Several optimizers as one: Muon for matrices and AdamW for the rest, say."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn

from tensorshard.common.words import kind_of

Choice = str | Callable[[str, nn.Parameter], bool]


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers that step one after the other, as one of torch's.

    Its parameter groups are those of the `members`, in their order: the same dicts, so that schedulers see and set the
    options of all. Their states are in one dict by parameter.

    Args:
        members: the optimizers. No parameter belongs to two of them.

    Raises:
        ValueError: a parameter belongs to two members.

    Attributes:
        members: the optimizers.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        owner: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for member in members:
            for group in member.param_groups:
                for parameter in group["params"]:
                    if owner.setdefault(parameter, member) is not member:
                        raise ValueError(
                            f"the optimizer's factory gave a parameter of shape {list(parameter.shape)} to the "
                            f"{type(owner[parameter]).__name__} and to the {type(member).__name__}: give it to one"
                        )
        named = [all("param_names" in group for group in member.param_groups) for member in members]
        if any(named) and not all(named):  # torch needs names for all groups or for none
            for member in members:
                for group in member.param_groups:
                    group.pop("param_names", None)
        self.members: list[torch.optim.Optimizer] = []
        groups = [group for member in members for group in member.param_groups]
        super().__init__([{"params": []}], {})
        self.param_groups = groups
        self.members = list(members)
        self._share()

    def _share(self) -> None:
        """Gives the members one dict of states."""
        for member in self.members:
            self.state.update(member.state)
        for member in self.members:
            member.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each member, in their order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused but while it is made: nobody says which member the group is for."""
        if getattr(self, "members", None):
            raise RuntimeError(
                f"a parameter group cannot be added to several optimizers at once ({class_of(self)}): let "
                f"optimizer(parameters) give its parameters to one of them"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if "members" not in state and getattr(self, "members", None):  # a state dict was loaded
            groups = list(self.param_groups)
            for member in self.members:
                own = [groups.pop(0) for _ in member.param_groups]
                member.__setstate__({"state": self.state, "param_groups": own})
            self.param_groups = [group for member in self.members for group in member.param_groups]
            self._share()


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that `optimizer` is made of: itself, if it is a single one."""
    return optimizer.members if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class of `optimizer`, or of all its members."""
    return " with ".join(type(member).__name__ for member in members_of(optimizer))


def methods_beside_step(optimizer: torch.optim.Optimizer) -> list[str]:
    """The public methods that the class of `optimizer` adds to those of torch's optimizers, such as ``eval``."""
    kinds = [type(member) for member in members_of(optimizer)]
    names = [
        name
        for kind in kinds
        for name in dir(kind)
        if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name) and callable(getattr(kind, name))
    ]
    return list(dict.fromkeys(names))


def call_members(optimizer: torch.optim.Optimizer) -> None:
    """Gives a combined `optimizer` the methods of its members, each of which is called on all that have it."""
    if not isinstance(optimizer, CombinedOptimizer):
        return
    for name in methods_beside_step(optimizer):

        def call(combined: CombinedOptimizer, *args: Any, name: str = name, **kwargs: Any) -> None:
            for member in combined.members:
                if hasattr(member, name):
                    getattr(member, name)(*args, **kwargs)

        setattr(optimizer, name, MethodType(call, optimizer))


class ByParameter:
    """A factory of several optimizers: the one of the first key that a parameter matches trains it.

    Args:
        factories: by a pattern of names such as ``"blocks.*.weight"`` (``fnmatch``), or by a function of name and
            parameter that returns whether it matches. The values are callables: parameters -> optimizer.

    Raises:
        TypeError: a key or a value is of the wrong kind.
        ValueError: there is no entry.
    """

    def __init__(self, factories: Mapping[Choice, Callable[..., torch.optim.Optimizer]]) -> None:
        if not factories:
            raise ValueError("optimizer is an empty dict; give a factory for each pattern of names, such as '*'")
        for key, factory in factories.items():
            if not isinstance(key, str) and not callable(key):
                raise TypeError(
                    f"a key of the dict optimizer= is {key!r}; it must be a pattern of parameter names such as "
                    f"'*.weight', or a function (name, parameter) -> bool"
                )
            if isinstance(factory, torch.optim.Optimizer) or not callable(factory):
                raise TypeError(
                    f"optimizer[{_shown(key)}] is {kind_of(factory)}; it must be a callable from parameters to "
                    f"an optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
                )
        self._factories = dict(factories)

    def choose(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
        """The parameters of each entry.

        Raises:
            ValueError: a parameter matches no key; no parameter comes to a key.
        """
        chosen: list[list[tuple[str, nn.Parameter]]] = [[] for _ in self._factories]
        for name, parameter in named_parameters:
            for place, key in enumerate(self._factories):
                if fnmatchcase(name, key) if isinstance(key, str) else key(name, parameter):
                    chosen[place].append((name, parameter))
                    break
            else:
                raise ValueError(
                    f"no key of the dict optimizer= matches the trained parameter {name!r}, {list(parameter.shape)}; "
                    f"the keys are {', '.join(map(_shown, self._factories))}: add '*' for all others, or freeze it"
                )
        for key, members in zip(self._factories, chosen, strict=True):
            if not members:
                names = ", ".join(repr(name) for name, _ in named_parameters[:3])
                raise ValueError(
                    f"optimizer[{_shown(key)}] would train nothing: no trained parameter matches it, or an earlier key "
                    f"matches those that do; the names are {names}, ..."
                )
        return chosen

    @property
    def factories(self) -> list[Callable[..., torch.optim.Optimizer]]:
        """The factories, in their order."""
        return list(self._factories.values())


def _shown(key: Choice) -> str:
    return repr(key) if isinstance(key, str) else getattr(key, "__name__", repr(key))
