"""When ZeRO 3 gathers and releases units, and reduces their gradients: in one order on all ranks, whatever each calls.

In a forward of the whole model the ranks gather along the sequence of :class:`AgreedOrder`. Each backward of such a
forward goes back through the calls for which one follows on any rank: a rank gathers each unit, begins to gather the
one before it, and reduces its gradients, with zeros for calls that it did not make. Autograd runs the calls of a rank
from the last to the first, so a rank that reaches a call has completed all later ones.

A unit that is called from outside of a forward of the model (``model.encode(x)``) is gathered at once; there, all ranks
make the same calls.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from tensorshard.comm.groups import CollectiveMismatchError
from tensorshard.comm.world import world
from tensorshard.common.never_compiled import never_compiled
from tensorshard.data_parallel.agreed_order import AgreedOrder
from tensorshard.data_parallel.released_weights import ReleasedUnit, ReleasedWeights, State
from tensorshard.model.trains_itself import call_before_methods
from tensorshard.torch_private.autograd import (
    base_made_since,
    call_after_backward,
    current_backward,
    is_function_transformed,
    is_in_backward,
    is_in_reentrant_checkpoint,
    keeps_graph,
    next_node,
)
from tensorshard.torch_private.pytree import tree_tensors

# In how many forwards the ranks ask each other at first. If all make the same calls, no messages are needed later.
_ASKED_FORWARDS = 2


@dataclass(eq=False)
class _Call:
    """One call of a unit, or a unit's place in the sequence that this rank left out."""

    unit: ReleasedUnit
    serial: int
    forward: "_Forward | None" = None
    index: int = 0  # in the forward
    made: bool = True
    follows: bool = False  # whether a backward follows on this rank
    needed: bool = False  # whether one follows on any rank
    again: bool = False  # whether reentrant checkpointing will make it again in the backward
    begun: bool = False  # in the backward that is running
    first_node: int = 0  # of autograd's graph that the call may make


@dataclass(eq=False)
class _Forward:
    """A forward of the model, and how far its backward has come."""

    serial: int
    recorded: bool
    calls: list[_Call] = field(default_factory=list)
    place: int = 0  # in the sequence
    lap: int = 0  # the first call of this time through the sequence
    left: list[_Call] | None = None  # those that the running backward has not completed; None if none is running
    uneven: set[Any] = field(default_factory=set)  # units that some ranks called and some did not
    ranks_differ: bool = False  # not all calls of the sequence were made by all ranks


class UnitOrder:
    """Gathers and releases the units of a model around their forwards and backwards.

    Args:
        root: the parameters that are in no unit. They are held through a forward and its backward.
        reduce: reduces the gradients of a unit's parameters.
        sum_over_ranks: sums numbers over the data ranks.
        gather_lists: gives the data ranks' lists of numbers, each of the length that is given.

    Attributes:
        differed: whether this rank has left out a unit, or has needed another backward, since it was last asked.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: ReleasedWeights,
        root: ReleasedUnit,
        units: Sequence[ReleasedUnit],
        ranks: int,
        reduce: Callable[[ReleasedUnit], None],
        sum_over_ranks: Callable[[Sequence[float]], list[float]],
        gather_lists: Callable[[list[int], int], list[list[int]]],
    ) -> None:
        self._weights, self._root, self._units, self._ranks = weights, root, list(units), ranks
        self._reduce, self._sum, self._gather_lists = reduce, sum_over_ranks, gather_lists
        self.differed = False
        self._numbers = {unit: number for number, unit in enumerate(self._units)}
        self._order = AgreedOrder(len(self._units))
        self._order.sequence = [number for unit, number in self._numbers.items() for _ in unit.modules]
        self._order.needed = [True] * len(self._order.sequence)
        self._asked = _ASKED_FORWARDS
        self._careful = False  # the ranks have differed
        self._noted = False  # a step is over
        self._asked_of: weakref.WeakSet[_Forward] = weakref.WeakSet()  # forwards at whose ends the ranks asked
        self._forward: _Forward | None = None
        self._open: list[_Forward] = []  # whose backward has begun
        self._running: list[_Call] = []  # the innermost last
        self._loose: set[ReleasedUnit] = set()  # called in a backward, or from outside of a forward
        self._serial = 0
        self._kept = False  # all that is gathered stays so, for a second backward
        self._ends: set[int] = set()  # backwards that tell when they are over
        for unit in self._units:
            for module in unit.modules:
                module.register_forward_pre_hook(never_compiled(_before(self, unit)), prepend=True)
                module.register_forward_hook(never_compiled(_after(self, unit)), always_call=True)
                call_before_methods(module, _hold(self, unit))

    def take_note(self, differed: bool) -> None:
        """Called on all ranks with whether any of them was in :attr:`differed`."""
        self.differed = False
        self._noted = True
        self._careful = self._careful or differed

    def reset(self) -> None:
        """Called after a forward or backward has failed on every rank."""
        self._forward, self._open, self._running = None, [], []
        self._asked_of.clear()
        self._loose.clear()
        self._ends.clear()
        self._kept = False
        self._weights.forget()

    # -- forwards --

    def begin_forward(self) -> None:
        """Called before each forward of the model."""
        if self._forward is None and not is_in_backward():
            self._weights.release_read()
            self._serial += 1
            self._forward = _Forward(self._serial, torch.is_grad_enabled())
            self._forward_node = next_node()
        self._weights.hold(self._root)

    def end_forward(self, output: Any, failed: bool) -> None:
        """Called after each forward of the model: takes part in the gathers that are left."""
        forward, self._forward = self._forward, None
        if forward is None:
            return
        self._weights.rest(self._root)
        if failed:
            return
        self._join(forward, len(self._order.sequence))
        laps = 1
        if self._asks(forward):
            while self._ask(forward, more=False):
                laps += 1
                self._join(forward, len(self._order.sequence))
            self._asked = max(0, self._asked - 1)
            learned = (laps > 1 or forward.lap > 0) and self._learn(forward)
            self._careful = self._careful or (forward.ranks_differ and not learned)
            self._asked_of.add(forward)
        forward.calls = [call for call in forward.calls if call.needed] if forward.recorded else []
        self._serial += 1
        self._hook(output, _Call(self._root, self._serial, forward, first_node=self._forward_node))

    def release_root(self) -> None:
        """Called where no backward follows that would release it."""
        if not self._kept:
            self._weights.release(self._root)

    def _asks(self, forward: _Forward) -> bool:
        """Whether the ranks ask each other at the end of this time through the sequence."""
        asks = self._asked > 0 or self._careful or (forward.recorded and not self._noted)
        return asks and self._others

    @property
    def _others(self) -> bool:
        """Whether there are other ranks, which may make other calls."""
        return self._ranks > 1 and not world().is_simulated

    def _reach(self, forward: _Forward, unit: ReleasedUnit) -> _Call:
        """Takes part in the gathers before the next one of `unit` in the sequence."""
        number = self._numbers[unit]
        place = self._order.find(number, forward.place)
        if place is None:
            self._join(forward, len(self._order.sequence))
            if self._asks(forward):
                self._ask(forward, more=True)
            elif self._others:
                raise CollectiveMismatchError(
                    f"this rank calls {unit.name} in another order than the data ranks did in the first steps, "
                    f"and zero=3 gathers the parameters of each unit from all ranks, in one order: call the modules in "
                    f"the same order in each step (leaving some out is fine), or use zero=2"
                )
            forward.place, forward.lap = 0, len(forward.calls)
            place = self._order.find(number, 0)
            assert place is not None
        self._join(forward, place)
        forward.place = place + 1
        return self._note(forward, unit, made=True)

    def _note(self, forward: _Forward, unit: ReleasedUnit, made: bool) -> _Call:
        self._serial += 1
        call = _Call(unit, self._serial, forward, len(forward.calls), made)
        if forward.recorded and (not made or self._others):
            call.needed = self._order.needed[len(forward.calls) - forward.lap]
        forward.calls.append(call)
        return call

    def _join(self, forward: _Forward, place: int) -> None:
        while forward.place < place:
            unit = self._units[self._order.sequence[forward.place]]
            forward.place += 1
            self._note(forward, unit, made=False)
            self.differed = self.differed or not self._asks(forward)
            self._weights.need(unit)
            self._begin_next(forward, unit)
            self._leave(forward, unit)

    def _begin_next(self, forward: _Forward, unit: ReleasedUnit) -> None:
        """Begins to gather the unit that follows in the sequence."""
        number = self._numbers[unit]
        for following in self._order.sequence[forward.place :]:
            if following != number:
                self._weights.begin(self._units[following])
                return

    def _leave(self, forward: _Forward, unit: ReleasedUnit) -> None:
        """Releases a unit that a forward has passed, if the next call is another's and no backward follows soon."""
        sequence = self._order.sequence
        same = forward.place < len(sequence) and sequence[forward.place] == self._numbers[unit]
        if same or self._kept or (unit.is_small and forward.recorded):
            return
        self._weights.release(unit)

    def _ask(self, forward: _Forward, more: bool) -> bool:
        """Asks all ranks, at the end of the sequence, whether one of them has to go through it again.

        The ranks also tell each other for which calls a backward follows.

        Raises:
            CollectiveMismatchError: on all ranks, if some of them made a call that will be made again in the backward.
        """
        lap = forward.calls[forward.lap :]
        numbers = [[float(call.follows), float(call.made), float(call.again)] for call in lap]
        sums = self._sum([float(more), *chain.from_iterable(numbers)])
        needed = [number > 0.5 for number in sums[1::3]]
        for call, made, again_in_backward in zip(lap, sums[2::3], sums[3::3], strict=True):
            forward.ranks_differ = forward.ranks_differ or made < self._ranks - 0.5
            if 0.5 < made < self._ranks - 0.5:
                forward.uneven.add(call.unit)
                if again_in_backward > 0.5:
                    raise self._recomputed(call.unit)
        if forward.recorded:
            for call, value in zip(lap, needed, strict=True):
                call.needed = value
            self._order.needed = needed
        again = sums[0] > 0.5
        if again and not more:
            forward.place, forward.lap = 0, len(forward.calls)
        return again

    def _learn(self, forward: _Forward) -> bool:
        """Takes a sequence that has this forward's calls in it, of all ranks. False: the present one stays."""
        made = [self._numbers[call.unit] for call in forward.calls if call.made]
        longest = int(max(self._gather_lists([len(made)], 1))[0])
        lists = self._gather_lists([*made, *([-1] * (longest - len(made)))], longest)
        learned = self._order.learn([[number for number in one if number >= 0] for one in lists])
        if learned:
            self._asked = max(self._asked, 1)
        return learned

    def _recomputed(self, unit: ReleasedUnit) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"{unit.name} is called again in the backward, as torch.utils.checkpoint does with "
            f"use_reentrant=True, and not all data ranks have called it, so that zero=3 cannot gather it from all of "
            f"them: checkpoint each block by itself, with use_reentrant=False, or use zero=2"
        )

    def before_forward(self, unit: ReleasedUnit) -> None:
        """Called before each forward of one of a unit's modules."""
        forward = self._forward
        if forward is not None and not is_in_backward():
            call = self._reach(forward, unit)
            if forward.recorded and not torch.is_grad_enabled() and is_in_reentrant_checkpoint():
                call.again = True
                self.differed = True  # from now on, each forward tells whether all ranks make such calls
            self._weights.hold(unit)
            self._begin_next(forward, unit)
        else:
            if is_in_backward():
                if unit.state is State.RELEASED and any(unit in f.uneven for f in self._asked_of):
                    raise self._recomputed(unit)
                self.end_after_backward()
                if unit.state is State.RELEASED:  # else the order holds it, as for what is recomputed
                    for other in self._loose:
                        if not self._kept:
                            self._weights.release(other)
                    self._loose = {unit}
            self._serial += 1
            call = _Call(unit, self._serial)
            self._weights.hold(unit)
        call.first_node = next_node()
        unit.active += 1
        self._running.append(call)

    def after_forward(self, unit: ReleasedUnit, output: Any) -> None:
        """Called after each forward of one of a unit's modules, also after an error."""
        if not self._running or self._running[-1].unit is not unit:
            return  # the hooks before it failed
        call = self._running.pop()
        unit.active -= 1
        follows = self._hook(output, call)
        if is_function_transformed():  # its graph is one of torch.func, which no hook sees
            unit.pinned = True
        if is_in_backward():
            return
        if not unit.active:
            self._weights.rest(unit)
        forward = call.forward
        if forward is None:
            if not self._kept:
                self._weights.release(unit)
            return
        if follows:
            call.follows = call.needed = True
            if not self._asks(forward) and not self._order.needed[call.index - forward.lap]:
                self.differed = True
        self._leave(forward, unit)

    # -- backwards --

    def _hook(self, output: Any, call: _Call) -> bool:
        """Calls :meth:`before_backward` before the backward of `call`. Returns whether one may follow.

        A write makes a view's gradient come from what it is a view of, and the view's own hook is called no more. So
        what the call made itself, its nodes are newer, has a hook of its own.
        """
        if not torch.is_grad_enabled() or output is None:
            return False
        recorded = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        hooked = {id(tensor): tensor for tensor in recorded}
        for tensor in recorded:
            base = base_made_since(tensor, call.first_node)
            if base is not None:
                hooked[id(base)] = base
        if hooked:
            this = weakref.ref(self)

            def hook(gradient: torch.Tensor) -> None:
                order = this()
                if order is not None:
                    order.before_backward(call)

            hook.takes_gradient = False  # type: ignore[attr-defined]
            for tensor in hooked.values():
                tensor.register_hook(hook)
        return bool(recorded)

    def before_backward(self, call: _Call) -> None:
        """Called before the backward of a call, with each gradient of its outputs."""
        self.end_after_backward()
        self._kept = self._kept or torch.is_grad_enabled()
        forward, unit = call.forward, call.unit
        self._complete(call.serial if forward is None else forward.serial, forward)
        if forward is None or unit is self._root:
            if forward is None and unit.state is State.RELEASED:
                self._loose.add(unit)
            self._weights.hold(unit)
            if forward is None:
                return
            if left := self._begin(forward):
                self._weights.begin(left[-1].unit)
            return
        self._go_back(forward, call.index)
        if call.begun:
            return
        call.begun = True
        self._weights.hold(unit)
        left = self._begin(forward)
        if left and left[-1] is call:
            self._begin_previous(left)

    def _begin(self, forward: _Forward) -> list[_Call]:
        if forward.left is None:
            forward.left = list(forward.calls)
            for call in forward.left:
                call.begun = False
            self._open.append(forward)
        return forward.left

    def _begin_previous(self, left: list[_Call]) -> None:
        for earlier in reversed(left):
            if earlier.unit is not left[-1].unit:
                self._weights.begin(earlier.unit)
                return

    def _complete(self, serial: int, forward: _Forward | None) -> None:
        """Completes the forwards after the one with `serial`, which autograd has left."""
        for other in self._open:
            if other is not forward and other.serial > serial:
                self._go_back(other, -1)

    def _go_back(self, forward: _Forward, index: int) -> None:
        """Completes the calls of `forward` after the one at `index`."""
        left = self._begin(forward)
        while left and left[-1].index > index:
            self._pass(left)

    def _pass(self, left: list[_Call]) -> None:
        """Gathers the last call that is `left`, if this rank has not done so, and reduces its gradients."""
        call = left[-1]
        if not call.begun:
            call.begun = True
            self._weights.need(call.unit)
            self._begin_previous(left)
        left.pop()
        self._loose.discard(call.unit)
        if left and left[-1].unit is call.unit:
            return
        if not self._kept:
            self._weights.release(call.unit)
        if not any(other.unit is call.unit for other in left):
            self._reduce(call.unit)

    def end_after_backward(self) -> None:
        """Makes the backward that is running complete all calls when it is over, whatever it reaches."""
        if not is_in_backward():
            return
        number = current_backward()
        if number not in self._ends:
            self._ends.add(number)
            this = weakref.ref(self)

            def end() -> None:
                order = this()
                if order is not None:
                    order._backward_is_over(number)

            call_after_backward(end)

    def _backward_is_over(self, number: int) -> None:
        self._ends.discard(number)
        if self._ends:  # one within another
            return
        self._complete(-1, None)
        for forward in self._open:
            forward.left = None
        self._open = []
        if self._kept and keeps_graph():
            for unit in (self._root, *self._units):
                self._weights.rest(unit)
            return
        self._kept = False
        self._release_all()

    def _release_all(self) -> None:
        self._loose.clear()
        for unit in (self._root, *self._units):
            self._weights.release(unit)


def _tensors(output: Any) -> list[torch.Tensor]:
    found = tree_tensors(output)
    if not found and hasattr(output, "__dict__"):
        found = tree_tensors(list(vars(output).values()))
    return found


# Hooks hold the order weakly: copies of a module keep functions among its hooks as they are.


def _before(order: UnitOrder, unit: ReleasedUnit) -> Callable[..., None]:
    this = weakref.ref(order)

    def before(*_: Any) -> None:
        living = this()
        if living is not None:
            living.before_forward(unit)

    return before


def _after(order: UnitOrder, unit: ReleasedUnit) -> Callable[..., None]:
    this = weakref.ref(order)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        living = this()
        if living is not None:
            living.after_forward(unit, output)

    return after


def _hold(order: UnitOrder, unit: ReleasedUnit) -> Callable[..., None]:
    this = weakref.ref(order)

    def hold(*_: Any) -> None:
        living = this()
        if living is not None:
            living._weights.read(unit)

    return hold
