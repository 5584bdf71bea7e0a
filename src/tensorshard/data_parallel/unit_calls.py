"""The gathers and reductions of ZeRO 3's units, in an order that is the same on all ranks whatever each of them calls.

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
from tensorshard.data_parallel.unit_values import UnitValues
from tensorshard.torch_private.autograd import is_in_backward, is_in_reentrant_checkpoint, keeps_graph
from tensorshard.torch_private.fsdp_calls import (
    call_at_end_of_backward,
    forget_backward,
    gather_only,
    gather_unit,
    gathered_parameters,
    is_gathered,
    is_in_forward,
    is_unsharded,
    prefetch_unit,
    reduce_unit,
    release_unit,
)

_LONGEST = 2048  # a longer sequence is not learned


class AgreedOrder:
    """In which order the ranks gather a model's units, if not all ranks call the same ones.

    All ranks gather along one sequence of units, which is the same everywhere. A rank that calls a unit first takes
    part in the gathers of those that come before it in the sequence and that it did not call; at the end of its
    forward, in those that are left. This needs no messages. If a rank calls a unit that is not in the rest of the
    sequence, the ranks would have to go through it once more. In the first forwards, and whenever the ranks have
    differed before, they ask each other for this at the end of the sequence, and then agree on one that has all calls
    in it.

    Args:
        units: how many there are, in the order of the modules.

    Attributes:
        sequence: numbers of units. A unit that is called several times is in it several times.
        needed: for each of them, whether a backward follows on any rank.
    """

    def __init__(self, units: int) -> None:
        self.sequence = list(range(units))
        self.needed = [True] * units
        self._units = units

    def find(self, unit: int, start: int) -> int | None:
        """The next place of `unit` in the sequence; None if there is none."""
        try:
            return self.sequence.index(unit, start)
        except ValueError:
            return None

    def learn(self, calls: Sequence[Sequence[int]]) -> bool:
        """Takes the shortest sequence that has the calls of all ranks in their order. False: the present one has."""
        merged: list[int] = []
        for one in calls:
            merged = shortest_supersequence(merged, list(one))
            if len(merged) > _LONGEST:
                return False
        present = set(merged)
        for unit in range(self._units):  # not called by any rank yet: after the one before it
            if unit not in present:
                place = merged.index(unit - 1) + 1 if unit - 1 in present else 0
                merged.insert(place, unit)
                present.add(unit)
        if merged == self.sequence:
            return False
        self.sequence, self.needed = merged, [True] * len(merged)
        return True


def shortest_supersequence(one: list[int], other: list[int]) -> list[int]:
    """The shortest sequence that contains both in their order."""
    if not one or not other or one == other:
        return one or other
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i in range(len(one) - 1, -1, -1):
        for j in range(len(other) - 1, -1, -1):
            same = one[i] == other[j]
            lengths[i][j] = lengths[i + 1][j + 1] + 1 if same else max(lengths[i + 1][j], lengths[i][j + 1])
    merged: list[int] = []
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            merged.append(one[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            merged.append(one[i])
            i += 1
        else:
            merged.append(other[j])
            j += 1
    return list(chain(merged, one[i:], other[j:]))


# In how many forwards the ranks ask each other at first. If all make the same calls, no messages are needed later.
_ASKED_FORWARDS = 2


@dataclass(eq=False)
class _Call:
    """One call of a unit, or a unit's place in the sequence that this rank left out."""

    unit: Any
    serial: int
    forward: "_Forward | None" = None
    index: int = 0  # in the forward
    made: bool = True
    needed: bool = False  # whether a backward follows, on any rank
    again: bool = False  # whether reentrant checkpointing will make it again in the backward
    begun: bool = False  # in the backward that is running
    given: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list)  # in the place of parameters


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


class UnitCalls:
    """Stands between FSDP2 and its units; see :class:`~tensorshard.torch_private.fsdp_calls.UnitWatcher`.

    Args:
        model: after ``fully_shard``.
        sum_over_ranks: sums numbers over the data ranks.
        gather_lists: gives the data ranks' lists of numbers, each of the length that is given.
        values: of the units.

    Attributes:
        differed: whether this rank has left out a unit, or has needed another backward, since it was last asked.
        before_call: called before a unit is gathered that is called from outside of a forward; None for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        sum_over_ranks: Callable[[Sequence[float]], list[float]],
        gather_lists: Callable[[list[int], int], list[list[int]]],
        values: UnitValues,
    ) -> None:
        self._model, self._ranks = model, ranks
        self._sum, self._gather_lists, self._values = sum_over_ranks, gather_lists, values
        self.differed = False
        self._root: list[Any] = []
        self._units: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._names: dict[Any, str] = {}
        self._order = AgreedOrder(0)
        self._asked = _ASKED_FORWARDS
        self._careful = False  # the ranks have differed
        self._noted = False  # a step is over
        self._asked_of: weakref.WeakSet[_Forward] = weakref.WeakSet()  # forwards at whose ends the ranks asked
        self._forward: _Forward | None = None
        self._open: list[_Forward] = []  # whose backward has begun
        self._current: dict[Any, _Call] = {}  # the call that each unit is in
        self._hooked: set[Any] = set()
        self._serial = 0
        self._differentiable = False  # the running backward's gradient will be differentiated
        self._kept = False  # all that is gathered stays so, for a second backward

    def add(self, name: str, unit: Any, is_root: bool) -> None:
        """Adds a unit, in the order of the model."""
        if unit in self._names:
            return
        self._names[unit] = name
        if is_root:
            self._root.append(unit)
        else:
            self._numbers[unit] = len(self._units)
            self._units.append(unit)
        self._order = AgreedOrder(len(self._units))

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model is running."""
        return self._forward is not None

    def take_note(self, differed: bool) -> None:
        """Called on all ranks with whether any of them was in :attr:`differed`."""
        self.differed = False
        self._noted = True
        self._careful = self._careful or differed

    def reset(self) -> None:
        """Called after a forward or backward has failed on every rank."""
        self._forward, self._open = None, []
        self._current.clear()
        self._asked_of.clear()
        self._differentiable = self._kept = False

    # -- forwards --

    def begin_forward(self) -> None:
        """Called before each forward of the model."""
        if self._forward is None and not is_in_backward():
            self._serial += 1
            self._forward = _Forward(self._serial, torch.is_grad_enabled())

    def end_forward(self, failed: bool) -> None:
        """Called after each forward of the model: takes part in the gathers that are left."""
        forward, self._forward = self._forward, None
        if forward is None:
            return
        for unit in self._root:
            self._values.show_shards(unit)
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

    def _asks(self, forward: _Forward) -> bool:
        """Whether the ranks ask each other at the end of this time through the sequence."""
        asks = self._asked > 0 or self._careful or (forward.recorded and not self._noted)
        return asks and self._ranks > 1 and not world().is_simulated

    def _reach(self, forward: _Forward, unit: Any) -> _Call:
        """Takes part in the gathers before the next one of `unit` in the sequence."""
        number = self._numbers[unit]
        place = self._order.find(number, forward.place)
        if place is None:
            self._join(forward, len(self._order.sequence))
            if self._asks(forward):
                self._ask(forward, more=True)
            elif self._ranks > 1 and not world().is_simulated:
                raise CollectiveMismatchError(
                    f"this rank calls {self._names[unit]} in another order than the data ranks did in the first steps, "
                    f"and zero=3 gathers the parameters of each unit from all ranks, in one order: call the modules in "
                    f"the same order in each step (leaving some out is fine), or use zero=2"
                )
            forward.place, forward.lap = 0, len(forward.calls)
            place = self._order.find(number, 0)
            assert place is not None
        self._join(forward, place)
        forward.place = place + 1
        return self._note(forward, unit, made=True)

    def _note(self, forward: _Forward, unit: Any, made: bool) -> _Call:
        self._serial += 1
        call = _Call(unit, self._serial, forward, len(forward.calls), made)
        if forward.recorded and not made:
            call.needed = self._order.needed[len(forward.calls) - forward.lap]
        forward.calls.append(call)
        return call

    def _join(self, forward: _Forward, place: int) -> None:
        for number in self._order.sequence[forward.place : place]:
            unit = self._units[number]
            self._note(forward, unit, made=False)
            self.differed = self.differed or not self._asks(forward)
            if not is_unsharded(unit):
                gather_only(unit)
                if not self._kept:
                    release_unit(unit)
        forward.place = max(place, forward.place)

    def _ask(self, forward: _Forward, more: bool) -> bool:
        """Asks all ranks, at the end of the sequence, whether one of them has to go through it again.

        The ranks also tell each other for which calls a backward follows.

        Raises:
            CollectiveMismatchError: on all ranks, if some of them made a call that will be made again in the backward.
        """
        lap = forward.calls[forward.lap :]
        numbers = [[float(call.needed and call.made), float(call.made), float(call.again)] for call in lap]
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

    def _recomputed(self, unit: Any) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"{self._names[unit]} is called again in the backward, as torch.utils.checkpoint does with "
            f"use_reentrant=True, and not all data ranks have called it, so that zero=3 cannot gather it from all of "
            f"them: checkpoint each block by itself, with use_reentrant=False, or use zero=2"
        )

    def before_forward(self, unit: Any, original: Callable[..., Any], *args: Any) -> Any:
        if not is_in_forward(unit):
            self._values.before_gather(unit)
            forward = self._forward
            if forward is not None and unit in self._numbers and not is_in_backward():
                call = self._current[unit] = self._reach(forward, unit)
                if forward.recorded and not torch.is_grad_enabled() and is_in_reentrant_checkpoint():
                    call.again = True
                    self.differed = True  # from now on, each forward tells whether all ranks make such calls
            else:
                if is_in_backward() and not is_gathered(unit) and any(unit in f.uneven for f in self._asked_of):
                    raise self._recomputed(unit)
                self._serial += 1
                self._current[unit] = _Call(unit, self._serial)
            self._current[unit].given = self._values.given(unit)
        result = original(*args)
        self._values.after_gather(unit)
        return result

    def after_forward(self, unit: Any, original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        if unit not in self._root:
            self._values.show_shards(unit)
        return result

    def inputs(self, unit: Any) -> Any:
        """The call whose backward is over when those of its inputs are due."""
        return self._current.get(unit)

    def outputs(self, unit: Any, backward_follows: bool) -> Any:
        call = self._current.pop(unit, None)
        if call is None or unit in self._root:
            self._serial += 1
            return _Call(unit, self._serial, self._forward, given=[] if call is None else call.given)
        if backward_follows and call.forward is not None:
            call.needed = True
            if not self._asks(call.forward) and not self._order.needed[call.index - call.forward.lap]:
                self.differed = True
        return call

    # -- backwards --

    def before_backward(self, unit: Any, call: Any, original: Callable[[], None]) -> None:
        if torch.is_grad_enabled():
            self._differentiable = self._kept = True
        forward = call.forward
        if forward is not None and forward.left is None:
            self._values.check_places()
        self._complete(call.serial if forward is None else forward.serial, forward)
        if forward is None or unit in self._root or unit is None:
            original()
            if unit is not None:
                self._values.show_copies(unit, call.given)
            if forward is not None:
                left = self._begin(forward)
                if left:
                    self._prefetch(left[-1], unit)
            return
        self._go_back(forward, call.index)
        call.begun = True
        original()
        self._values.show_copies(unit, call.given)
        left = self._begin(forward)
        if len(left) > 1 and left[-1] is call:
            self._prefetch(left[-2], unit)

    def after_backward(self, unit: Any, call: Any) -> None:
        if call is None or call.forward is None or unit in self._root:
            if call is not None:
                self._complete(call.serial, None)
            self._reduce(unit)
            return
        forward = call.forward
        self._complete(forward.serial, forward)
        self._go_back(forward, call.index)
        left = self._begin(forward)
        if left and left[-1] is call:
            self._pass(left)

    def _begin(self, forward: _Forward) -> list[_Call]:
        if forward.left is None:
            forward.left = list(forward.calls)
            for call in forward.left:
                call.begun = False
            self._open.append(forward)
        return forward.left

    def _complete(self, serial: int, forward: _Forward | None) -> None:
        """Completes the forwards after the one with `serial`, which autograd has left."""
        if self._open:
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
            gather_unit(call.unit)
            if len(left) > 1:
                self._prefetch(left[-2], call.unit)
        left.pop()
        self._reduce(call.unit)

    def _prefetch(self, call: _Call, unit: Any) -> None:
        if call.unit is not unit:
            prefetch_unit(call.unit)

    def _reduce(self, unit: Any) -> None:
        if not self._differentiable:
            reduce_unit(unit)

    def backward_is_over(self, original: Callable[[], None]) -> None:
        self._complete(-1, None)
        for forward in self._open:
            forward.left = None
        self._open = []
        if self._differentiable:
            self._differentiable = False
            forget_backward(self._model)
            for unit in (*self._root, *self._units):
                self._values.show_shards(unit)
            return
        ends = self._kept and not keeps_graph()
        original()
        if ends:
            self.release()
        elif self._kept:
            for unit in (*self._root, *self._units):
                self._values.show_shards(unit)

    def release(self) -> None:
        """Shards all units that were kept for a second backward."""
        if self._kept:
            self._kept = False
            for unit in (*self._root, *self._units):
                release_unit(unit)

    def gradient_arrived(self) -> None:
        """Called when a parameter gets a gradient, perhaps through none of the units' outputs."""
        call_at_end_of_backward(self._model)

    def may_release(self, unit: Any) -> bool:
        return not self._kept

    def gathered(self, unit: Any, group: Any) -> None:
        self._values.gathered(group)
        if unit in self._root:
            for copy in gathered_parameters(group):
                if copy.requires_grad and copy not in self._hooked:
                    self._hooked.add(copy)
                    copy.register_post_accumulate_grad_hook(_end_with(weakref.ref(self)))

    def releasing(self, group: Any) -> None:
        self._values.releasing(group)


def _end_with(calls: weakref.ref[UnitCalls]) -> Callable[[torch.Tensor], None]:
    """A hook, on a tensor that lives as long as the model: a reference the other way round would keep both forever."""

    def hook(_: torch.Tensor) -> None:
        living = calls()
        if living is not None:
            living.gradient_arrived()

    return hook
