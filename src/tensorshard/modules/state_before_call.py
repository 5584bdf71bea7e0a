"""The state of modules before one call of them, for a computation that repeats the call later.

This is all state that is no parameter and no registered buffer of theirs: attributes, lists and dicts that they hold,
objects, other modules that they refer to, arguments that a call changes, variables of the file, random numbers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tensorshard.modules.reachable_state import Reached, StateOfModules
from tensorshard.modules.state_places import Copied, Place, shared_random_numbers
from tensorshard.torch_private.fake_tensors import active_fake_mode
from tensorshard.torch_private.tensors import tensor_version

_LIBRARIES = ("random", "numpy")
_NOTHING = Reached()


class StateBeforeCalls:
    """Keeps the state of a block before each of its calls.

    What does not change from call to call is looked through once. After that, it is only checked to be the same.

    Args:
        modules: the block with all modules in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._of_modules = StateOfModules(modules)
        self._last: Reached | None = None
        self._draws = set(self._of_modules.draws)

    def keep(self, arguments: Iterable[Any], *, watch_draws: bool) -> "StateBeforeCall":
        """Keeps the present state.

        Args:
            arguments: of the call, as far as they are not tensors or plain values.
            watch_draws: whether to look if the call draws from Python's or numpy's random numbers, which takes 50 us.
                A block that was seen to do so is looked at in each call.
        """
        last = self._last
        if last is None or not all(place.is_same() for place in last.places):
            last = self._of_modules.reach()
            constant = not (last.keeps_graph or last.tensors or last.copied or last.once)
            self._last = last if constant else None
        given = self._of_modules.reach_from(arguments) if arguments else _NOTHING
        libraries = _LIBRARIES if watch_draws else self._draws
        numbers = {name: place for name in libraries if (place := shared_random_numbers(name)) is not None}
        return StateBeforeCall([last, given] if given.places or given.copied or given.tensors or given.once else [last], numbers, self._draws)


class StateBeforeCall:
    """The state before one call.

    Args:
        reached: the state, with tensors that may be written to in place.
        numbers: the shared random numbers.
        draws: the libraries from which the block is known to draw. A call that drew adds to it.
    """

    def __init__(self, reached: list[Reached], numbers: dict[str, Copied], draws: set[str]) -> None:
        self.once = next((part.once for part in reached if part.once), None)
        self._places: list[Place] = [place for part in reached for place in part.places]
        self._copied = [place for part in reached for place in part.copied]
        self._numbers = numbers
        self._draws = draws
        # On fake tensors there are no values to keep.
        tensors = [] if active_fake_mode() is not None else [t for part in reached for t in part.tensors]
        self._tensors = [(t, tensor_version(t), t.detach().clone(), t.requires_grad) for t in tensors]

    def ended(self) -> None:
        """The call is over: drops copies of what it did not change."""
        self._tensors = [kept for kept in self._tensors if tensor_version(kept[0]) != kept[1]]
        for name, place in self._numbers.items():
            if not place.is_same():
                self._draws.add(name)
        self._numbers = {name: place for name, place in self._numbers.items() if name in self._draws}

    def put_back(self) -> Callable[[], None]:
        """Gives everything the state before the call. Returns a function that undoes this, and what is done then."""
        replaced = {id(tensor): _copy(values, graph) for tensor, _, values, graph in self._tensors}
        places = [*self._places, *self._copied, *self._numbers.values()]
        changed = [place for place in places if replaced or not place.is_same()]
        later = {id(place): place.now() for place in changed}
        for place in changed:
            place.put(replaced)

        def undo() -> None:
            for place in places:
                before = later.get(id(place), place)
                if not before.is_same():
                    before.put({})

        return undo


def _copy(values: torch.Tensor, graph: bool) -> torch.Tensor:
    """A tensor that may be written to, with a graph behind it if the original had one."""
    if not graph:
        return values.clone()
    with torch.enable_grad():
        return values.requires_grad_().clone()
