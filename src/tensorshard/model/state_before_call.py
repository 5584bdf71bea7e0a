"""The state of modules before one call of them, for a computation that repeats the call later.

This is all state that is no parameter and no registered buffer of theirs: attributes, lists and dicts that they hold,
objects, other modules that they refer to, arguments that a call changes, variables of the file, random numbers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorshard.comm.world import world
from tensorshard.model.reachable_state import Reached, StateOfModules
from tensorshard.model.state_places import Copied, Place, shared_random_numbers
from tensorshard.torch_private.tensors import tensor_version

_LIBRARIES = ("random", "numpy")


class ChangedArgumentError(RuntimeError):
    """A tensor inside of a call's argument was written to after the call had begun."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(f"a tensor of shape {list(tensor.shape)} inside of an argument was written to in place")


@dataclass
class Known:
    """What is known of a block.

    Args:
        draws: the libraries whose shared random numbers it draws from.
        changes: whether some state of it was seen to change.
    """

    draws: set[str]
    changes: bool = False


class StateBeforeCalls:
    """Keeps the state of a block before each of its calls.

    What does not change from call to call is looked through once. After that, it is only checked to be the same.

    Args:
        modules: the block with all modules in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._of_modules = StateOfModules(modules)
        self._last: Reached | None = None
        self._known = Known(set(self._of_modules.draws))

    def keep(self, arguments: Iterable[Any], *, watched: bool) -> "StateBeforeCall":
        """Keeps the present state.

        Args:
            arguments: of the call, as far as they are not tensors or plain values.
            watched: whether to look what the call changes, and if it draws from Python's or numpy's random numbers,
                which takes 100 us. A block that was seen to do so is looked at in each call.
        """
        last = self._last
        if last is None or not last.same.hold():
            self._known.changes |= last is not None
            last = self._of_modules.reach()
            self._last = None if last.keeps_graph or last.once else last
        reached, given = [last], []
        if arguments:
            from_arguments = self._of_modules.reach_from(arguments)
            given = from_arguments.tensors
            if from_arguments.places or from_arguments.copied or from_arguments.once:
                reached.append(from_arguments)
        libraries = _LIBRARIES if watched else self._known.draws
        numbers = {name: shared_random_numbers(name) for name in libraries} if libraries else {}
        return StateBeforeCall(reached, given, numbers, self._known, watched)


class StateBeforeCall:
    """The state before one call.

    Args:
        reached: the state, with tensors that may be written to in place.
        given: tensors that arguments hold. They are the caller's, and are not copied.
        numbers: the shared random numbers.
        known: what is known of the block. The call may add to it.
        watched: whether to look what the call changes.
    """

    def __init__(
        self,
        reached: list[Reached],
        given: list[torch.Tensor],
        numbers: dict[str, Copied],
        known: Known,
        watched: bool,
    ) -> None:
        self.once = next(filter(None, [part.once for part in reached]), None)
        self._reached = reached
        self._copied = [place.now() for part in reached for place in part.copied]
        self._numbers = numbers
        self._known = known
        self._watched = watched
        self._given = [(tensor, tensor_version(tensor)) for tensor in given] if given else []
        # On fake tensors there are no values to keep.
        tensors = reached[0].tensors if reached[0].tensors and not world().is_simulated else ()
        self._tensors = [(t, tensor_version(t), t.detach().clone(), t.requires_grad) for t in tensors]

    def ended(self) -> None:
        """The call is over: drops copies of what it did not change."""
        if self._tensors:
            self._tensors = [kept for kept in self._tensors if tensor_version(kept[0]) != kept[1]]
        if self._watched and not self._known.changes:
            self._known.changes = not all(part.same.hold() for part in self._reached)
        if self._numbers:
            self._known.draws.update(name for name, place in self._numbers.items() if not place.is_same())
            self._numbers = {name: place for name, place in self._numbers.items() if name in self._known.draws}

    def left_tensors(self) -> bool:
        """Whether there are tensors now where there were others, or something else, before the call."""
        changed = (place for part in self._reached for place in part.places if not place.is_same())
        return any(tensor_version(tensor) != version for tensor, version, *_ in self._tensors) or any(
            isinstance(value, torch.Tensor) and all(value is not other for other in place.values)
            for place in changed
            for value in place.now().values
        )

    def put_back(self) -> Callable[[], None]:
        """Gives everything the state before the call. Returns a function that undoes this, and what is done then.

        Raises:
            ChangedArgumentError: a tensor inside of an argument was written to since.
        """
        for tensor, version in self._given:
            if tensor_version(tensor) != version:
                raise ChangedArgumentError(tensor)
        if not (self._tensors or self._copied or self._numbers) and all(part.same.hold() for part in self._reached):
            return self._undo_repetition if self._known.changes else _do_nothing
        self._known.changes = True
        replaced = {id(tensor): _copy(values, graph) for tensor, _, values, graph in self._tensors}
        places: list[Place] = [place for part in self._reached for place in part.places]
        places += [*self._copied, *self._numbers.values()]
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

    def _undo_repetition(self) -> None:
        """Undoes what a repetition did that began as the first forward had."""
        for part in self._reached:
            if not part.same.hold():
                for place in part.places:
                    if not place.is_same():
                        place.put({})


def _do_nothing() -> None:
    """There is nothing to undo."""


def _copy(values: torch.Tensor, graph: bool) -> torch.Tensor:
    """A tensor that may be written to, with a graph behind it if the original had one."""
    if not graph:
        return values.clone()
    with torch.enable_grad():
        return values.requires_grad_().clone()
